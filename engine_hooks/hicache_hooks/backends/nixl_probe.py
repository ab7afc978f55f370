"""What of NIXL is there: the package, its version, and whether a plugin can really be created.

``get_plugin_list`` names plugin *files*: GDS is on the list of hosts without a driver. Only ``create_backend`` tells
(F66), and as a driver may hang in it, plugins that need one are asked in a child process with a deadline.
"""

import importlib
import importlib.metadata
import importlib.util
import json
from typing import Any

from hicache_hooks.backends import child
from hicache_proto.errors import BackendUnavailable

PACKAGES = ("nixl", "nixl_cu12", "nixl_cu13")  # in this order; the first is a front for one of the others
# 1.3.2 and 1.4.1 report a short file as read, with the tail of the page left stale.
MIN_VERSION = (1, 5, 1)
PROBE_S = 15.0  # importing the package takes 0.1 s once the disk is warm, and seconds before
NEED_DRIVER = ("GDS", "GDS_MT", "3FS")
_CHILD = """
import importlib, json, sys
name, plugin, parameters = sys.argv[1], sys.argv[2], json.loads(sys.stdin.read())
api = importlib.import_module(name + "._api")
api.nixl_agent("probe", api.nixl_agent_config(backends=[])).create_backend(plugin, parameters)
print("created")
"""


def package() -> str | None:
    """Import name of the installed package, not imported; None when there is none."""
    for name in PACKAGES:
        try:
            if importlib.util.find_spec(f"{name}._api") is not None:
                return name
        except ImportError:  # the front without what is behind it
            continue
    return None


def load() -> Any:
    """NIXL's Python interface.

    Raises:
        BackendUnavailable: not installed, or its libraries cannot be loaded.
    """
    name = package()
    if name is None:
        raise BackendUnavailable("nixl is not installed (extra 'nixl')", details={"missing": ["nixl"]})
    try:
        return importlib.import_module(f"{name}._api")
    except (ImportError, OSError) as exc:
        kind = type(exc).__name__
    raise BackendUnavailable(f"nixl cannot be loaded: {kind}", details={"missing": [name]})


def version() -> tuple[int, ...] | None:
    """Of the installed distribution; None when it has no metadata (built from source)."""
    for name in ("nixl-cu12", "nixl-cu13", "nixl"):
        try:
            text = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        digits = text.split("+")[0].split(".")
        return tuple(int(part) for part in digits[:3] if part.isdigit())
    return None


def missing() -> list[str]:
    """What this host lacks for any plugin."""
    if package() is None:
        return ["nixl (extra 'nixl')"]
    found = version()
    if found is not None and found < MIN_VERSION:
        wanted = ".".join(map(str, MIN_VERSION))
        return [f"nixl >= {wanted} ({'.'.join(map(str, found))} is installed and reports short files as read)"]
    return []


def require_plugin(plugin: str, parameters: dict[str, str]) -> None:
    """Do nothing for plugins that need no driver; probe the others, until it worked once.

    Raises:
        BackendUnavailable: it cannot be created here (``details.reason`` ``plugin_unavailable``), or the probe hung
            (``probe_timeout``).
    """
    if plugin in NEED_DRIVER:
        asked = (plugin, json.dumps(parameters, sort_keys=True))
        reason = "" if asked in _created else _probe(*asked)
        if not reason:
            _created.add(asked)
        else:
            raise BackendUnavailable(
                f"nixl's plugin {plugin.lower()} cannot be created on this host: {reason.replace('_', ' ')}",
                details={"reason": reason, "missing": [f"driver or library of nixl's plugin {plugin}"]},
            )


_created: set[tuple[str, str]] = set()  # what worked once works on; what failed may be mended meanwhile


def _probe(plugin: str, parameters: str) -> str:
    done = child.ask(_CHILD, [package() or "nixl", plugin], parameters, PROBE_S)
    if done is None:
        return "probe_timeout"
    said, code = done
    return "" if code == 0 and "created" in said else "plugin_unavailable"
