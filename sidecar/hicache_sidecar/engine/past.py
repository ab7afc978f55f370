"""What was done: operations and their cancel, history, roll-back to a revision, and resolving drift."""

import msgspec
import trio

from hicache_proto import api
from hicache_proto.errors import InvalidRequest, NotFound
from hicache_proto.model import EffectiveState, TargetState
from hicache_sidecar.core.actor import Actor
from hicache_sidecar.core.redaction import redact_text
from hicache_sidecar.core.service import Progress
from hicache_sidecar.engine import status
from hicache_sidecar.engine.changes import Changes
from hicache_sidecar.engine.context import Context
from hicache_sidecar.engine.goals import Goal, check_shape, seconds, whole
from hicache_sidecar.engine.operation import Job, desired_document
from hicache_sidecar.engine.transact import ctx_revision
from hicache_sidecar.store.records import ADOPTED, COMMITTED, Revision

CANCEL_WAIT_S = 30.0  # for the old state to be restored


class Past:
    """Operations, history, roll-back, resolve over one context."""

    def __init__(self, ctx: Context, changes: Changes) -> None:
        self.ctx, self.changes = ctx, changes

    # ---- operations

    def operations(self, request: api.OperationsRequest) -> api.Document:
        """All remembered operations, newest last, or the one asked for.

        Raises:
            NotFound: no such operation since the sidecar started; the history may have it.
        """
        if request.operation_id is None:
            return api.OperationsDocument(operations=[job.document() for job in self.ctx.jobs.values()])
        return self._job(request.operation_id).document()

    async def cancel(self, request: api.CancelRequest) -> api.OperationDocument:
        """Cancel what still can be: the old state is restored before this answers.

        Raises:
            NotFound: no such operation. InvalidRequest: the new state is decided already.
        """
        job = self._job(request.operation_id)
        if job.done.is_set():
            return job.document()
        if not job.cancel():
            raise InvalidRequest(
                f"{job.kind} {job.id} is past the point of cancelling (phase {job.phase})",
                details={"reason": "too_late", "phase": job.phase},
                operation_id=job.id,
            )
        with trio.move_on_after(CANCEL_WAIT_S):
            await job.done.wait()
        return job.document()

    def _job(self, operation_id: str) -> Job:
        job = self.ctx.jobs.get(operation_id)
        if job is None:
            raise NotFound(
                f"no operation {operation_id[:80]!r} since the sidecar started", hint=self._past(operation_id)
            )
        return job

    def _past(self, operation_id: str) -> str:
        """What became of an operation of before the last start: its client asks because the sidecar died."""
        for row in reversed(self.ctx.book.history):
            if row.operation_id == operation_id:
                return f"the history has it: {row.kind} {row.result}, revision {row.revision}"
        return "nor has `hicachectl history`: it is older than all of that, or it changed nothing"

    # ---- history

    def history(self) -> api.HistoryDocument:
        """Every recorded operation and adoption, oldest first, secrets redacted."""
        return api.HistoryDocument(
            revisions=[
                api.RevisionDocument(
                    revision=row.revision,
                    operation_id=row.operation_id,
                    kind=row.kind,
                    result=row.result,
                    actor=row.actor,
                    reason=redact_text(row.reason),
                    at=row.at,
                    target=desired_document(row.state, row.revision),
                    duration_ms=row.duration_ms,
                    message=redact_text(row.message),
                    n=row.n,
                    mode=row.mode,
                    began_at=row.began_at,
                    **_phases(row),
                )
                for row in self.ctx.book.history
            ]
        )

    async def rollback(self, request: api.RollbackRequest, actor: Actor, progress: Progress) -> api.Document:
        """Go back to what revision ``request.revision`` decided.

        Raises:
            NotFound: no such revision. InvalidRequest: its config was learnt from a rank and lacks its secrets.
        """
        check_shape(request)
        replay = self.changes.repeats.find(request)
        if isinstance(replay, Job):
            return await self.changes.wait(replay, progress)
        if replay is not None:
            return replay
        target = next(
            (
                row.state
                for row in reversed(self.ctx.book.history)
                if row.revision == request.revision and row.result in (COMMITTED, ADOPTED)
            ),
            None,
        )
        if target is None:
            raise NotFound(
                f"no revision {request.revision} in the history", hint="`hicachectl history` has those that are kept"
            )
        return await self._move(request, target, "rollback", actor, progress)

    async def resolve(self, request: api.ResolveRequest, actor: Actor, progress: Progress) -> api.Document:
        """End a drift: ``adopt`` takes what the ranks run as desired, ``reapply`` brings them back.

        Raises:
            InvalidRequest: another word, or ranks that disagree (adopt), or no desired state (reapply).
        """
        if request.how not in ("adopt", "reapply"):
            raise InvalidRequest("how is adopt or reapply", details={"field": "how"})
        timeout_s = seconds("timeout_s", request.timeout_s)
        options = api.RollbackRequest(revision=0, mode="drain", timeout_s=timeout_s, reason=request.reason)
        if request.how == "reapply":
            desired = self.ctx.book.desired
            if desired is None:
                raise InvalidRequest("there is no desired state to bring back", details={"reason": "no_desired"})
            return await self._move(options, desired[0], "resolve", actor, progress)
        self.ctx.require_engine()
        job = self.changes.new_job(options, actor, "resolve")
        self.ctx.claim(job)
        return await self.changes.run(job, self._adopt, progress)

    async def _adopt(self, job: Job) -> api.OperationAnswer:
        ctx = self.ctx
        await ctx.refresh(ctx.settings.call_s)
        states = [session.report.state for session in ctx.registry.live.values()]
        if not status.agree(states):
            raise InvalidRequest(
                "the ranks disagree: there is no one state to adopt",
                details={"reason": "split"},
                hint="resolve reapply, or attach with swap, brings all ranks to one state",
            )
        if self._desired_already(states[0]):
            return self._adopted(job, "", ctx_revision(ctx))
        job.n = ctx.book.next_n([ctx.registry.highest_n()])
        state = self._to_adopt(states[0])
        await trio.to_thread.run_sync(
            lambda: ctx.book.adopt(state, job.n, job.n, actor=job.actor, reason=job.reason or "resolve adopt")
        )
        ctx.digest, ctx.split = states[0].config_digest, ""
        return self._adopted(job, "what the ranks run is the desired state now", job.n)

    def _adopted(self, job: Job, changed: str, revision: int) -> api.OperationAnswer:
        for rank in self.ctx.registry.live:
            job.result(rank, True, "adopted" if changed else "already so")
        return api.OperationAnswer(
            success=True,
            changed=bool(changed),
            changed_keys=[],
            message=changed or "no drift: what the ranks run is the desired state already",
            operation_id=job.id,
            revision=revision,
            state=str(status.overall(self.ctx.registry, None)[0]),
            ranks=job.results(),
        )

    def _desired_already(self, state: EffectiveState) -> bool:
        """Whether what all ranks run is what is desired. Nothing is adopted then: a state learnt from a rank lacks its
        secrets."""
        ctx = self.ctx
        if ctx.split or ctx.book.desired is None:
            return False
        known = state.backend is None or (ctx.digest != "" and ctx.digest == state.config_digest)
        return known and not status.drift(ctx.registry, ctx.book.desired[0], ctx.digest)

    def _to_adopt(self, state: EffectiveState) -> TargetState:
        """What a rank runs; with the config as it was given, secrets and all, where that is the desired one."""
        adopted, ctx = status.as_target(state), self.ctx
        if ctx.book.desired is None or not ctx.digest or ctx.digest != state.config_digest:
            return adopted
        was = ctx.book.desired[0]
        knobs = {name: state.knobs.get(name, value) for name, value in was.knobs.items()}
        return msgspec.structs.replace(adopted, extra_config=was.extra_config, knobs=knobs)

    async def _move(
        self, request: api.ChangeOptions, target: TargetState, kind: str, actor: Actor, progress: Progress
    ) -> api.Document:
        """An ordinary operation to a whole state out of the journal."""
        if not status.rebuildable(target):
            raise InvalidRequest(
                "that state was learnt from a rank and its secrets are not known: attach it with its config",
                details={"reason": "secrets_unknown"},
            )
        self.ctx.require_engine()
        job = self.changes.new_job(request, actor, kind)
        self.changes.check_free_and_revision(job, request.if_revision)
        goal = Goal(
            kind=kind,
            verb=kind,
            target=whole(target),
            mode=request.mode,
            swap=True,
            wait_s=request.wait_timeout_s or (api.DEFAULT_DRAIN_WAIT_S if request.mode == "drain" else 0.0),
            timeout_s=request.timeout_s,
            reason=request.reason,
        )

        async def work(running: Job) -> api.OperationAnswer:
            running.target = target
            self.changes.check_capabilities(goal)
            plans = await self.changes.validate(running, goal)
            return await self.changes.apply(running, goal, plans)

        return await self.changes.run(job, work, progress)


def _phases(row: Revision) -> dict[str, float]:
    """Times of the phases, out of the recorded answer; none where it has none: an adoption, a refusal, a recovery."""
    answer = (row.answer or {}).get("answer") or {}
    return {name: float(answer.get(name) or 0.0) for name in ("prepare_ms", "freeze_ms", "commit_ms")}
