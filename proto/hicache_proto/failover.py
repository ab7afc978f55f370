"""Failover policies: what an operator says should happen when a store fails, and what the sidecar shows of it.

A policy belongs to a backend by name; ``*`` is for every backend without one of its own. ``core/failover.py`` of
the sidecar is the machine that follows them. Durations in seconds.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

ANY_BACKEND = "*"
MAX_SPARES = 16
MAX_POLICIES = 64
MAX_CONFIG_CHARS = 262_144  # of one spare's extra config

_Pause = Annotated[float, Meta(ge=0, le=86_400)]
_Span = Annotated[float, Meta(gt=0, le=86_400)]


class Spare(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A whole target, with the names of PUT /hicache/storage-backend. A policy that is not said is taken over from
    the store that failed. The extra config may hold secrets: kept as desired states are, shown nowhere."""

    hicache_storage_backend: Annotated[str, Meta(min_length=1, max_length=128)]
    hicache_storage_backend_extra_config_json: Annotated[str, Meta(max_length=MAX_CONFIG_CHARS)] | None = None
    hicache_storage_prefetch_policy: Literal["best_effort", "wait_complete", "timeout"] | None = None
    hicache_write_policy: Literal["write_back", "write_through", "write_through_selective"] | None = None

    def __repr__(self) -> str:
        return f"Spare({self.hicache_storage_backend!r})"


class FailoverPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to do when the guards say that a backend fails.

    ``action``: ``none``; ``bypass`` it; bypass, then ``detach`` it; bypass, then go to the first of ``spares`` that
    can be attached. ``reconnect``: go back by itself once it is well; null: yes, but not from a spare (F84).
    """

    action: Literal["none", "bypass", "detach", "spares"] = "none"
    spares: Annotated[list[Spare], Meta(max_length=MAX_SPARES)] = []
    reconnect: bool | None = None
    watch: Annotated[
        Literal["reads", "reads_and_writes"],
        Meta(description="reads: a store that only refuses writes (a full disk) still serves and is kept"),
    ] = "reads"
    mode: Annotated[
        Literal["auto", "strict", "drain", "hot"],
        Meta(description="of the operations; auto: hot where every rank can, else drain"),
    ] = "auto"
    confirm_s: Annotated[_Pause, Meta(description="how long a breaker must be open before anything is done")] = 2.0
    min_stay_s: Annotated[_Pause, Meta(description="after a failover: nothing goes back earlier")] = 30.0
    steady_s: Annotated[_Pause, Meta(description="back and well for so long: the failover is over")] = 60.0
    backoff_s: Annotated[_Span, Meta(description="first pause between two tries; doubles with each")] = 5.0
    backoff_max_s: Annotated[_Span, Meta(description="longest pause between two tries")] = 600.0
    wait_s: Annotated[_Pause, Meta(description="how long an operation waits for idle (strict, drain)")] = 30.0
    timeout_s: Annotated[_Span, Meta(description="for one whole operation")] = 120.0
    flap_limit: Annotated[
        int, Meta(ge=2, le=1000, description="most transitions within flap_window_s; then all is held")
    ] = 6
    flap_window_s: _Span = 600.0

    @property
    def goes_back(self) -> bool:
        """``reconnect`` with its default filled in."""
        return self.reconnect if self.reconnect is not None else self.action in ("bypass", "detach")


Policies = dict[str, FailoverPolicy]


class FailoverRequest(msgspec.Struct, frozen=True, tag_field="type", tag="failover", forbid_unknown_fields=True):
    """GET /hicache/failover."""


class SetFailoverRequest(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="set_failover", forbid_unknown_fields=True
):
    """PUT /hicache/failover. ``policies`` replaces all of them, or with ``keep_others`` only those named (null
    removes one); left out, they stay. ``release`` ends a hold."""

    policies: dict[str, FailoverPolicy | None] | None = None
    keep_others: bool = False
    release: bool = False
    reason: str = ""


class FailoverStep(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that the failover did or noticed, with its reason. ``at``: ISO 8601, UTC, for people."""

    at: str
    step: str  # bypass, unbypass, detach, spare, return, failed, recovered, hold, release, ended
    reason: str = ""
    backend: str | None = None
    to: str | None = None
    operation_id: str | None = None


class FailoverRank(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank's guard says."""

    rank: int
    condition: str  # well, trying, sick, unknown
    why: str = ""
    bypass: bool = False


class FailoverDocument(msgspec.Struct, frozen=True, kw_only=True):
    """Policies and where the failover stands; secrets redacted.

    ``state``: ``off`` (no policy for what is attached), ``watching``, ``suspect``, ``bypassed``, ``moving``,
    ``detached``, ``on_spare``, ``trial`` (back, and watched), ``held``. ``home`` is what was left.
    """

    policies: Policies
    state: str
    reason: str = ""
    backend: str | None = None
    home: Spare | None = None
    attempts: int = 0
    next_try_in_s: float | None = None
    transitions: int = 0
    steps: list[FailoverStep] = []
    ranks: list[FailoverRank] = []
    warnings: list[str] = []


FAILOVER_STATES = (
    "off", "watching", "suspect", "bypassed", "moving", "detached", "on_spare", "trial", "held",
)  # fmt: skip  # the order is fixed: metrics export the index
