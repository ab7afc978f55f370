"""PUT, DELETE and policy updates: every check in the order of the outside contract, then one transaction.

Order: body shape 422 · (access, in the coordinator) · no_engine 503 · operation_in_progress 409 · revision_mismatch
412 · config 422 · already_attached 409 · not_idle 400 · prepare 502. Nothing is built before the last of them, and
up to the idle probe no message but stateless questions reaches a rank.
"""

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import trio

from hicache_proto import api
from hicache_proto.errors import (
    AlreadyAttached,
    DeadlineExceeded,
    Inconsistent,
    NoEngine,
    Quarantined,
    RevisionMismatch,
    UnsupportedByEngine,
    from_body,
)
from hicache_proto.hooklink import AskReport, Validate
from hicache_proto.model import Capabilities, Mode, Plan
from hicache_proto.transaction import RankPhase
from hicache_sidecar.core.actor import Actor
from hicache_sidecar.core.redaction import redact_config
from hicache_sidecar.core.service import Progress
from hicache_sidecar.engine import causes, idle, status
from hicache_sidecar.engine.again import ask_within_grace
from hicache_sidecar.engine.context import Context
from hicache_sidecar.engine.fanout import RankAnswer
from hicache_sidecar.engine.goals import Goal, check_shape, goal_of
from hicache_sidecar.engine.operation import Job, desired_document
from hicache_sidecar.engine.repeats import Repeats, body_digest
from hicache_sidecar.engine.transact import Transactor, ctx_revision

PROBE_S = 0.08  # a busy engine is refused within 100 ms

ChangeRequest = api.AttachRequest | api.DetachRequest | api.PolicyRequest


