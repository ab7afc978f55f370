"""SGLang's own plugin loader with ours installed, again and again in one process; prints what was hooked as JSON.

Runs in the rig's environment. ``found[case]`` is a list: the targets in the engine's registry, then what was logged.
"""

import json
import logging
import os
import sys

from sglang.srt import plugins
from sglang.srt.plugins.hook_registry import HookRegistry

import sglang

found = {}


class Lines(logging.Handler):
    """Keeps the texts of warnings and worse."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


lines = Lines()
logging.getLogger().addHandler(lines)


def load(case):
    """What a process of the engine does when it starts."""
    plugins._plugins_loaded = False
    HookRegistry._hooks.clear()
    lines.texts = []
    plugins.load_plugins()
    found[case] = [sorted(HookRegistry._hooks), list(lines.texts)]


def without(module, case):
    """The same with a module of ours that cannot be imported."""
    kept = sys.modules.pop(module, None)
    sys.modules[module] = None
    load(case)
    del sys.modules[module]
    if kept is not None:
        sys.modules[module] = kept


endpoint = os.environ.pop("HICACHE_SIDECAR")
load("unset")
found["unset"].append(sorted(name for name in sys.modules if name.startswith("hicache_hooks.sglang.")))
os.environ["HICACHE_SIDECAR"] = endpoint
without("hicache_hooks.sglang.plugin", "no entry point")
without("hicache_hooks.sglang.versions", "broken import")
version, sglang.__version__ = sglang.__version__, "0.5.19"
load("old")
sglang.__version__ = version
from sglang.srt.managers.scheduler_components.request_receiver import SchedulerRequestReceiver as Receiver  # noqa: E402

pull = Receiver._pull_raw_reqs
del Receiver._pull_raw_reqs
load("no pull")
Receiver._pull_raw_reqs = pull
os.environ["SGLANG_PLUGINS"] = "another"
load("not named")
del os.environ["SGLANG_PLUGINS"]
load("whole")

from hicache_hooks.sglang import versions  # noqa: E402

found["whole"].append(versions.not_hooked())
print(json.dumps(found))
