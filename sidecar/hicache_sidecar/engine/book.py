"""What the coordinator needs of the journal: ``store.journal.Journal`` has exactly this shape.

The methods write and fsync, so they run in a worker thread; reading the properties is free. A ``JournalFailed``
that one of them raises must end the process (design.md: a failed fsync is settled by recovery alone).
"""

from collections.abc import Iterable
from typing import Any, Protocol

from hicache_proto.model import TargetState
from hicache_sidecar.store.records import Begin, Revision


class Book(Protocol):
    """The durable record of operations. States carry secrets: redact before showing."""

    @property
    def desired(self) -> tuple[TargetState, int] | None:
        """The desired state and its revision."""

    @property
    def pending(self) -> Begin | None:
        """The last BEGIN while it has no outcome."""

    @property
    def history(self) -> tuple[Revision, ...]:
        """Rows of past operations and adoptions, oldest first."""

    @property
    def last_n(self) -> int:
        """The highest operation number on record."""

    @property
    def quarantined(self) -> dict[str, str]:
        """Config digests that killed an engine, and why."""

    def next_n(self, seen: Iterable[int] = ()) -> int:
        """A number above everything seen (rule 6)."""

    def answer_for(self, request_key: str) -> tuple[str, dict[str, Any] | None] | None:
        """(body digest, answer) of the operation that used this key."""

    def begin(
        self,
        *,
        n: int,
        operation_id: str,
        kind: str,
        a: TargetState,
        b: TargetState,
        participants: Iterable[int],
        mode: str = "strict",
        request_key: str = "",
        body_digest: str = "",
        actor: str = "",
        reason: str = "",
        at: str = "",
    ) -> Begin:
        """Durable BEGIN. Raises JournalFull when nothing happened."""

    def outcome_b(
        self,
        n: int,
        answer: dict[str, Any] | None = None,
        *,
        revision: int | None = None,
        message: str = "",
        duration_ms: float = 0.0,
        at: str = "",
    ) -> int:
        """Durable decision for B; returns the revision."""

    def outcome_a(
        self,
        n: int,
        answer: dict[str, Any] | None = None,
        *,
        message: str = "",
        duration_ms: float = 0.0,
        at: str = "",
    ) -> int:
        """Record that n ended on A."""

    def adopt(
        self, state: TargetState, revision: int, n: int, *, actor: str = "", reason: str = "", at: str = ""
    ) -> None:
        """Take what the ranks run as desired."""

    def quarantine(self, digest: str, reason: str, *, at: str = "") -> None:
        """Never try this config again by itself; an empty reason lifts it."""
