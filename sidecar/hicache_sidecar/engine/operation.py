"""One operation as a job: it has an id, a phase, per-rank results and blockers, and it outlives its client."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import trio

from hicache_proto import api
from hicache_proto.errors import ErrorBody, HicacheError, from_body
from hicache_proto.model import Blocker, TargetState
from hicache_sidecar.core.redaction import redact_config, redact_text, scrub, secrets_in
from hicache_sidecar.core.service import Progress
from hicache_sidecar.engine import idle
from hicache_sidecar.engine.events import EventHub, now_iso

CANCELLED, STOPPING = "cancelled", "the sidecar is stopping"  # why an operation is cancelled
KEEP_JOBS = 200  # finished operations that can still be polled


def desired_document(state: TargetState, revision: int) -> api.DesiredState:
    """A state for showing: secrets redacted."""
    return api.DesiredState(
        hicache_storage_backend=state.backend,
        hicache_storage_backend_extra_config=redact_config(state.extra_config),
        hicache_storage_prefetch_policy=state.prefetch_policy,
        hicache_write_policy=state.write_policy,
        revision=revision,
    )


@dataclass(eq=False, kw_only=True)
class Job:
    """A running or finished operation. ``deadline`` is trio's clock; ``target`` has secrets, ``document()`` not."""

    kind: str  # attach, swap, detach, policy, check, rollback, clear, drain, converge, resolve
    verb: str  # what a refusal calls it
    actor: str
    deadline: float
    hub: EventHub
    reason: str = ""
    mode: str = "strict"
    request_key: str = ""
    digest: str = ""
    id: str = field(default_factory=lambda: "op-" + secrets.token_hex(6))
    n: int = 0
    phase: str = "validate"
    target: TargetState | None = None
    started: float = field(default_factory=trio.current_time)
    started_at: str = field(default_factory=now_iso)
    ended: float | None = None
    ranks: dict[int, api.RankResult] = field(default_factory=dict)
    blocked_by: list[Blocker] = field(default_factory=list)
    answer: api.Document | None = None
    error: HicacheError | None = None
    done: trio.Event = field(default_factory=trio.Event)
    listeners: list[Progress] = field(default_factory=list)
    on_cancel: Callable[[], bool] | None = None  # set while a cancel can still restore the old state
    cancel_why: str = CANCELLED
    cancel_asked: bool = False
    cancelled_early: bool = False
    early: trio.CancelScope | None = None  # of VALIDATE's questions
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)  # of its task
    _secrets_of: str | None = None
    _secrets: set[str] = field(default_factory=set)

    @property
    def known_secrets(self) -> set[str]:
        """Secret values of the target, to be scrubbed from what ranks say."""
        config = self.target.extra_config if self.target is not None else None
        if config != self._secrets_of:  # asked for with every word of every rank
            self._secrets_of, self._secrets = config, secrets_in(config)
        return self._secrets

    def enter(self, phase: str, message: str = "") -> None:
        """Say where the operation stands, to its clients and to the event stream."""
        self.phase = phase
        self.tell(message)
        self.hub.publish(
            "operation", operation_id=self.id, operation=self.kind, phase=phase, message=self.clean(message)
        )

    def cancel(self, why: str = CANCELLED) -> bool:
        """Ask for the old state; False when the new one is decided already. ``done`` says when it is over."""
        self.cancel_why, self.cancel_asked = why, True
        if self.on_cancel is not None:
            return self.on_cancel()
        self.cancelled_early = self.cancelled_early or self.phase == "validate"
        if self.cancelled_early and self.early is not None:
            self.early.cancel()
        return True

    def tell(self, message: str = "") -> None:
        """Progress to the clients that wait."""
        data: dict[str, Any] = {
            "operation_id": self.id,
            "phase": self.phase,
            "message": self.clean(message),
            "blocked_by": idle.rows(self.blocked_by),
            "ranks": [{"rank": r.rank, "success": r.success, "message": r.message} for r in self.ranks.values()],
        }
        for listener in list(self.listeners):
            listener(data)

    def clean(self, text: str) -> str:
        """``text`` without secrets."""
        return redact_text(text, self.known_secrets) if text else text

    def result(self, rank: int, success: bool, message: str, stall_us: int | None = None) -> None:
        """Set one rank's result."""
        before = self.ranks.get(rank)
        if stall_us is None and before is not None:
            stall_us = before.stall_us
        self.ranks[rank] = api.RankResult(rank=rank, success=success, message=self.clean(message), stall_us=stall_us)

    def results(self) -> list[api.RankResult]:
        """Per-rank results in rank order."""
        return [self.ranks[rank] for rank in sorted(self.ranks)]

    def finish(self, answer: api.Document | None, error: HicacheError | None) -> None:
        """End the job; exactly one of the two."""
        if error is not None:
            known, body = self.known_secrets, error.body()
            error = from_body(
                ErrorBody(
                    code=body.code,
                    message=redact_text(body.message, known),
                    retryable=body.retryable,
                    hint=redact_text(body.hint, known),
                    operation_id=body.operation_id or self.id,
                    details=scrub(body.details, known),
                )
            )
        self.answer, self.error = answer, error
        self.ended = trio.current_time()
        self.on_cancel = None
        self.enter("done" if error is None else "failed", "" if error is None else error.message)
        self.done.set()

    def document(self) -> api.OperationDocument:
        """The job for showing."""
        elapsed = (self.ended if self.ended is not None else trio.current_time()) - self.started
        return api.OperationDocument(
            id=self.id,
            n=self.n,
            kind=self.kind,
            phase=self.phase,
            started_at=self.started_at,
            elapsed_ms=round(elapsed * 1000, 3),
            done=self.done.is_set(),
            actor=self.actor,
            reason=self.clean(self.reason),
            target=None if self.target is None else desired_document(self.target, self.n),
            blocked_by=self.blocked_by,
            ranks=self.results(),
            answer=self.answer if isinstance(self.answer, api.OperationAnswer) else None,
            error=None if self.error is None else self.error.body(),
        )
