"""One transaction from claimed job to answer: drive the table, settle the journal, say it all.

Whoever wants ranks moved (attach, detach, policy, roll-back, resolve, convergence) comes through ``execute``.
"""

from functools import partial
from typing import Any

import msgspec
import trio

from hicache_proto import api
from hicache_proto.errors import DeadlineExceeded, HicacheError, Inconsistent
from hicache_proto.model import TargetState
from hicache_proto.transaction import RankPhase
from hicache_sidecar.core.redaction import redact_text, scrub
from hicache_sidecar.engine import causes, status
from hicache_sidecar.engine.context import Context
from hicache_sidecar.engine.drive import Drive
from hicache_sidecar.engine.goals import Goal
from hicache_sidecar.engine.moves import Move, Outcome
from hicache_sidecar.engine.operation import Job
from hicache_sidecar.store.errors import NEVER_BEGAN

CONVERGE_WAIT_S = 30.0  # drain time of a convergence


class Transactor:
    """Executes moves over one context."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx

    async def execute(
        self,
        job: Job,
        goal: Goal,
        *,
        participants: tuple[int, ...],
        changed_keys: list[str],
        digest: str = "",
        warnings: list[str] | None = None,
        notes: list[str] | None = None,
        diff: list[dict[str, Any]] | None = None,
    ) -> api.OperationAnswer:
        """Move ``participants`` to the goal's target.

        Raises:
            HicacheError: why not; then every rank is on the old state, unless it is ``inconsistent``.
        """
        ctx = self.ctx
        job.n = ctx.book.next_n([ctx.registry.highest_n()])
        job.target = goal.target
        drive = self._drive(job, goal, participants, changed_keys, warnings or [], notes or [])
        outcome = await drive.run()
        self._count_stalls(job)
        if not outcome.decided_b:
            self._suspect(drive, digest if goal.target.backend is not None else "")
            return await self._not_b(job, goal, drive, outcome, diff or [], warnings or [], notes or [])
        ctx.digest, ctx.split = digest, ""
        ctx.hub.publish("state", revision=job.n, backend=goal.target.backend, operation_id=job.id)
        if outcome.converging:
            await self._converge(job, goal, outcome.converging)
        self._check_layers(job)
        for rank in participants:
            job.result(rank, True, _done(goal))
        return self._answer(job, goal, outcome, changed_keys, [*(warnings or []), *outcome.warnings], notes or [])

    def _drive(
        self,
        job: Job,
        goal: Goal,
        participants: tuple[int, ...],
        changed_keys: list[str],
        warnings: list[str],
        notes: list[str],
    ) -> Drive:
        ctx = self.ctx
        desired = ctx.book.desired
        first = ctx.registry.ranks[participants[0]].report.state
        move = Move(
            n=job.n,
            a=desired[0] if desired is not None else status.as_target(first),
            b=goal.target,
            participants=participants,
            deadline=job.deadline,
            mode=goal.mode,
            wait_s=goal.wait_s,
            dry_run=goal.dry_run,
            checkpoint=goal.checkpoint,
        )

        def fixed_answer(outcome: Outcome) -> dict[str, Any]:
            for rank in participants:
                job.result(rank, True, _done(goal))
            answer = self._answer(job, goal, outcome, changed_keys, warnings, notes)
            return {"answer": msgspec.to_builtins(answer)}

        return Drive(
            job,
            move,
            registry=ctx.registry,
            fanout=ctx.fanout,
            book=ctx.book,
            settings=ctx.settings,
            fixed_answer=fixed_answer,
            faults=ctx.faults,
        )

    def _answer(
        self,
        job: Job,
        goal: Goal,
        outcome: Outcome,
        changed_keys: list[str],
        warnings: list[str],
        notes: list[str],
        diff: list[dict[str, Any]] | None = None,
    ) -> api.OperationAnswer:
        desired = self.ctx.book.desired
        changed = not goal.dry_run
        state = "detached" if goal.target.backend is None else "attached"
        if goal.dry_run:
            state = str(status.overall(self.ctx.registry, None)[0])
        return api.OperationAnswer(
            success=True,
            changed=changed,
            changed_keys=changed_keys,
            message="; ".join(f"rank {r.rank}: {r.message}" for r in job.results()),
            operation_id=job.id,
            revision=job.n if changed else (desired[1] if desired else 0),
            state=state,
            ranks=job.results(),
            prepare_ms=round(outcome.prepare_ms, 3),
            freeze_ms=round(outcome.freeze_ms, 3),
            commit_ms=round(outcome.commit_ms, 3),
            warnings=[redact_text(w, job.known_secrets) for w in warnings],
            notes=[redact_text(note, job.known_secrets) for note in (*notes, *_saved(goal, outcome))],
            dry_run=goal.dry_run,
            diff=diff or [],
        )

    # ---- the old state

    async def _not_b(
        self,
        job: Job,
        goal: Goal,
        drive: Drive,
        outcome: Outcome,
        diff: list[dict[str, Any]],
        warnings: list[str],
        notes: list[str],
    ) -> api.OperationAnswer:
        """Settle an operation that ended on A: a failure, or a dry run that passed."""
        if goal.dry_run and outcome.prepared and outcome.cause is None:
            relations = {row["rank"]: row["relation"] for row in diff}
            for rank in drive.move.participants:
                job.result(rank, True, _could(goal, relations.get(rank, "")))
            answer = self._answer(job, goal, outcome, [], warnings, notes, diff)
            await self._record_a(job, {"answer": msgspec.to_builtins(answer)}, "dry run", checked=True)
            return answer
        error = outcome.cause or Inconsistent("the operation ended without a cause")
        self.ctx.counters.rollbacks += 1
        if error.details.get("reason") == "collective_stall":
            self.ctx.hub.publish("collective_stall", operation_id=job.id, ranks=error.details["silent_ranks"])
        stuck = self._stuck(drive)
        for rank in drive.move.participants:
            before = job.ranks.get(rank)
            told = before.message if before is not None and not before.success else "on the old state"
            job.result(rank, False, stuck.get(rank, told))
        if stuck:
            error = causes.not_restored(error, stuck)
            self.ctx.hub.publish("split", operation_id=job.id, ranks=sorted(stuck))
        else:
            error.details.setdefault("rolled_back", True)
        error.operation_id = job.id
        error.details["ranks"] = [msgspec.to_builtins(r) for r in job.results()]
        if drive.rec.n and error.details.get("reason") not in NEVER_BEGAN:
            await self._record_a(job, {"error": _clean_body(job, error)}, error.message)
        raise error

    def _suspect(self, drive: Drive, digest: str) -> None:
        """Remember who was lost in this attempt: a new process in its place proves that the config killed it (F19)."""
        for rank, process in drive.lost_processes().items():
            self.ctx.suspects[rank] = digest, process
            if (now := self.ctx.registry.ranks.get(rank)) is not None:
                self.ctx.judge(now)  # its successor may have been faster than the end of this attempt

    def _stuck(self, drive: Drive) -> dict[int, str]:
        """Participants that are known not to be back on A. One on A whose other set does not close is no such one."""
        ranks = self.ctx.registry.ranks
        found: dict[int, str] = {}
        for rank in drive.move.participants:
            session = ranks.get(rank)
            if session is not None and session.alive and session.report.op_phase == RankPhase.QUARANTINED:
                found[rank] = f"not restored: {session.report.quarantine}"
        return found

    async def _record_a(self, job: Job, answer: dict[str, Any], message: str, *, checked: bool = False) -> None:
        elapsed_ms = (trio.current_time() - job.started) * 1000
        text = job.clean(message)
        write = partial(self.ctx.book.outcome_a, job.n, answer, message=text, duration_ms=elapsed_ms, checked=checked)
        await trio.to_thread.run_sync(write)

    # ---- after B

    async def _converge(self, job: Job, goal: Goal, behind: frozenset[int]) -> None:
        """B is decided and some ranks are not on it (rule 3's window): bring them there in this job's name.

        Raises:
            DeadlineExceeded: not all by the deadline; they are drift now, and brought to B when they come back.
        """
        ctx = self.ctx
        job.enter("converging", f"ranks {sorted(behind)} are brought to the decided state")
        left = set(behind)
        while left and trio.current_time() < job.deadline:
            here = {r for r in left if r in ctx.registry.live}
            left -= {r for r in here if ctx.registry.ranks[r].report.state.revision == ctx_revision(ctx)}
            here &= left
            if here and not await self._bring(job, goal.target, tuple(sorted(here))):
                here = set()
            left -= here
            if left:
                with trio.move_on_at(min(job.deadline, trio.current_time() + 1.0)):
                    await ctx.registry.changed.park()
        if left:
            raise DeadlineExceeded(
                f"the new state is decided, but not reached by ranks {sorted(left)}; they are brought to it later",
                details={"reason": "converging", "ranks": sorted(left), "revision": ctx_revision(ctx)},
            )

    async def _bring(self, job: Job, target: TargetState, ranks: tuple[int, ...]) -> bool:
        """One attempt to move some ranks to the desired state; True when it was decided."""
        n = job.n
        goal = Goal(kind="converge", verb="converge", target=target, mode="drain", wait_s=CONVERGE_WAIT_S)
        job.n = self.ctx.book.next_n([self.ctx.registry.highest_n()])
        drive = self._drive(job, goal, ranks, [], [], [])
        outcome = await drive.run()
        if not outcome.decided_b:
            await self._record_a(job, {}, "convergence failed")
            job.n = n
            return False
        return not outcome.converging

    def _check_layers(self, job: Job) -> None:
        """All layers of every rank agree about what is attached (F24).

        Raises:
            Inconsistent: with the per-layer view.
        """
        views = {s.rank: s.report.layers for s in self.ctx.registry.live.values() if s.report.layers}
        if views:
            names = "; ".join(f"rank {r}: " + ", ".join(f"{k}={v}" for k, v in sorted(views[r].items())) for r in views)
            for rank in views:
                job.result(rank, False, "its layers disagree about what is attached")
            raise Inconsistent(
                f"the layers of a rank disagree about what is attached: {names}",
                details={"layers": {str(rank): view for rank, view in views.items()}, "revision": job.n},
            )

    def _count_stalls(self, job: Job) -> None:
        stalls = [r.stall_us for r in job.ranks.values() if r.stall_us is not None]
        if stalls:
            self.ctx.counters.stall_us_last = max(stalls)
            self.ctx.counters.stall_us_total += sum(stalls)


def ctx_revision(ctx: Context) -> int:
    """The desired revision."""
    return ctx.book.desired[1] if ctx.book.desired is not None else 0


def _clean_body(job: Job, error: HicacheError) -> Any:
    body = msgspec.to_builtins(error.body())
    return scrub(body, job.known_secrets)


def _saved(goal: Goal, outcome: Outcome) -> list[str]:
    """What the checkpoint did (F58)."""
    pages = sum(outcome.saved.values())
    return [f"checkpoint: {pages} pages were missing and are written"] if goal.checkpoint else []


def _could(goal: Goal, relation: str) -> str:
    """What a dry run found on one rank, by what VALIDATE had said of it. Where nothing is built nothing is proved."""
    if relation == "same":
        return f"{goal.target.backend} is attached as asked: nothing was built, and the store was not tried"
    if relation == "live":
        return f"can change what differs while {goal.target.backend} stays: the store was not tried"
    return f"can {'attach' if relation == 'attach' else goal.verb} {goal.target.backend}"


def _done(goal: Goal) -> str:
    if goal.kind == "policy":
        return "policies updated"
    if goal.target.backend is None:
        return "detached"
    return f"attached {goal.target.backend}"
