"""The plugin's entry point: registers hooks with SGLang's own registry; one call per engine process.

``load_plugins`` runs in the launcher, in every scheduler, in the data-parallel controller and in the detokenizer, and
swallows what a plugin raises. So does this module, louder: an engine must start whatever happens here. A hook whose
target does not resolve is only logged by the engine too; therefore every target is looked up before anything is
registered, and every scheduler checks its hooks again once it is built (``Capabilities.problems`` in its hello).

Nothing is imported from, or registered with, the engine unless ``HICACHE_SIDECAR`` names a sidecar.
"""

import logging
import os
import secrets
from collections.abc import MutableMapping
from typing import Any

log = logging.getLogger(__name__)

ENV = "HICACHE_SIDECAR"
LAUNCH_ENV = "HICACHE_LAUNCH"  # made by the first process of a launch, inherited by all others


def entry(environ: MutableMapping[str, str] = os.environ) -> None:
    """Entry point ``hicache_hooks`` of group ``sglang.srt.plugins``. Never raises."""
    endpoint = environ.get(ENV, "").strip()
    if not endpoint:
        return
    try:
        _register(endpoint, environ)
    except Exception:
        log.exception("hicache hooks: nothing is hooked; the engine serves without a sidecar")


def _register(endpoint: str, environ: MutableMapping[str, str]) -> None:
    from hicache_hooks.sglang import frontend, handover, pull, versions

    refusal = versions.too_old(versions.engine_version())
    if refusal:
        log.error("hicache hooks: %s", refusal)
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    missing = versions.missing_names()
    if missing:
        log.error("hicache hooks: this SGLang lacks %s; nothing is hooked", ", ".join(missing))
        return
    launch = environ.setdefault(LAUNCH_ENV, secrets.token_hex(8))
    name = environ.get("HICACHE_ENGINE_ID", "sglang")[:128]

    def scheduler_made(_result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        _scheduler_made(scheduler, endpoint, name, launch)

    HookRegistry.register(versions.INIT, scheduler_made, HookType.AFTER)
    HookRegistry.register(versions.PULL, pull.on_pull, HookType.AFTER)
    HookRegistry.register(versions.CREATE, handover.create_backend, HookType.AROUND)
    frontend.install(endpoint, engine_id=name, incarnation=launch)


def _scheduler_made(scheduler: Any, endpoint: str, name: str, launch: str) -> None:
    """AFTER hook of the scheduler's constructor."""
    try:
        from hicache_hooks.sglang import pull
        from hicache_hooks.sglang.rank import SchedulerRank

        pull.install(SchedulerRank(scheduler, endpoint, engine_id=name, incarnation=launch).pull)
    except Exception:
        log.exception("hicache hooks: this scheduler has no hook; it serves without a sidecar")
        _take_no_part(scheduler)


def _take_no_part(scheduler: Any) -> None:
    """Commands that this world's leader broadcasts all the same (the end of an operation of an engine before) do
    nothing here: an unknown kind of request would end the scheduler."""
    try:
        from hicache_hooks.sglang.world import BroadcastWorld

        BroadcastWorld(leader=False, ranks=1).bind(scheduler, lambda command: None)
    except Exception:
        log.exception("hicache hooks: nor does it take the sidecar's commands")
