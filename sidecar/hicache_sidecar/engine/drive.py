"""Runs the coordinator's table for one operation: events in, actions out, over the real link and journal.

Theory of operation
===================

``proto.transaction.coord_step`` decides; this module only performs. One task feeds events to the table and performs
the returned actions. Each phase has its own calls and timers, dropped when the phase ends, so that a message of an
old phase is never sent later and its answer never read. Within a phase nobody waits for anybody: all messages leave
at once, leases are renewed by repeating, and a participant that reconnects with a new session and still holds n is
asked again there (rule 13: one that no longer holds n counts as a no). Answers are noted by the link's pump and
worked off by the loop, in the order in which they came.

What a participant is comes from its answers. Its reports (heartbeats) may only say good news early: PREPARED,
FINAL, UNDONE; bad news and FROZEN wait for the answer, which carries the cause and belongs to this round.

Rule 4 is kept here: the last SWITCHED is fed to the table only while our own clock vouches for every lease.
"""

import math
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import trio

from hicache_proto.errors import HicacheError, PrepareFailed
from hicache_proto.hooklink import CallBody, Commit, Finalize, Freeze, Prepare, Thaw, Undo
from hicache_proto.transaction import (
    Act,
    CoordEvent,
    CoordPhase,
    CoordRecord,
    Said,
    See,
    coord_start,
    coord_step,
    said,
)
from hicache_sidecar.core.faults import OFF, Faults
from hicache_sidecar.engine import causes
from hicache_sidecar.engine.decide import TOO_LATE, write_in_time
from hicache_sidecar.engine.fanout import FanOut, RankAnswer
from hicache_sidecar.engine.moves import Move, Outcome, Participants, Process, point_of, stalled_in
from hicache_sidecar.engine.operation import Job
from hicache_sidecar.engine.registry import Registry, Session
from hicache_sidecar.engine.senders import Senders
from hicache_sidecar.engine.settings import EngineSettings
from hicache_sidecar.engine.waiting import Alarm, Blocking, IdleWatch
from hicache_sidecar.store.errors import NEVER_BEGAN
from hicache_sidecar.store.journal import Journal

BUILDER_BUSY_RETRY_S = 0.25  # an older builder still runs: ask again, until the operation's deadline
UNDO_REPEAT_S = 1.0
LEASE_MARGIN_S = 1.0
# What a report, before any answer, may move in each phase.
GOOD_NEWS = {CoordPhase.PREPARE: Said.PREPARED, CoordPhase.FINALIZE: Said.FINAL, CoordPhase.UNDO: Said.UNDONE}