class Changes:
    """Attach, swap, detach, policy, dry run."""

    def __init__(self, ctx: Context, transactor: Transactor) -> None:
        self.ctx, self.transactor = ctx, transactor
        self.repeats = Repeats(ctx)

    async def change(self, request: ChangeRequest, actor: Actor, progress: Progress) -> api.Document:
        """Run one change and wait for its end; the job goes on when the caller is cancelled.

        Raises:
            HicacheError: every refusal and failure.
        """
        check_shape(request)
        replay = self.repeats.find(request)
        if isinstance(replay, Job):
            return await self.wait(replay, progress)
        if replay is not None:
            return replay
        ctx = self.ctx
        ctx.require_engine()
        kind = {api.AttachRequest: "attach", api.DetachRequest: "detach", api.PolicyRequest: "policy"}[type(request)]
        job = self.new_job(request, actor, kind)
        self.check_free_and_revision(job, request.if_revision)
        return await self.run(job, lambda j: self._change(j, request), progress)

    def new_job(self, request: api.ChangeOptions, actor: Actor, kind: str) -> Job:
        """A job for a changing request, not claimed yet."""
        return Job(
            kind=kind,
            verb=kind,
            actor=self.ctx.actor_name(actor),
            deadline=trio.current_time() + request.timeout_s,
            hub=self.ctx.hub,
            reason=request.reason,
            mode=request.mode,
            request_key=request.request_id or "",
            digest=body_digest(request),
        )

    def check_free_and_revision(self, job: Job, if_revision: int | None) -> None:
        """Claim the one slot, then If-Match.

        Raises:
            OperationInProgress, RevisionMismatch.
        """
        ctx = self.ctx
        ctx.claim(job)
        current = ctx_revision(ctx)
        if if_revision is not None and if_revision != current:
            ctx.running = None
            ctx.jobs.pop(job.id, None)
            raise RevisionMismatch(
                f"revision is {current}, not {if_revision}", details={"current": current, "asked": if_revision}
            )

    async def run(self, job: Job, work: Callable[[Job], Awaitable[api.Document]], progress: Progress) -> api.Document:
        """Launch a claimed job and wait for it."""
        self.ctx.launch(job, work)
        return await self.wait(job, progress)

    async def wait(self, job: Job, progress: Progress) -> api.Document:
        """Wait for a job's end; leaving early leaves the job alone."""
        job.listeners.append(progress)
        try:
            await job.done.wait()
        finally:
            job.listeners.remove(progress)
        if job.error is not None:
            raise from_body(job.error.body())
        if job.answer is None:
            raise Inconsistent("the operation ended without an answer", operation_id=job.id)
        return job.answer

    # ---- the change itself

    async def _change(self, job: Job, request: ChangeRequest) -> api.OperationAnswer:
        ctx = self.ctx
        live = ctx.registry.live
        desired = ctx.book.desired
        first = next(iter(live.values())).report.state
        goal = goal_of(request, desired[0] if desired else None, first)
        job.kind, job.verb, job.target = goal.kind, goal.verb, goal.target
        self.check_capabilities(goal)
        plans = await self.validate(job, goal)
        return await self.apply(job, goal, plans)

    async def apply(self, job: Job, goal: Goal, plans: dict[int, Plan]) -> api.OperationAnswer:
        """From valid plans to the answer: no-op, refusals, the transaction."""
        relations = {plan.relation for plan in plans.values()}
        keys = sorted({key for plan in plans.values() for key in plan.changed_keys})
        warnings = _once(w for plan in plans.values() for w in plan.warnings)
        notes = _once(n for plan in plans.values() for n in plan.notes)
        if "swap" in relations and not (goal.swap or goal.target.backend is None):
            raise self._needs_swap(goal, keys)
        self.check_quarantine(goal, plans)
        if self._nothing_to_do(goal, relations):
            return self._unchanged(job, goal, warnings, notes)
        if goal.mode == Mode.STRICT and goal.wait_s == 0 and not goal.dry_run:
            await self.probe(job, goal.verb, fresh_s=PROBE_S)  # VALIDATE's answers carried reports
        if job.cancelled_early:
            raise causes.cancelled(job.cancel_why, "nothing began")
        return await self.transactor.execute(
            job,
            goal,
            participants=tuple(plans),
            changed_keys=keys,
            digest=next(iter(plans.values())).config_digest,
            warnings=warnings,
            notes=notes,
            diff=self._diff(goal, plans),
        )

    def _nothing_to_do(self, goal: Goal, relations: set[str]) -> bool:
        """Every rank is there already, and so is the desired state; a dry run always tries.

        A detach asks for no backend and nothing else; policies that differ there are not its business.
        """
        if goal.dry_run:
            return False
        if goal.verb == "detach":
            there = all(s.report.state.backend is None for s in self.ctx.registry.live.values())
        else:
            there = relations == {"same"}
        desired = self.ctx.book.desired
        return there and desired is not None and desired[0].backend == goal.target.backend

    def _unchanged(self, job: Job, goal: Goal, warnings: list[str], notes: list[str]) -> api.OperationAnswer:
        for rank, session in self.ctx.registry.live.items():
            layers = session.report.layers
            if layers:
                raise Inconsistent(
                    f"rank {rank}: its layers disagree about what is attached: "
                    + ", ".join(f"{k}={v}" for k, v in sorted(layers.items())),
                    details={"layers": {str(rank): layers}},
                )
            job.result(rank, True, "nothing to detach" if goal.verb == "detach" else "already so")
        if goal.checkpoint:
            notes = [*notes, "checkpoint: no store is let go, so none was taken"]
        answer = api.OperationAnswer(
            success=True,
            changed=False,
            changed_keys=[],
            message="; ".join(f"rank {r.rank}: {r.message}" for r in job.results()),
            operation_id=job.id,
            revision=ctx_revision(self.ctx),
            state=str(status.overall(self.ctx.registry, None)[0]),
            ranks=job.results(),
            warnings=warnings,
            notes=notes,
        )
        self.repeats.unchanged(job, answer)
        return answer

    def _needs_swap(self, goal: Goal, keys: list[str]) -> AlreadyAttached:
        now = next(iter(self.ctx.registry.live.values())).report.state.backend
        what = f"{now} is attached" + (f" with other options: {', '.join(keys)}" if keys else "")
        return AlreadyAttached(
            f"{what}; detach first, or ask for a swap",
            details={"reason": "needs_swap", "attached": now, "changed_keys": keys},
        )

    def check_capabilities(self, goal: Goal) -> None:
        """Refuse what the engine cannot do from its hello alone (F12).

        Raises:
            UnsupportedByEngine: with engine, version and tree.
        """
        for rank, session in self.ctx.registry.live.items():
            can = session.hello.capabilities
            if goal.target.backend is not None and not can.attach:
                raise _unsupported(rank, can, "attach storage at run time")
            if goal.mode == Mode.HOT and not can.hot:
                raise _unsupported(rank, can, "change storage under traffic (mode hot)")
            if goal.checkpoint and not can.checkpoint:
                raise _unsupported(rank, can, "store its tree before it lets a store go (checkpoint)", "checkpoint")
            if goal.mode == Mode.DRAIN and not can.drain:
                raise _unsupported(rank, can, "hold its admission (mode drain)")

    async def validate(self, job: Job, goal: Goal, ranks: dict[int, str] | None = None) -> dict[int, Plan]:
        """Every rank checks the target; nothing is touched.

        Raises:
            HicacheError: what the ranks say, joined; NoEngine for a rank that left; DeadlineExceeded.
        """
        ctx = self.ctx
        deadline = min(job.deadline, trio.current_time() + ctx.settings.validate_s)
        body = Validate(target=goal.target, mode=goal.mode, swap=goal.swap)
        answers: dict[int, RankAnswer] = {}
        with trio.CancelScope() as job.early:
            answers = await ask_within_grace(ctx, ranks if ranks is not None else ctx.sessions(), body, deadline)
        if job.cancelled_early:  # nothing to restore, so a silent rank is not waited for
            raise causes.cancelled(job.cancel_why, "nothing began")
        refuse_by_answers(job, answers)
        plans = {
            rank: a.answer.plan for rank, a in answers.items() if a.answer is not None and a.answer.plan is not None
        }
        if len(plans) != len(answers):
            raise Inconsistent("a rank answered VALIDATE without a plan")
        return plans

    def check_quarantine(self, goal: Goal, plans: dict[int, Plan]) -> None:
        """A rank that could not be restored, or whose old set does not close, and a config that killed an engine, block
        until told otherwise: the rank would refuse its PREPARE (F28).

        Raises:
            Quarantined: with the rank, or that it is the config.
        """
        for rank, session in self.ctx.registry.live.items():
            if why := session.report.quarantine:
                lost = session.report.op_phase == RankPhase.QUARANTINED
                raise Quarantined(
                    f"rank {rank} is quarantined: {why}",
                    details={"reason": "rank_quarantined" if lost else "threads_stuck", "rank": rank},
                    hint="restart the engine: this rank cannot be brought to a clean state"
                    if lost
                    else "it ends by itself when those threads end; else restart the engine",
                )
        bad = {**self.ctx.book.quarantined, **self.ctx.guilty}
        for plan in plans.values():
            if plan.config_digest in bad and not goal.force:
                raise Quarantined(
                    f"this config is quarantined: {bad[plan.config_digest]}",
                    details={"reason": "config_quarantined"},
                    hint="an admin may try it again with force",
                )

    async def probe(self, job: Job, verb: str, *, fresh_s: float = 0.0) -> None:
        """The strict idle probe: freezes and builds nothing, and refuses a busy engine within 100 ms.

        Reports of the last ``fresh_s`` seconds need not be asked for again. Only where FREEZE looks once more:
        a caller that acts on this probe alone leaves it 0.

        Raises:
            NotIdle: with every blocker. Inconsistent: a mandatory counter is missing.
        """
        ctx = self.ctx

        async def ask(nursery: trio.Nursery) -> None:
            await ctx.fanout.ask(ctx.sessions(), 0, AskReport(), trio.current_time() + ctx.settings.call_s)
            nursery.cancel_scope.cancel()

        if any(trio.current_time() - s.report_at >= fresh_s for s in ctx.registry.live.values()):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask, nursery)
                await trio.sleep(PROBE_S)
                if any(not idle.is_idle(s.report.idle) for s in ctx.registry.live.values()):
                    nursery.cancel_scope.cancel()  # who is late is not waited for: its last report counts
        reports = {rank: s.report.idle for rank, s in ctx.registry.live.items()}
        idle.check_complete(reports)
        if any(not idle.is_idle(report) for report in reports.values()):
            job.blocked_by = idle.blockers(reports)
            raise idle.not_idle(verb, reports)

    def _diff(self, goal: Goal, plans: dict[int, Plan]) -> list[dict[str, Any]]:
        """For a dry run: what would change on each rank."""
        if not goal.dry_run:
            return []
        want = desired_document(goal.target, 0)
        rows = []
        for rank, plan in plans.items():
            now = self.ctx.registry.ranks[rank].report.state
            rows.append(
                {
                    "rank": rank,
                    "relation": plan.relation,
                    "changed_keys": plan.changed_keys,
                    "from": _side(now.backend, redact_config(now.extra_config), now.prefetch_policy, now.write_policy),
                    "to": _side(
                        want.hicache_storage_backend,
                        want.hicache_storage_backend_extra_config,
                        want.hicache_storage_prefetch_policy,
                        want.hicache_write_policy,
                    ),
                }
            )
        return rows


