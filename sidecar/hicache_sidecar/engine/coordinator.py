"""The coordinator: the one ``core.service.Service`` of the daemon, and the engine side's entry point ``serve``.

How the daemon starts it::

    coordinator = await nursery.start(
        partial(serve, runtime_dir=path, engine_id=id_or_None, journal=journal, settings=EngineSettings(...),
                render_metrics=render))

``serve`` returns through ``task_status`` once ``hooks.sock`` is bound; it runs until it is cancelled. The daemon
holds the locks on the state and runtime directories before it calls it. ``coordinator.counters`` and
``coordinator.registry`` are what ``obs/metrics.py`` renders; ``render_metrics(coordinator, accept)`` is that function.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import trio

from hicache_sidecar.engine.settings import EngineSettings

RenderMetrics = Callable[["Coordinator", str], tuple[bytes, str]]


class Coordinator:
    """Implements ``core.service.Service``."""


async def serve(
    *,
    runtime_dir: Path,
    engine_id: str | None,
    journal: Any,
    settings: EngineSettings | None = None,
    render_metrics: RenderMetrics | None = None,
    task_status: trio.TaskStatus[Coordinator] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Bind ``runtime_dir/hooks.sock`` and serve the engine until cancelled.

    Args:
        engine_id: the engine to serve; None lets the first hello bind it.
        journal: an opened ``store.journal.Journal``.
        render_metrics: makes the body of /metrics.
    """
    raise NotImplementedError("first the contract; the body follows in the next commits")
