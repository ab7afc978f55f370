"""Executes ``store.recovery``: at the daemon's start, and whenever an engine or a rank comes back.

``Recovery`` decides, purely; this task tells it what ranks say, does what it decides, and asks again until nothing
is left to do. Then it sleeps until a session begins or ends. Nothing is polled: while something is open, every report
wakes it; a wait for a lease has its own time.

A rank that (re)started is brought to the desired state by an ordinary operation of kind ``converge`` (rules 13, 14):
at once, and after failures with a growing, jittered pause. A config under which an engine's process died is
quarantined in the journal and not tried again by itself (F19).
"""

import logging
import math
import random
from functools import partial
from typing import Any

import trio

from hicache_proto.errors import HicacheError
from hicache_proto.hooklink import AskReport, CallBody, Finalize, Undo
from hicache_proto.transaction import RankPhase
from hicache_sidecar.engine import status
from hicache_sidecar.engine.changes import Changes
from hicache_sidecar.engine.context import Context, log
from hicache_sidecar.engine.goals import Goal
from hicache_sidecar.engine.operation import Job
from hicache_sidecar.engine.pace import Pace
from hicache_sidecar.engine.registry import Session
from hicache_sidecar.engine.transact import CONVERGE_WAIT_S
from hicache_sidecar.store import recovery
from hicache_sidecar.store.recovery import Recovery, view_of

CONVERGE_TIMEOUT_S = 120.0
SETTLE_PAUSE_S = 0.2  # between two repeats of UNDO or FINALIZE to a rank that still holds


