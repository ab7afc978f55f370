"""The plugin's entry point: registers hooks with SGLang's own registry; one call per engine process.

``load_plugins`` runs in the launcher, in every scheduler, in the data-parallel controller and in the detokenizer, and
swallows what a plugin raises. So does this function, louder: an engine must start whatever happens here, and the
processes that can tell the sidecar do (``Capabilities.problems`` in the hello of a rank, ``frontend`` for the front).

Nothing is imported from, or registered with, the engine unless ``HICACHE_SIDECAR`` names a sidecar.
"""

import logging
import os
from collections.abc import Mapping

log = logging.getLogger(__name__)

ENV = "HICACHE_SIDECAR"


def entry(environ: Mapping[str, str] = os.environ) -> None:
    """Entry point ``hicache_hooks`` of group ``sglang.srt.plugins``. Never raises."""
    endpoint = environ.get(ENV, "").strip()
    if not endpoint:
        return
    try:
        _register(endpoint)
    except Exception:
        log.exception("hicache hooks: nothing is hooked; the engine serves without a sidecar")


def _register(endpoint: str) -> None:
    """Register every hook; what a process does not have is never met in it."""
    del endpoint
