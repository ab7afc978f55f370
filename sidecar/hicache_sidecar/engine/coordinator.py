"""The coordinator: the one ``core.service.Service`` of the daemon, and the engine side's entry point ``serve``.

How the daemon starts it::

    coordinator = await nursery.start(
        partial(serve, runtime_dir=path, engine_id=id_or_None, journal=journal, settings=EngineSettings(...),
                render_metrics=render))

``serve`` returns through ``task_status`` once ``hooks.sock`` is bound; it runs until it is cancelled. The daemon
holds the locks on the state and runtime directories before it calls it. ``coordinator.counters`` and
``coordinator.registry`` are what ``obs/metrics.py`` renders; ``render_metrics(coordinator, accept)`` is that function.

This module only says who answers what; the work is in ``changes`` (attach, detach, policy), ``direct`` (bypass,
clear, drain), ``past`` (operations, history, roll-back, resolve), ``restart`` (recovery, convergence) and
``failover`` (policies).
"""

import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import trio

from hicache_proto import __version__, api
from hicache_proto.errors import InvalidRequest
from hicache_proto.failover import FailoverRequest, SetFailoverRequest
from hicache_proto.hooklink import Describe, Notice
from hicache_sidecar.core.actor import Actor, authorize
from hicache_sidecar.core.faults import OFF, Faults
from hicache_sidecar.core.redaction import redact_text
from hicache_sidecar.core.service import Progress
from hicache_sidecar.engine import status
from hicache_sidecar.engine.changes import Changes
from hicache_sidecar.engine.context import Context
from hicache_sidecar.engine.counters import Counters
from hicache_sidecar.engine.direct import Direct
from hicache_sidecar.engine.epochs import StoreEpochs
from hicache_sidecar.engine.events import EventHub
from hicache_sidecar.engine.failover import FailoverDriver
from hicache_sidecar.engine.failover_api import document as failover_document
from hicache_sidecar.engine.failover_api import set_failover
from hicache_sidecar.engine.fanout import FanOut, RankAnswer
from hicache_sidecar.engine.frontends import Frontends
from hicache_sidecar.engine.link import HookLink
from hicache_sidecar.engine.past import Past
from hicache_sidecar.engine.registry import Registry, Session
from hicache_sidecar.engine.restart import Restart
from hicache_sidecar.engine.settings import EngineSettings
from hicache_sidecar.engine.stuck import StuckThreads
from hicache_sidecar.engine.transact import Transactor
from hicache_sidecar.store.journal import Journal

log = logging.getLogger("hicache_sidecar.engine")

RenderMetrics = Callable[["Coordinator", str], tuple[bytes, str]]

FRESH_S = 1.0  # how long ?fresh=1 and the idle report wait for a rank; who is later is shown with its age
HOOKS_SOCKET = "hooks.sock"


