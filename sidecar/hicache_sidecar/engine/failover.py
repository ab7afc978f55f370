"""Drives ``core/failover.py``: tells it what the ranks report, does what it decides, keeps what must outlive us.

A failover is an ordinary operation of kind ``failover`` and actor ``failover``: it takes the one slot, has an id, a
row in the history, and can be cancelled. Nothing is polled: every report wakes the task, and a pause has its own time.
Policies and the running episode are one setting of the journal; the desired state stays what the last outcome says
(design.md, rule 7).
"""

import logging
import random
import time
from collections import deque
from functools import partial
from typing import Any

import msgspec
import trio

from hicache_proto import api
from hicache_proto.errors import HicacheError, NoEngine, OperationInProgress, RevisionMismatch
from hicache_proto.failover import FailoverStep
from hicache_sidecar.core.failover import Failover
from hicache_sidecar.core.failover_types import Facts, Move, RankView, Record, SetBypass, Wait, policy_for
from hicache_sidecar.core.redaction import redact_text
from hicache_sidecar.engine import status
from hicache_sidecar.engine.changes import Changes
from hicache_sidecar.engine.context import Context
from hicache_sidecar.engine.direct import Direct
from hicache_sidecar.engine.events import now_iso
from hicache_sidecar.engine.goals import Goal, whole
from hicache_sidecar.engine.operation import CANCELLED, STOPPING, Job
from hicache_sidecar.engine.transact import ctx_revision
from hicache_sidecar.store.errors import JournalFailed, StoreError

log = logging.getLogger("hicache_sidecar.failover")

SETTING = "failover"  # name of the journal's setting
ACTOR = "failover"
LEAST_WAIT_S = 0.02  # between two looks: no defect of a pause may spin the loop
KEEP_STEPS = 100  # shown by GET /hicache/failover; events and history have more
# An operator's change of storage, by its operation's kind: a failover must not go across it. (Bypass is no operation.)
OPERATORS_KINDS = frozenset({"attach", "swap", "detach", "policy", "rollback", "resolve"})