def refuse_by_answers(job: Job, answers: dict[int, RankAnswer]) -> None:
    """Turn a fan-out's refusals into one error; the first rank's kind, every rank's words.

    Raises:
        HicacheError, NoEngine, DeadlineExceeded.
    """
    said_no = {rank: a for rank, a in answers.items() if not a.ok}
    if not said_no:
        return
    for rank, answer in answers.items():
        job.result(rank, answer.ok, answer.message.removeprefix(f"rank {rank}: "))
    joined = "; ".join(a.message for a in said_no.values())
    ranks = [msgspec.to_builtins(r) for r in job.results()]
    for answer in said_no.values():
        if answer.error is not None:
            same = {a.error.message for a in said_no.values() if a.error is not None}
            text = answer.error.message if len(same) == 1 and len(said_no) == len(answers) else joined
            raise type(answer.error)(text, details=answer.error.details | {"ranks": ranks}, hint=answer.error.hint)
    lost = sorted(rank for rank, a in said_no.items() if a.lost)
    if lost:
        raise NoEngine(joined, details={"reason": "missing_ranks", "missing_ranks": lost, "ranks": ranks})
    raise DeadlineExceeded(joined, details={"ranks": ranks, "silent_ranks": sorted(said_no)})


def _unsupported(rank: int, can: Capabilities, what: str, reason: str = "") -> UnsupportedByEngine:
    return UnsupportedByEngine(
        f"rank {rank}: this engine cannot {what}: {can.engine or 'unknown engine'} {can.engine_version}, "
        f"tree {can.tree or 'unknown'}" + (f"; {'; '.join(can.problems)}" if can.problems else ""),
        details={
            "engine": can.engine,
            "engine_version": can.engine_version,
            "tree": can.tree,
            "layout": can.layout,
            "problems": list(can.problems),
            **({"reason": reason} if reason else {}),
        },
    )


def _side(backend: str | None, config: str | None, prefetch: str | None, write: str | None) -> dict[str, str | None]:
    return {"backend": backend, "extra_config": config, "prefetch_policy": prefetch, "write_policy": write}


def _once(texts: Any) -> list[str]:
    return list(dict.fromkeys(texts))