class Drive:
    """One operation's executor. ``fixed_answer`` makes what the journal keeps of the answer, at the decision."""

    def __init__(
        self,
        job: Job,
        move: Move,
        *,
        registry: Registry,
        fanout: FanOut,
        book: Journal,
        settings: EngineSettings,
        fixed_answer: Callable[[Outcome], dict[str, Any]],
        faults: Faults = OFF,
    ) -> None:
        self.job, self.move, self.registry, self.fanout, self.book = job, move, registry, fanout, book
        self.settings = settings
        self.outcome = Outcome()
        self._fixed_answer, self._faults = fixed_answer, faults
        self._inbox: deque[CoordEvent] = deque()
        self._answers: deque[tuple[RankAnswer, CallBody]] = deque()
        self._wake = trio.lowlevel.ParkingLot()
        self._participants = Participants(registry, move.participants)
        self._lease_end = 0.0  # when every lease that we armed is surely over
        self._vouched_until = math.inf  # no lease of COMMIT can end before, by our clock (rule 4)
        self._wait_until = math.inf
        self._started: dict[str, float] = {}
        self._errors: dict[int, HicacheError] = {}
        self.blocking = Blocking(registry, move.participants)
        wait = move.mode == "strict" and move.wait_s > 0
        self.rec, self._first = coord_start(
            move.n, frozenset(move.participants), drain=move.mode == "drain", hot=move.mode == "hot", wait=wait
        )

    # ---- the loop

    async def run(self) -> Outcome:
        """Drive the operation to its end; never raises for what ranks do.

        Raises:
            StoreError: the journal failed for good; the process must end.
        """
        broken: HicacheError | None = None
        async with trio.open_nursery() as self.nursery:
            self.senders = Senders(self.nursery, self.fanout, self.registry, self.move.n, self._on_answer)
            self.watch = IdleWatch(
                self.nursery, self.registry, self.move.participants, lambda: self._post(CoordEvent(See.IDLE))
            )
            self.alarm = Alarm(self.nursery, self._wake)
            try:
                await self._run()
            except HicacheError as exc:  # out of the nursery's exception group, so that the caller can tell it
                broken = exc
            self.nursery.cancel_scope.cancel()
        if broken is not None:
            raise broken
        return self.outcome

    async def _run(self) -> None:
        self.registry.on_session.append(self._on_session)
        self.registry.on_report.append(self._on_report)
        self.job.on_cancel = self._cancel
        try:
            await self._perform(self._first)
            while self.rec.phase is not CoordPhase.DONE:
                event = await self._next_event()
                if self.rec.phase is CoordPhase.OUTCOME and event.see is See.LOST:
                    self._post(event)  # DURABLE is in the inbox: the loss belongs to FINALIZE
                    continue
                before = self.rec
                after, acts = coord_step(before, event)
                if after.phase is not before.phase:
                    self._faults.hit(point_of(before.phase), "before_apply")
                self.rec = after
                if after.outcome == "a" != before.outcome:  # by way of UNDO, or at once when nobody is left to undo
                    self._set_cause(before, event)
                if self.move.dry_run and any(a in (Act.SEND_FREEZE, Act.SEND_COMMIT) for a in acts):
                    self._leave(before.phase)
                    self.outcome.prepared = True
                    self._post(CoordEvent(See.CANCEL, detail="dry run"))
                    continue
                if self.rec.phase is not before.phase:
                    self._leave(before.phase)
                await self._perform(acts)
                if Act.FINISH in acts:
                    break
        finally:
            self.job.on_cancel = None
            self.registry.on_session.remove(self._on_session)
            self.registry.on_report.remove(self._on_report)
        self.outcome.decided_b = self.rec.outcome == "b"

    async def _next_event(self) -> CoordEvent:
        """The next event: a posted one, a participant that left, or a time that came."""
        while True:
            while self._answers:
                result, body = self._answers.popleft()
                if self.senders.current(body):
                    self._on_result(result, body)
            self._look_at_participants()
            at, see, detail = self._next_time()
            late = trio.current_time() >= at
            if late and see is See.DOUBT:
                return CoordEvent(see, detail=detail)  # rule 4: before the answer that would decide B
            if self._inbox:
                return self._inbox.popleft()
            if late:
                return CoordEvent(see, detail=detail)
            self.alarm.at_latest(at)
            await self._wake.park()

    def _next_time(self) -> tuple[float, See, str]:
        phase = self.rec.phase
        if phase in (CoordPhase.UNDO, CoordPhase.FINALIZE, CoordPhase.CONVERGING):
            return self._lease_end, See.LEASES_OVER, "every lease is over"
        if phase is CoordPhase.COMMIT:
            return self._vouched_until, See.DOUBT, "not every rank switched while its lease was surely alive"
        # A strict freeze in flight is answered at once; only a drain is cut short inside FREEZE.
        waits = phase is CoordPhase.WAIT or (phase is CoordPhase.FREEZE and self.rec.drain)
        if waits and self._wait_until < self.move.deadline:
            return self._wait_until, See.TIMEOUT, "the wait for idle ran out"
        return self.move.deadline, See.TIMEOUT, "the operation's time ran out"

    def _post(self, event: CoordEvent) -> None:
        self._inbox.append(event)
        self._wake.unpark_all()

    def _cancel(self) -> bool:
        if self.rec.outcome or self.rec.phase is CoordPhase.OUTCOME:
            return False
        self._post(CoordEvent(See.CANCEL, detail=self.job.cancel_why))
        return True

    # ---- actions

    async def _perform(self, acts: tuple[Act, ...]) -> None:
        settings, move = self.settings, self.move
        for act in acts:
            match act:
                case Act.FSYNC_BEGIN:
                    self.job.enter("begin")
                    await self._fsync_begin()
                case Act.SEND_PREPARE:
                    self.job.enter("prepare")
                    hot = move.mode == "hot"
                    body = Prepare(target=move.b, prepared_s=settings.prepared_s, hot=hot, checkpoint=move.checkpoint)
                    self._send_all(body, settings.prepared_s / 3, settings.prepared_s)
                case Act.SEND_FREEZE:
                    if math.isinf(self._wait_until) and move.wait_s > 0:
                        self._wait_until = trio.current_time() + move.wait_s
                    self.job.enter("freeze")
                    freeze = Freeze(round=self.rec.round, freeze_s=settings.freeze_s, drain=self.rec.drain)
                    self._send_all(freeze, settings.freeze_s / 3, max(settings.freeze_s, settings.prepared_s))
                case Act.SEND_THAW:
                    self.job.enter("wait")
                    thaw = Thaw(round=self.rec.round, prepared_s=settings.prepared_s)
                    self._send_all(thaw, settings.prepared_s / 3, settings.prepared_s)
                case Act.WATCH_IDLE:
                    self.watch.begin(self.senders, min(self._wait_until, move.deadline))
                case Act.SEND_COMMIT:
                    self.job.enter("commit")
                    self._vouched_until = trio.current_time() + settings.in_doubt_s - settings.decide_margin_s
                    self._send_all(Commit(in_doubt_s=settings.in_doubt_s), math.inf, settings.in_doubt_s)
                case Act.FSYNC_OUTCOME_B:
                    await self._fsync_outcome()
                case Act.SEND_FINALIZE:
                    self.job.enter("finalize")
                    self._send_all(Finalize(), UNDO_REPEAT_S, settings.in_doubt_s)
                case Act.RECORD_OUTCOME_A:
                    pass  # recorded with the answer once all ranks are known to be back; no record means A
                case Act.SEND_UNDO:
                    self.job.enter("undo", self.rec.reason)
                    self._send_all(Undo(reason=self.job.clean(self.rec.reason)[:500]), UNDO_REPEAT_S, 0.0)
                case Act.FINISH:
                    self.senders.stop()
                    if self.rec.phase is CoordPhase.CONVERGING:
                        self.outcome.converging = self.not_final()

    async def _fsync_begin(self) -> None:
        move, job = self.move, self.job
        write = partial(
            self.book.begin,
            n=move.n,
            operation_id=job.id,
            kind=job.kind,
            a=move.a,
            b=move.b,
            participants=move.participants,
            mode=move.mode,
            request_key=job.request_key,
            body_digest=job.digest,
            actor=job.actor,
            reason=job.reason,
        )
        try:
            await trio.to_thread.run_sync(write)
        except HicacheError as exc:
            if exc.details.get("reason") not in NEVER_BEGAN:
                raise  # the journal is broken: only a restart knows what is on disk
            self.outcome.cause = exc
            self._post(CoordEvent(See.NOT_DURABLE, detail=exc.message))
            return
        self._post(CoordEvent(See.DURABLE))

    async def _fsync_outcome(self) -> None:
        """The one fsync inside the freeze. The clock is looked at once more right before the write (rule 4)."""
        self.senders.stop()
        answer = self._fixed_answer(self.outcome)
        elapsed_ms = (trio.current_time() - self.job.started) * 1000
        write = partial(self.book.outcome_b, self.move.n, answer, message="committed", duration_ms=elapsed_ms)
        in_time = await write_in_time(write, self._vouched_until)
        self._post(CoordEvent(See.DURABLE) if in_time else CoordEvent(See.NOT_DURABLE, detail=TOO_LATE))

    # ---- senders

    def _send_all(self, body: CallBody, repeat_s: float, lease_s: float) -> None:
        """Start this phase's senders. ``lease_s`` is what a rank arms when it gets the message."""
        now = trio.current_time()
        if lease_s:
            self._lease_end = max(self._lease_end, now + lease_s + LEASE_MARGIN_S)
        self._started.setdefault(self.rec.phase.value, now)
        after_decision = self.rec.phase in (CoordPhase.FINALIZE, CoordPhase.UNDO)
        deadline = self._lease_end + UNDO_REPEAT_S if after_decision else self.move.deadline
        self.senders.start(self.move.participants, body, repeat_s, deadline)

    # ---- what ranks say

    def _on_answer(self, result: RankAnswer, body: CallBody) -> None:
        self._answers.append((result, body))
        self._wake.unpark_all()

    def _on_result(self, result: RankAnswer, body: CallBody) -> None:
        rank, answer = result.rank, result.answer
        if answer is None:
            return  # silence is the deadline's business, loss the registry's
        what = said(
            answer.report.op_n,
            answer.report.op_phase,
            answer.report.op_ended,
            self.move.n,
            answer.report.state.revision,
        )
        if answer.stall_us is not None:
            before = self.job.ranks.get(rank)
            self.job.result(rank, True, what, max(answer.stall_us, (before and before.stall_us) or 0))
        error = result.error
        if error is None:
            self._post(CoordEvent(See.SAID, rank=rank, said=what))
            return
        self._said_no(rank, what, error, body)

    def _said_no(self, rank: int, what: Said, error: HicacheError, body: CallBody) -> None:
        """An answer with an error: what it means depends on the phase (the table in ``hooklink``)."""
        reason = error.details.get("reason")
        match body:
            case Prepare() if reason == "builder_busy" and what is Said.UNKNOWN:
                self.job.result(rank, False, error.message)
                self.senders.again(rank, BUILDER_BUSY_RETRY_S)
                return
            case Freeze() if error.code == "not_idle":
                if not self.rec.drain:
                    self._post(CoordEvent(See.BUSY, rank=rank, detail=f"rank {rank} is not idle"))
                return
            case Finalize() if what is Said.FINAL:
                self.outcome.warnings.append(f"rank {rank}: {self.job.clean(error.message)}")
                self._post(CoordEvent(See.SAID, rank=rank, said=what))
                return
            case Finalize() | Undo():
                self._errors.setdefault(rank, error)
                self._post(CoordEvent(See.SAID, rank=rank, said=what))
                return
        self._errors.setdefault(rank, error)
        self.job.result(rank, False, error.message)
        self._post(CoordEvent(See.FAILED, rank=rank, said=what, detail=f"rank {rank}: {error.message}"))

    def _on_report(self, session: Session) -> None:
        if session.rank not in self.rec.participants:
            return
        report, phase = session.report, self.rec.phase
        if report.checkpoint_pages > self.outcome.saved.get(session.rank, 0) and self.move.checkpoint:
            self.outcome.saved[session.rank] = report.checkpoint_pages
            self.job.tell(f"checkpoint: {sum(self.outcome.saved.values())} pages are written")
        if good := GOOD_NEWS.get(phase):
            if said(report.op_n, report.op_phase, report.op_ended, self.move.n, report.state.revision) is good:
                self._post(CoordEvent(See.SAID, rank=session.rank, said=good))
        elif phase in (CoordPhase.WAIT, CoordPhase.FREEZE):
            if self.blocking.saw(session):  # shown live
                self.job.blocked_by = self.blocking.all()
                self.job.tell()
            if phase is CoordPhase.WAIT:
                self.watch.saw(session)

    # ---- participants that leave

    def _on_session(self, session: Session) -> None:
        if self._participants.note(session):
            self._wake.unpark_all()

    def _look_at_participants(self) -> None:
        """Not in BEGIN and OUTCOME, which have no row for a loss: the table hears of it in the next phase."""
        if self.rec.phase in (CoordPhase.BEGIN, CoordPhase.OUTCOME):
            return
        for news in self._participants.look(self.move.n, must_hold=self.rec.phase is not CoordPhase.UNDO):
            if not news.lost:
                self.senders.again(news.rank)
                continue
            reason = {"reason": news.lost, "rank": news.rank}
            self._errors.setdefault(news.rank, PrepareFailed(news.detail, details=reason))
            self.job.result(news.rank, False, news.detail)
            self._post(CoordEvent(See.LOST, rank=news.rank, detail=news.detail))

    # ---- the end

    def _leave(self, phase: CoordPhase) -> None:
        now = trio.current_time()
        self.outcome.took(phase, (now - self._started.pop(phase.value, now)) * 1000)
        self._faults.hit(point_of(phase), "after_apply")

    def lost_processes(self) -> dict[int, Process]:
        """Participants whose process was lost during the operation, and who it was."""
        return self._participants.lost_processes()

    def not_final(self) -> frozenset[int]:
        """Participants that are not on B by their last report."""
        ranks = self.registry.ranks
        return frozenset(
            r for r in self.rec.participants if r not in ranks or ranks[r].report.state.revision != self.move.n
        )

    def _set_cause(self, before: CoordRecord, event: CoordEvent) -> None:
        """Why the operation did not reach B, as the client will read it."""
        if self.outcome.cause is None and not (self.move.dry_run and event.detail == "dry run"):
            error = self._errors.get(event.rank)
            came = {e.rank for e in self._inbox if e.see is See.SAID}  # with DOUBT: too late, but not silent
            silent = sorted(before.participants - before.have - came)
            told = {rank: row.message for rank, row in self.job.ranks.items() if not row.success}
            self.outcome.cause = causes.cause_of(
                before.phase, event, error, silent, self.blocking.all(), verb=self.job.verb, drain=before.drain,
                checkpoint=self.move.checkpoint, told=told, stalled=stalled_in(self.registry.ranks, silent),
            )  # fmt: skip