class FailoverDriver:
    """The task. ``run`` until cancelled; ``set_policies`` and ``document`` are in ``failover_api``."""

    def __init__(self, ctx: Context, changes: Changes, direct: Direct) -> None:
        self.ctx, self.changes, self.direct = ctx, changes, direct
        self.unreadable = ""
        self.steps: deque[FailoverStep] = deque(maxlen=KEEP_STEPS)
        self._wall = time.time() - trio.current_time()  # trio's clock begins anew with every process
        record = self._load()
        self.machine = Failover(record, random.random)
        self._kept = msgspec.msgpack.encode(record)
        self._operation_id: str | None = None
        self._operators = 0  # bypasses of operators that are under way
        self.writing = trio.Lock()  # a policy that was answered is never overwritten by an older record
        ctx.on_end.append(self._saw)

    def _load(self) -> Record:
        stored = self.ctx.book.settings.get(SETTING)
        if stored is None:
            return Record()
        try:
            return _shifted(msgspec.convert(stored, Record), -self._wall)
        except msgspec.ValidationError:  # its text may quote a secret
            self.unreadable = "the stored failover policy cannot be read by this version: set it again"
            log.error(self.unreadable)
            return Record()

    async def run(self) -> None:
        """Follow the policies until cancelled."""
        while True:
            decision = self.machine.next(trio.current_time(), self.facts())
            if await self.keep():
                continue  # reports or an operator's change came while the journal was written: decide again
            match decision:
                case Wait() if self.ctx.running is not None:
                    await self.ctx.running.done.wait()  # nothing may be done meanwhile; its reports are many
                case Wait(until=until):
                    with trio.move_on_at(max(until, trio.current_time() + LEAST_WAIT_S)):
                        await self.ctx.registry.changed.park()
                case SetBypass():
                    await self._set_bypass(decision)
                case Move():
                    await self._move(decision)
            self._tell()

    def wake(self) -> None:
        """Policies changed, or an operator acted."""
        self._tell()
        self.ctx.registry.changed.unpark_all()

    def _saw(self, job: Job) -> None:
        """An operation ended, and nobody was woken yet: until now the running one kept us still, and a replayed answer
        is no operation."""
        if job.kind in OPERATORS_KINDS and job.error is None:
            self.machine.operator_acted(job.kind)

    async def bypass(self, request: api.BypassRequest) -> api.BypassAnswer:
        """An operator's bypass. The failover lets go before the first rank is told, and stays let go when one cannot
        be: what the others do then is the operator's. Durable before it is answered.

        Raises:
            NoEngine: no rank is connected, nothing happened. HicacheError: a rank refused.
        """
        if not self.ctx.registry.live:
            self.ctx.require_engine()
        self._operators += 1
        try:
            self.machine.operator_acted("bypass", bypass=request.enabled)
            answer = await self.direct.bypass(request)
            await self.keep()
        finally:
            self._operators -= 1
            self.wake()
        return answer

    # ---- what is seen

    def facts(self) -> Facts:
        """The picture now, from the last reports."""
        live = self.ctx.registry.live
        desired = self.ctx.book.desired
        return Facts(
            desired=None if desired is None else desired[0],
            ranks=tuple(RankView(r, s.report.guard, s.report.state.bypass) for r, s in sorted(live.items())),
            can_hot=all(s.hello.capabilities.hot for s in live.values()),
            blocked=self._blocked(),
        )

    def _blocked(self) -> str:
        """Why nothing may be done now; empty when something may."""
        ctx = self.ctx
        live = ctx.registry.live
        if ctx.running is not None:
            return f"operation {ctx.running.id} ({ctx.running.kind}) runs"
        if self._operators:
            return "an operator's bypass is under way"
        if ctx.recovering:
            return f"recovery is not over: {ctx.recovering}"
        if not ctx.registry.complete:
            return "ranks are missing"
        if bad := [rank for rank, s in live.items() if s.report.quarantine]:
            return f"ranks {bad} are quarantined"
        if ctx.split or not status.agree(s.report.state for s in live.values()):
            return "the ranks do not run the same"
        desired = ctx.book.desired
        if desired is not None and any(s.report.state.backend != desired[0].backend for s in live.values()):
            return "the ranks do not run what is desired"
        return ""

    # ---- what is done

    async def _set_bypass(self, decision: SetBypass) -> None:
        ok, message = False, ""
        try:
            answer = await self.direct.bypass(api.BypassRequest(enabled=decision.enabled))
            ok, message = answer.success, answer.message
        except HicacheError as exc:
            message = exc.message
        word = "on" if decision.enabled else "off"
        self.ctx.write_audit(ACTOR, f"bypass {word}", "success" if ok else "failed", reason=self._clean(decision.why))
        self.machine.bypass_done(trio.current_time(), decision, ok, message)

    async def _move(self, move: Move) -> None:
        ctx = self.ctx
        policy = policy_for(self.machine.policies, self._home_backend())
        revision = ctx_revision(ctx)
        job = Job(
            kind="failover",
            verb="failover",
            actor=ACTOR,
            deadline=trio.current_time() + policy.timeout_s,
            hub=ctx.hub,
            reason=move.why,
            mode=move.mode,
            target=move.target,
        )
        goal = Goal(
            kind="failover",
            verb=move.step,
            target=whole(move.target),
            mode=move.mode,
            swap=True,
            wait_s=policy.wait_s,
            timeout_s=policy.timeout_s,
            reason=move.why,
        )
        done = partial(self.machine.moved, move=move)
        try:
            ctx.require_engine()
            self.changes.check_free_and_revision(job, revision)
        except (NoEngine, OperationInProgress, RevisionMismatch) as exc:
            done(trio.current_time(), state=None, message=exc.message, not_begun=True)
            return
        self._operation_id = job.id

        async def work(running: Job) -> api.OperationAnswer:
            self.changes.check_capabilities(goal)
            plans = await self.changes.validate(running, goal)
            return await self.changes.apply(running, goal, plans)

        ctx.launch(job, work)
        await job.done.wait()
        now, desired = trio.current_time(), ctx.book.desired
        if job.error is None:
            done(now, state=desired[0] if desired is not None else move.target)
        else:
            stopped = job.cancel_asked and job.cancel_why == STOPPING
            done(
                now,
                state=None,
                message=job.error.message,
                not_begun=stopped or isinstance(job.error, NoEngine),
                cancelled=job.cancel_asked and job.cancel_why == CANCELLED,
            )

    def _home_backend(self) -> str | None:
        episode = self.machine.episode
        return episode.home.backend if episode is not None else None

    # ---- what is kept and told

    async def keep(self) -> bool:
        """Make the record durable if it changed; True when it was written.

        Raises:
            JournalFailed: the daemon ends, as after any failed write of the journal.
        """
        self._tell()
        self._show()
        if msgspec.msgpack.encode(self.machine.record()) == self._kept:
            return False
        async with self.writing:
            record = self.machine.record()
            if (kept := msgspec.msgpack.encode(record)) == self._kept:
                return True  # another task wrote it meanwhile
            try:
                await trio.to_thread.run_sync(self.ctx.book.set, SETTING, self.stored(record))
            except JournalFailed:
                raise
            except StoreError as exc:  # a full disk: go on from memory, the store's failure will not wait
                log.error("the failover's state could not be kept: %s", exc.message)
                self._step("failed", f"not kept: {exc.message}")
            self._kept = kept
        return True

    def stored(self, record: Record) -> Any:
        """A record as the journal has it."""
        return msgspec.to_builtins(_shifted(record, self._wall))

    def _show(self) -> None:
        """One line for the status while a store is left alone."""
        machine = self.machine
        if machine.episode is None or machine.state in ("trial", "suspect", "watching", "off"):
            self.ctx.failover = ""
        else:
            left = machine.episode.home.backend
            self.ctx.failover = self._clean(
                f"failover from {left}: {machine.state.replace('_', ' ')}: {machine.reason}"
            )

    def _tell(self) -> None:
        """Every note becomes an event, a line in the log, a count and a row of the document."""
        notes, self.machine.notes = self.machine.notes, []
        for step, reason, backend, to in notes:
            self._step(step, reason, backend, to)
        self._operation_id = None if notes else self._operation_id

    def _step(self, step: str, reason: str, backend: str | None = None, to: str | None = None) -> None:
        reason = self._clean(reason)
        facts: dict[str, Any] = {"step": step, "reason": reason, "backend": backend, "to": to}
        if step in ("detach", "spare", "return", "failed") and self._operation_id:
            facts["operation_id"] = self._operation_id
        self.steps.append(FailoverStep(at=now_iso(), **facts))
        self.ctx.counters.failover_steps[step] += 1
        self.ctx.hub.publish("failover", **facts)
        log.warning(
            "failover: %s%s: %s", step, f" {backend} -> {to}" if to else f" {backend}" if backend else "", reason
        )

    def _clean(self, text: str) -> str:
        return redact_text(text)


def _shifted(record: Record, by: float) -> Record:
    """``record`` on another clock."""
    return record if record.return_at is None else msgspec.structs.replace(record, return_at=record.return_at + by)