class Restart:
    """The task. ``run`` until cancelled."""

    def __init__(self, ctx: Context, changes: Changes) -> None:
        self.ctx, self.changes = ctx, changes
        self._news = trio.lowlevel.ParkingLot()
        self._pace = Pace(random.uniform)
        self._begin()
        if ctx.book.pending is None and ctx.book.desired is None:
            ctx.recovering = "the ranks' state is not known yet"

    def _begin(self) -> None:
        """From what the journal holds, as after a crash."""
        ctx, pending, desired = self.ctx, self.ctx.book.pending, self.ctx.book.desired
        self.recovery = Recovery(
            pending=None if pending is None else (pending.n, frozenset(pending.participants)),
            revision=desired[1] if desired else None,
            leave=ctx.settings.on_engine_restart == "leave",
        )
        self._lease_over_at = trio.current_time() + ctx.settings.in_doubt_s
        self._dirty = True
        if pending is not None:
            ctx.recovering = f"operation {pending.operation_id} ({pending.kind}) has no outcome on record"

    async def run(self) -> None:
        """Recover now, and after every session that begins or ends."""
        ctx = self.ctx
        ctx.registry.on_session.append(self._on_session)
        ctx.on_end.append(self._on_end)
        while True:
            while ctx.running is not None:  # an operation settles its own participants
                await ctx.running.done.wait()
                await trio.lowlevel.checkpoint()
            self._dirty = False
            if await self._step():
                continue
            if not self._dirty:
                await self._rest()

    def _on_end(self, job: Job) -> None:
        """An operation that ended by a defect of ours may have left its BEGIN without an outcome. Nobody could begin
        another one then, and ranks may still hold: it is settled like a crash."""
        if self.ctx.book.pending is not None and self.recovery.pending is None:
            log.error("operation %s left no outcome: recovery settles it", job.id)
            self._begin()
            self._news.unpark_all()

    def _on_session(self, session: Session) -> None:
        if session.hello.role == "rank":
            self._dirty = True
            self._news.unpark_all()
            self.ctx.judge(session)

    # ---- one decision

    async def _step(self) -> bool:
        """Do the next thing; False when there is nothing to do but wait."""
        ctx = self.ctx
        for digest, reason in list(ctx.guilty.items()):
            await self._write(partial(ctx.book.quarantine, digest, reason))
            del ctx.guilty[digest]
        self._look()
        expected = frozenset(range(ctx.registry.expected)) if ctx.registry.ranks else None
        decision = self.recovery.next(expected, trio.current_time())
        match decision:
            case recovery.Wait():
                if self.recovery.pending is not None and trio.current_time() >= self._lease_over_at:
                    self.recovery.waited()
                    return True
                return False
            case recovery.Ask(ranks=ranks):
                await self._ask(ranks)
            case recovery.CommitB(n=n):
                await self._write(partial(ctx.book.outcome_b, n, {}, message="decided by recovery"))
                self.recovery.settled(n, b=True)
                ctx.digest = ""  # of the new state: a rank that is final tells it
                self._tell("committed", n, "every participant had switched")
            case recovery.AbortA(n=n, participants=ranks, why=why, recorded=recorded):
                await self._send(n, ranks, Undo(reason=f"recovery: {why}"[:500]))
                if not recorded:
                    await self._write(partial(ctx.book.outcome_a, n, {}, message=f"undone by recovery: {why}"))
                    self.recovery.settled(n, b=False)
                self._tell("undone", n, why)
            case recovery.Finalize(n=n, participants=ranks):
                await self._send(n, ranks, Finalize())
                self._tell("finalised", n, "it was decided")
            case recovery.Adopt(rank=rank, revision=revision, n=n, why=why):
                await self._adopt(rank, revision, n, why)
            case recovery.Split(why=why):
                if ctx.split != why:
                    ctx.split = why
                    self._tell("split", 0, why)
                ctx.recovering = ""
                return False
            case recovery.Ready(converge=behind):
                ctx.recovering = ""
                return bool(behind) and await self._converge(behind)
        return True

    def _look(self) -> None:
        """Tell the recovery what every session last said."""
        ctx, desired = self.ctx, self.ctx.book.desired
        if not ctx.digest and desired is not None:
            for session in ctx.registry.live.values():
                # A rank in doubt shows the config that it switched to, under the revision that it may go back to.
                settled = session.report.op_phase in ("", RankPhase.NONE)
                if settled and session.report.state.revision == desired[1]:
                    ctx.digest = session.report.state.config_digest
        differ = {d.rank for d in status.drift(ctx.registry, desired[0] if desired else None, ctx.digest)}
        self.recovery.revision = desired[1] if desired else None
        for rank, session in ctx.registry.ranks.items():
            if session.alive:
                self.recovery.tell(view_of(rank, session.report, differs=rank in differ))
            else:
                self.recovery.gone(rank)

    async def _rest(self) -> None:
        """Sleep until there is news. While something is open any report is news; else sessions alone."""
        open_ = self.recovery.pending is not None or bool(self.ctx.recovering)
        until = self._lease_over_at if self.recovery.pending is not None else math.inf
        if not open_ and self._pace.held_until > trio.current_time():
            until = min(until, self._pace.held_until)
        with trio.move_on_at(until):
            await (self.ctx.registry.changed if open_ else self._news).park()

    # ---- doing

    async def _ask(self, ranks: frozenset[int]) -> None:
        asked_at = trio.current_time()
        sessions = {rank: s for rank, s in self.ctx.sessions().items() if rank in ranks}
        answers = await self.ctx.fanout.ask(sessions, 0, AskReport(), asked_at + self.ctx.settings.call_s)
        for rank, told in answers.items():
            if told.answer is not None:
                self.recovery.tell(view_of(rank, told.answer.report, asked_at_s=asked_at))
        if not any(told.answer is not None for told in answers.values()):
            await trio.sleep(SETTLE_PAUSE_S)

    async def _send(self, n: int, ranks: frozenset[int], body: CallBody) -> None:
        sessions = {rank: s for rank, s in self.ctx.sessions().items() if rank in ranks}
        await self.ctx.fanout.ask(sessions, n, body, trio.current_time() + self.ctx.settings.call_s)
        await trio.sleep(SETTLE_PAUSE_S)

    async def _adopt(self, rank: int, revision: int, n: int, why: str) -> None:
        ctx = self.ctx
        state = ctx.registry.ranks[rank].report.state
        target = status.as_target(state)
        await self._write(partial(ctx.book.adopt, target, revision, max(n, revision), actor="sidecar", reason=why))
        ctx.digest, ctx.split = state.config_digest, ""
        self.recovery.adopted(revision)
        # An engine that is met for the first time is no news to act on; a journal that ranks contradict is.
        level = logging.INFO if why == recovery.FIRST_CONTACT else logging.WARNING
        self._tell("adopted", n, f"{why}: revision {revision}, backend {state.backend or 'none'}", level)

    async def _write(self, work: Any) -> None:
        """A journal write; JournalFailed goes up and ends the process."""
        await trio.to_thread.run_sync(work)

    def _tell(self, what: str, n: int, why: str, level: int = logging.WARNING) -> None:
        log.log(level, "recovery: %s%s: %s", what, f" operation {n}" if n else "", why)
        self.ctx.hub.publish("recovery", did=what, n=n, why=why)

    # ---- convergence

    async def _converge(self, behind: frozenset[int]) -> bool:
        """Bring restarted ranks to the desired state; False when that has to wait."""
        ctx, desired = self.ctx, self.ctx.book.desired
        now = trio.current_time()
        if desired is None or ctx.running is not None:
            return False
        if ctx.digest and ctx.digest in ctx.book.quarantined:
            return False  # shown by status; an operator decides
        if not status.rebuildable(desired[0]):
            log.warning("the desired state lacks its secrets: ranks %s stay as they are", sorted(behind))
            return False
        if now < (begin := self._pace.not_before(now)):
            with trio.move_on_at(begin):
                await self._news.park()
            return True
        self._pace.tried(now)
        job = Job(
            kind="converge",
            verb="converge",
            actor="sidecar",
            deadline=now + CONVERGE_TIMEOUT_S,
            hub=ctx.hub,
            reason="restarted ranks are brought to the desired state",
            mode="drain",
            target=desired[0],
        )
        try:
            ctx.claim(job)
        except HicacheError:
            return False
        ctx.launch(job, lambda j: self._bring(j, behind))
        await job.done.wait()
        if job.error is not None:
            log.warning("ranks %s could not be brought to the desired state: %s", sorted(behind), job.error.message)
            return False
        return True

    async def _bring(self, job: Job, behind: frozenset[int]) -> Any:
        ctx = self.ctx
        desired = ctx.book.desired
        target = desired[0] if desired else status.as_target(ctx.registry.ranks[min(behind)].report.state)
        goal = Goal(kind="converge", verb="converge", target=target, mode="drain", swap=True, wait_s=CONVERGE_WAIT_S)
        sessions = {rank: s for rank, s in ctx.sessions().items() if rank in behind}
        plans = await self.changes.validate(job, goal, sessions)
        return await self.changes.transactor.execute(
            job,
            goal,
            participants=tuple(sorted(plans)),
            changed_keys=sorted({key for plan in plans.values() for key in plan.changed_keys}),
            digest=next(iter(plans.values())).config_digest,
        )