class Coordinator:
    """Implements ``core.service.Service``."""

    def __init__(self, ctx: Context, render_metrics: RenderMetrics | None = None) -> None:
        self.ctx = ctx
        self._render = render_metrics
        self.changes = Changes(ctx, Transactor(ctx))
        self.direct = Direct(ctx, self.changes)
        self.past = Past(ctx, self.changes)
        self.restart = Restart(ctx, self.changes)
        self.failover = FailoverDriver(ctx, self.changes, self.direct)
        self.epochs = StoreEpochs(ctx.registry, ctx.hub)
        self.stuck = StuckThreads(ctx.registry, ctx.hub)
        ctx.registry.on_session.append(self._show_session)
        ctx.registry.on_notice.append(self._show_notice)

    @property
    def registry(self) -> Registry:
        """Who is connected."""
        return self.ctx.registry

    @property
    def counters(self) -> Counters:
        """Numbers since the start."""
        return self.ctx.counters

    @property
    def engine_id(self) -> str | None:
        """The engine that this sidecar serves, once known."""
        return self.ctx.registry.engine_id

    # ---- requests

    async def handle(self, request: api.ApiRequest, actor: Actor, progress: Progress) -> api.Document:
        """Authorise, run, answer; see ``core.service``."""
        authorize(actor, request)
        match request:
            case api.StatusRequest():
                if request.fresh:
                    await self.ctx.refresh(FRESH_S)
                return self.ctx.status()
            case api.IdleRequest():
                return await self._idle()
            case api.RanksRequest():
                return status.ranks_document(self.ctx.registry)
            case api.BackendsRequest():
                return await self._backends()
            case api.AttachRequest() | api.DetachRequest() | api.PolicyRequest():
                return await self.changes.change(request, actor, progress)
            case api.BypassRequest():
                return await self.failover.bypass(request)
            case api.ClearRequest():
                return await self.direct.clear(request, actor, progress)
            case api.DrainRequest():
                return await self.direct.drain(request, actor, progress)
            case api.ResumeRequest():
                return await self.direct.resume()
            case api.OperationsRequest():
                return self.past.operations(request)
            case api.CancelRequest():
                return await self.past.cancel(request)
            case api.HistoryRequest():
                return self.past.history()
            case api.RollbackRequest():
                return await self.past.rollback(request, actor, progress)
            case api.ResolveRequest():
                return await self.past.resolve(request, actor, progress)
            case FailoverRequest():
                return failover_document(self.failover)
            case SetFailoverRequest():
                return await set_failover(self.failover, request, actor)
            case api.WatchRequest():
                raise InvalidRequest("watch is a stream: the transport serves it")

    async def _idle(self) -> api.IdleDocument:
        if not self.ctx.registry.live:
            self.ctx.require_engine()
        await self.ctx.refresh(FRESH_S)
        return status.idle_document(self.ctx.registry)

    async def _backends(self) -> api.BackendsDocument:
        """Known backends as the ranks' hosts know them; what is missing on any rank is missing."""
        ctx = self.ctx
        if not ctx.registry.live:
            ctx.require_engine()
        answers = await ctx.ask_all(Describe(), trio.current_time() + ctx.settings.validate_s)
        return api.BackendsDocument(backends=_merge_backends(answers))

    def watch(self, request: api.WatchRequest, actor: Actor) -> AsyncIterator[api.EventDocument]:
        """A snapshot, then numbered events, until the caller closes the iterator."""
        authorize(actor, request)
        return self.ctx.hub.follow(lambda: dict(msgspec.to_builtins(self.ctx.status())), request.last_event_id)

    async def leave(self, within_s: float) -> None:
        """The daemon stops: see ``Context.leave``."""
        await self.ctx.leave(within_s)

    # ---- health

    def live(self) -> dict[str, Any]:
        """/healthz: the loop turns."""
        return {"live": True, "version": __version__}

    def ready(self) -> tuple[bool, dict[str, Any]]:
        """/readyz: topology complete and recovery ended, with the reasons when not."""
        registry = self.ctx.registry
        facts: dict[str, Any] = {
            "expected_ranks": registry.expected,
            "missing_ranks": registry.missing_ranks,
            "recovering": self.ctx.recovering,
        }
        if not registry.complete:
            facts["reason"] = "ranks are missing" if registry.live else "no rank is connected"
        elif self.ctx.recovering:
            facts["reason"] = self.ctx.recovering
        return registry.complete and not self.ctx.recovering, facts

    def metrics(self, accept: str) -> tuple[bytes, str]:
        """/metrics: body and content type."""
        if self._render is None:
            return b"", "text/plain; charset=utf-8"
        return self._render(self, accept)

    def _show_session(self, session: Session) -> None:
        self.ctx.hub.publish(
            "rank",
            rank=session.rank,
            role=session.hello.role,
            pid=session.hello.pid,
            epoch=session.hello.epoch,
            connected=session.alive,
            why=session.why_lost,
        )

    def _show_notice(self, session: Session, notice: Notice) -> None:
        """Drift that a rank noticed by itself, and the end of a lease: in the log and the events."""
        if notice.kind != "idle":  # that one was asked for
            log.warning("rank %d: %s: %s", session.rank, notice.kind, redact_text(notice.detail))
            self.ctx.hub.publish(notice.kind, rank=session.rank, detail=redact_text(notice.detail))


def _merge_backends(answers: dict[int, RankAnswer]) -> list[dict[str, Any]]:
    merged: dict[str, dict[str, Any]] = {}
    for rank, told in answers.items():
        if told.answer is None or told.error is not None:
            continue
        for entry in (told.answer.data or {}).get("backends", []):
            name = str(entry.get("name"))
            have = merged.setdefault(name, dict(entry))
            if not entry.get("available", True) and have.get("available", True):
                have["available"] = False
                have["missing"] = f"rank {rank}: {entry.get('missing') or 'not available'}"
    return [merged[name] for name in sorted(merged)]


async def serve(
    *,
    runtime_dir: Path,
    engine_id: str | None,
    journal: Journal,
    settings: EngineSettings | None = None,
    render_metrics: RenderMetrics | None = None,
    faults: Faults = OFF,
    task_status: trio.TaskStatus[Coordinator] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Bind ``runtime_dir/hooks.sock`` and serve the engine until cancelled.

    Args:
        engine_id: the engine to serve; None lets the first hello bind it.
        journal: an opened ``store.journal.Journal``.
        render_metrics: makes the body of /metrics.
        faults: fault points that are to fire, for tests.

    Raises:
        OSError: the socket cannot be bound.
        JournalFailed: a write or fsync failed; the process must end, the next start recovers.
    """
    settings = settings or EngineSettings()
    counters = Counters()
    link = HookLink(counters, faults=faults)
    registry = Registry(
        link=link, settings=settings, counters=counters, engine_id=engine_id, sidecar_version=__version__
    )
    async with trio.open_nursery() as nursery:
        ctx = Context(
            registry=registry,
            fanout=FanOut(link),
            book=journal,
            settings=settings,
            counters=counters,
            hub=EventHub(),
            nursery=nursery,
            faults=faults,
        )
        coordinator = Coordinator(ctx, render_metrics)
        path = runtime_dir / HOOKS_SOCKET
        await nursery.start(lambda task_status: link.serve(  # start passes task_status by keyword
            path, mode=settings.socket_mode, allow_uids=settings.allow_uids, task_status=task_status
        ))  # fmt: skip
        nursery.start_soon(registry.watch)
        nursery.start_soon(coordinator.restart.run)
        nursery.start_soon(Frontends(ctx).run)
        nursery.start_soon(coordinator.failover.run)
        task_status.started(coordinator)
