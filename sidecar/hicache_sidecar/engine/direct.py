"""Commands beside the transaction: bypass, clear, the manual drain and its end.

None of them moves a rank to another state, so none needs the table; bypass works at any moment, also while an
operation runs. Clear and drain are jobs: they take the one slot, have an id and go on when their client leaves.
"""

import math
from collections.abc import Mapping

import msgspec
import trio

from hicache_proto import api
from hicache_proto.errors import DeadlineExceeded, InvalidRequest, NotIdle
from hicache_proto.hooklink import Bypass, ClearNamespace, Hold, Release, WatchIdle
from hicache_proto.model import State
from hicache_sidecar.core.actor import Actor
from hicache_sidecar.core.service import Progress
from hicache_sidecar.engine import causes, idle, status
from hicache_sidecar.engine.changes import Changes, refuse_by_answers
from hicache_sidecar.engine.context import Context
from hicache_sidecar.engine.fanout import RankAnswer
from hicache_sidecar.engine.goals import seconds
from hicache_sidecar.engine.operation import Job
from hicache_sidecar.engine.rows import DRAIN_HOLD
from hicache_sidecar.engine.waiting import Stalls


class Direct:
    """Bypass, clear, drain, resume over one context."""

    def __init__(self, ctx: Context, changes: Changes) -> None:
        self.ctx, self.changes = ctx, changes

    # ---- bypass

    async def bypass(self, request: api.BypassRequest) -> api.BypassAnswer:
        """Reads miss, writes are skipped, on every rank, at once; under load and during an operation as well.

        Raises:
            NoEngine: no rank is connected. HicacheError: a rank refused; the others did as told.
        """
        ctx = self.ctx
        if not ctx.registry.live:
            ctx.require_engine()
        states = [session.report.state for session in ctx.registry.live.values()]
        was = [state.bypass for state in states]
        vain = request.enabled and all(state.backend is None for state in states)
        answers = await ctx.ask_all(Bypass(enabled=request.enabled), trio.current_time() + ctx.settings.call_s)
        _refuse(answers)
        ctx.hub.publish("bypass", enabled=request.enabled)
        word = "on" if request.enabled else "off"
        missing = ctx.registry.missing_ranks
        rows = [api.RankResult(rank=rank, success=True, message=f"bypass {word}") for rank in answers]
        rows += [api.RankResult(rank=rank, success=False, message="not connected") for rank in missing]
        return api.BypassAnswer(
            success=not missing,
            changed=any(before != request.enabled for before in was),
            bypass=request.enabled,
            message=f"bypass is {word} on {len(answers)} ranks"
            + ("; nothing is attached, and a store that is attached later is not bypassed" if vain else "")
            + (f"; not connected: {', '.join(map(str, missing))}" if missing else ""),
            ranks=rows,
        )

    # ---- clear

    async def clear(self, request: api.ClearRequest, actor: Actor, progress: Progress) -> api.Document:
        """Delete this engine's namespace from the attached store, nothing else (F68, F118).

        Raises:
            InvalidRequest: nothing attached, or ``confirm`` is not the namespace. NotIdle: busy and not bypassed.
        """
        ctx = self.ctx
        timeout_s = seconds("timeout_s", request.timeout_s)
        ctx.require_engine()
        job = self._job("clear", actor, timeout_s)
        ctx.claim(job)
        return await self.changes.run(job, lambda j: self._clear(j, request.confirm), progress)

    async def _clear(self, job: Job, confirm: str) -> api.ClearAnswer:
        ctx = self.ctx
        states = {rank: session.report.state for rank, session in ctx.registry.live.items()}
        names = {rank: state.namespace for rank, state in states.items()}
        if any(state.backend is None for state in states.values()):
            raise InvalidRequest("nothing is attached: there is nothing to clear", details={"reason": "detached"})
        if confirm not in names.values():
            raise InvalidRequest(
                "confirm must be the namespace that status shows",
                details={"reason": "confirm", "namespaces": sorted(set(names.values()))},
            )
        if not all(state.bypass for state in states.values()):
            await self.changes.probe(job, "clear")
        job.enter("clear")
        answers: dict[int, RankAnswer] = {}

        async def one(rank: int, session: str) -> None:
            body = ClearNamespace(namespace=names[rank])
            answers[rank] = await ctx.fanout.ask_one(rank, session, 0, body, job.deadline)

        async with trio.open_nursery() as nursery:
            for rank, session in ctx.sessions().items():
                nursery.start_soon(one, rank, session)
        refuse_by_answers(job, dict(sorted(answers.items())))
        deleted = 0
        for rank, told in sorted(answers.items()):
            count = int(((told.answer.data if told.answer else None) or {}).get("deleted", 0))
            deleted += count
            job.result(rank, True, f"deleted {count}")
        return api.ClearAnswer(
            success=True,
            deleted=deleted,
            namespace=confirm,
            message=f"deleted {deleted} pages of {confirm}",
            ranks=job.results(),
        )

    # ---- drain

    async def drain(self, request: api.DrainRequest, actor: Actor, progress: Progress) -> api.Document:
        """Close admission on every rank and wait for idle; it stays closed for ``hold_s`` (F10).

        Raises:
            DeadlineExceeded: still busy at the deadline; admission is open again.
        """
        timeout_s, hold_s = seconds("timeout_s", request.timeout_s), seconds("hold_s", request.hold_s)
        self.ctx.require_engine()
        job = self._job("drain", actor, timeout_s, request.reason)
        self.ctx.claim(job)
        return await self.changes.run(job, lambda j: self._drain(j, timeout_s, hold_s), progress)

    async def _drain(self, job: Job, timeout_s: float, hold_s: float) -> api.DrainAnswer:
        ctx = self.ctx
        cancelled = trio.Event()

        def cancel() -> bool:
            cancelled.set()
            ctx.registry.changed.unpark_all()
            return True

        job.on_cancel = cancel
        job.enter("drain")
        done = False
        try:
            refuse_by_answers(job, await self._hold(timeout_s + ctx.settings.call_s))
            await ctx.ask_all(WatchIdle(for_s=timeout_s), trio.current_time() + ctx.settings.call_s)
            await self._until_idle(job, cancelled)
            refuse_by_answers(job, await self._hold(hold_s))
            done = True
        finally:
            if not done:
                with trio.CancelScope(shield=True):  # admission opens whatever happened; the lease is the last resort
                    await self._release()
        for rank in ctx.registry.live:
            job.result(rank, True, "drained")
        return api.DrainAnswer(
            success=True,
            state=State.DRAINING,
            message=f"idle; admission is closed for {hold_s:g} s, or until resume",
            ranks=job.results(),
            hold_s=hold_s,
        )

    async def _until_idle(self, job: Job, cancelled: trio.Event) -> None:
        ctx, stalls = self.ctx, Stalls()
        while not cancelled.is_set():
            reports = {rank: session.report.idle for rank, session in ctx.registry.live.items()}
            idle.check_complete(reports)
            if ctx.registry.complete and all(idle.is_idle(report) for report in reports.values()):
                return
            ctx.require_engine()
            before = [(b.rank, b.name, b.count, idle.stalled(b)) for b in job.blocked_by]
            job.blocked_by = blocked = stalls.judge(reports, trio.current_time())
            if [(b.rank, b.name, b.count, idle.stalled(b)) for b in blocked] != before:
                job.tell()
            if trio.current_time() >= job.deadline:
                names = ", ".join(f"{b.name}={b.count} (rank {b.rank})" for b in blocked)
                progress, stalled = idle.progress(blocked)
                raise DeadlineExceeded(
                    f"still draining: {names}{stalled}; admission is open again",
                    details={"reason": "still_draining", "progress": progress, "blocked_by": idle.rows(blocked)},
                )
            with trio.move_on_at(job.deadline):
                await ctx.registry.changed.park()
        raise causes.cancelled(job.cancel_why, "admission is open again")

    async def _hold(self, hold_s: float) -> dict[int, RankAnswer]:
        deadline = trio.current_time() + self.ctx.settings.call_s
        return await self.ctx.ask_all(Hold(name=DRAIN_HOLD, hold_s=hold_s), deadline)

    async def _release(self) -> dict[int, RankAnswer]:
        return await self.ctx.ask_all(Release(name=DRAIN_HOLD), trio.current_time() + self.ctx.settings.call_s)

    async def resume(self) -> api.DrainAnswer:
        """Open admission again on every rank that is connected; idempotent.

        A rank that is missing keeps nobody else closed: it comes back open, or its hold ends by its lease.

        Raises:
            NoEngine: no rank is connected.
        """
        ctx = self.ctx
        if not ctx.registry.live:
            ctx.require_engine()
        running = ctx.running
        if running is not None and running.kind == "drain" and running.on_cancel is not None:
            running.on_cancel()
        answers = await self._release()
        _refuse(answers)
        ctx.hub.publish("resumed")
        await ctx.refresh(ctx.settings.call_s)
        rows = []
        for rank, told in answers.items():
            there = bool(((told.answer.data if told.answer else None) or {}).get("released"))
            rows.append(api.RankResult(rank=rank, success=True, message="opened" if there else "was open"))
        missing = ctx.registry.missing_ranks
        rows += [api.RankResult(rank=rank, success=False, message="not connected") for rank in missing]
        state = status.overall(ctx.registry, None)[0]
        text = "admission is open" + (f"; not connected: {', '.join(map(str, missing))}" if missing else "")
        return api.DrainAnswer(success=not missing, state=state, message=text, ranks=rows)

    def _job(self, kind: str, actor: Actor, timeout_s: float, reason: str = "") -> Job:
        deadline = trio.current_time() + timeout_s if math.isfinite(timeout_s) else math.inf
        return Job(
            kind=kind,
            verb=kind,
            actor=self.ctx.actor_name(actor),
            deadline=deadline,
            hub=self.ctx.hub,
            reason=reason,
        )


def _refuse(answers: Mapping[int, RankAnswer]) -> None:
    """Raise for the ranks that said no, naming all of them and what the others did."""
    bad = {rank: told for rank, told in answers.items() if not told.ok}
    if not bad:
        return
    rows = [
        msgspec.to_builtins(api.RankResult(rank=rank, success=told.ok, message="" if told.ok else told.message))
        for rank, told in answers.items()
    ]
    text = "; ".join(told.message for told in bad.values())
    for told in bad.values():
        if told.error is not None and not isinstance(told.error, NotIdle):
            raise type(told.error)(text, details=told.error.details | {"ranks": rows}, hint=told.error.hint)
    raise DeadlineExceeded(text, details={"ranks": rows, "silent_ranks": sorted(bad)})
