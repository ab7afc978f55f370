"""The admin API: requests that both transports decode into, and the documents that both answer with.

The control socket carries these requests as they are (``control.py``); the HTTP routes build them from path,
query and body. Every document is what the HTTP API returns as JSON, and what ``hicachectl -o json`` prints.
"""

from typing import Any

import msgspec

from hicache_proto.errors import ErrorBody
from hicache_proto.failover import FailoverDocument, FailoverRequest, SetFailoverRequest
from hicache_proto.history import DesiredState as DesiredState
from hicache_proto.history import HistoryDocument as HistoryDocument
from hicache_proto.history import RevisionDocument as RevisionDocument
from hicache_proto.model import (
    Blocker,
    Capabilities,
    GuardReport,
    KnobValue,
    OpUsage,
    StoreUsage,
    ThreadReport,
)

DEFAULT_TIMEOUT_S = 120.0
DEFAULT_DRAIN_WAIT_S = 30.0

# ---- requests


class ChangeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that every changing request has."""

    mode: str = "strict"
    wait_timeout_s: float = 0.0
    timeout_s: float = DEFAULT_TIMEOUT_S
    reason: str = ""
    if_revision: int | None = None
    request_id: str | None = None


class StatusRequest(msgspec.Struct, frozen=True, tag_field="type", tag="status", forbid_unknown_fields=True):
    """What the ranks last reported; ``fresh`` asks them now."""

    fresh: bool = False


class IdleRequest(msgspec.Struct, frozen=True, tag_field="type", tag="idle", forbid_unknown_fields=True):
    """Every idle counter of every rank."""


class RanksRequest(msgspec.Struct, frozen=True, tag_field="type", tag="ranks", forbid_unknown_fields=True):
    """Who is connected, and what the engine can do."""


class BackendsRequest(msgspec.Struct, frozen=True, tag_field="type", tag="backends", forbid_unknown_fields=True):
    """Known backends with their options, as the engine's host has them."""


class AttachRequest(
    ChangeOptions, frozen=True, kw_only=True, tag_field="type", tag="attach", forbid_unknown_fields=True
):
    """PUT: attach, policy update, or swap."""

    hicache_storage_backend: str
    hicache_storage_backend_extra_config_json: str | None = None
    hicache_storage_prefetch_policy: str | None = None
    hicache_write_policy: str | None = None
    swap: bool = False
    checkpoint: bool = False  # with swap: first store the whole tree in the new store, or nothing changes (F58)
    dry_run: bool = False
    force: bool = False  # admin: attach a config that is quarantined


class DetachRequest(
    ChangeOptions, frozen=True, kw_only=True, tag_field="type", tag="detach", forbid_unknown_fields=True
):
    """DELETE."""

    checkpoint: bool = False  # first store the whole tree in the store that is let go, or nothing changes (F58)


class PolicyRequest(
    ChangeOptions, frozen=True, kw_only=True, tag_field="type", tag="policy", forbid_unknown_fields=True
):
    """Change live keys of what is attached (or the policies alone while detached)."""

    hicache_storage_prefetch_policy: str | None = None
    hicache_write_policy: str | None = None
    knobs: dict[str, KnobValue] = {}


class ClearRequest(msgspec.Struct, frozen=True, tag_field="type", tag="clear", forbid_unknown_fields=True):
    """Delete the namespace's pages; ``confirm`` is the namespace, spelt out. Role admin."""

    confirm: str
    timeout_s: float = DEFAULT_TIMEOUT_S


class BypassRequest(msgspec.Struct, frozen=True, tag_field="type", tag="bypass", forbid_unknown_fields=True):
    """Reads miss and writes are skipped, at once, under load."""

    enabled: bool


class ResolveRequest(msgspec.Struct, frozen=True, tag_field="type", tag="resolve", forbid_unknown_fields=True):
    """After drift: take what the ranks have, or bring them back to what is desired."""

    how: str  # "adopt" or "reapply"
    reason: str = ""
    timeout_s: float = DEFAULT_TIMEOUT_S


class DrainRequest(msgspec.Struct, frozen=True, tag_field="type", tag="drain", forbid_unknown_fields=True):
    """Close admission and wait ``timeout_s`` for idle; it reopens by itself after ``hold_s`` (seconds)."""

    timeout_s: float = 30.0
    hold_s: float = 300.0
    reason: str = ""


class ResumeRequest(msgspec.Struct, frozen=True, tag_field="type", tag="resume", forbid_unknown_fields=True):
    """Open admission again."""


class OperationsRequest(msgspec.Struct, frozen=True, tag_field="type", tag="operations", forbid_unknown_fields=True):
    """All remembered operations, or one."""

    operation_id: str | None = None


class CancelRequest(msgspec.Struct, frozen=True, tag_field="type", tag="cancel", forbid_unknown_fields=True):
    """End an operation that has not committed; the old state is restored."""

    operation_id: str


class HistoryRequest(msgspec.Struct, frozen=True, tag_field="type", tag="history", forbid_unknown_fields=True):
    """Every revision that is kept."""


class RollbackRequest(
    ChangeOptions, frozen=True, kw_only=True, tag_field="type", tag="rollback", forbid_unknown_fields=True
):
    """Go to the state of a revision: an ordinary operation with a new revision."""

    revision: int


class WatchRequest(msgspec.Struct, frozen=True, tag_field="type", tag="watch", forbid_unknown_fields=True):
    """Events until the client leaves: a snapshot, then numbered changes after ``last_event_id``."""

    last_event_id: int | None = None


ApiRequest = (
    StatusRequest
    | IdleRequest
    | RanksRequest
    | BackendsRequest
    | AttachRequest
    | DetachRequest
    | PolicyRequest
    | ClearRequest
    | BypassRequest
    | ResolveRequest
    | DrainRequest
    | ResumeRequest
    | OperationsRequest
    | CancelRequest
    | HistoryRequest
    | RollbackRequest
    | FailoverRequest
    | SetFailoverRequest
    | WatchRequest
)

# ---- documents


class RankResult(msgspec.Struct, frozen=True):
    """One rank's part in an operation."""

    rank: int
    success: bool
    message: str = ""
    stall_us: int | None = None


class OperationAnswer(msgspec.Struct, frozen=True):
    """Answer of PUT, DELETE, policy and the other changes."""

    success: bool
    changed: bool
    changed_keys: list[str]
    message: str
    operation_id: str | None
    revision: int
    state: str
    ranks: list[RankResult]
    prepare_ms: float = 0.0
    freeze_ms: float = 0.0
    commit_ms: float = 0.0
    warnings: list[str] = []
    notes: list[str] = []
    dry_run: bool = False
    diff: list[dict[str, Any]] = []


class Drift(msgspec.Struct, frozen=True):
    """One field in which a rank differs from what is desired."""

    rank: int
    field: str
    desired: Any
    reported: Any


class RankStatus(msgspec.Struct, frozen=True):
    """One rank in status: as the rank reports it, with the report's age."""

    rank: int
    dp_rank: int
    tp_rank: int
    pp_rank: int
    pid: int
    epoch: int
    state: str
    hicache_storage_backend: str | None
    hicache_storage_backend_extra_config: str | None
    hicache_storage_prefetch_policy: str | None
    hicache_write_policy: str | None
    revision: int
    bypass: bool
    report_age_ms: int
    connected: bool = True
    threads: list[ThreadReport] = []
    namespace: str = ""
    prefetch_knobs: dict[str, KnobValue] = {}
    quarantine: str = ""
    guard: GuardReport | None = None
    inner: str = ""  # the vendor's connector behind the backend's name (F75)
    store: dict[str, bool | int | str] = {}  # what the store said of itself when it was attached


class StatusDocument(msgspec.Struct, frozen=True):
    """GET /hicache/storage-backend. The first four fields are as in SGLang."""

    hicache_storage_backend: str | None
    hicache_storage_backend_extra_config: str | None
    hicache_storage_prefetch_policy: str | None
    hicache_write_policy: str | None
    revision: int
    state: str
    desired: DesiredState | None
    drift: list[Drift]
    usage: dict[str, OpUsage]
    ranks: list[RankStatus]
    missing_ranks: list[int] = []
    operation: dict[str, Any] | None = None
    engine_id: str | None = None
    reason: str = ""
    warnings: list[str] = []
    usage_by_backend: dict[str, StoreUsage] = {}
    agreed: bool = False  # every expected rank is connected and runs what is desired (F55); ages are in ``ranks``


class RankIdle(msgspec.Struct, frozen=True):
    """One rank's idle counters, and how old its report is (milliseconds)."""

    rank: int
    idle: bool
    counters: dict[str, int]
    report_age_ms: int
    missing_counters: list[str] = []
    stuck: list[str] = []  # threads that stand in a store's call, by name; their transfers block nobody
    held: int = 0  # requests that wait in front of a closed gate; they block nobody


class IdleDocument(msgspec.Struct, frozen=True):
    """GET /hicache/idle."""

    idle: bool
    blocked_by: list[Blocker]
    ranks: list[RankIdle]
    missing_ranks: list[int] = []


class RankInfo(msgspec.Struct, frozen=True):
    """One rank: its place, its process, and what its engine can do."""

    rank: int
    dp_rank: int
    tp_rank: int
    pp_rank: int
    pid: int
    epoch: int
    connected: bool
    report_age_ms: int
    capabilities: Capabilities
    op_n: int = 0
    op_phase: str = ""
    holds: list[str] = []


class RanksDocument(msgspec.Struct, frozen=True):
    """GET /hicache/ranks."""

    engine_id: str | None
    expected: int
    ranks: list[RankInfo]
    missing_ranks: list[int] = []


class BackendsDocument(msgspec.Struct, frozen=True):
    """GET /hicache/backends: per backend ``{name, available, missing, layouts, options_schema, ...}``."""

    backends: list[dict[str, Any]]


class ClearAnswer(msgspec.Struct, frozen=True):
    """How many pages were deleted, together and by rank."""

    success: bool
    deleted: int
    namespace: str
    message: str
    ranks: list[RankResult]


class BypassAnswer(msgspec.Struct, frozen=True):
    """Whether the bypass is on now, and what each rank said."""

    success: bool
    changed: bool
    bypass: bool
    message: str
    ranks: list[RankResult]


class DrainAnswer(msgspec.Struct, frozen=True):
    """Idle with admission closed, or why not; ``hold_s``: seconds until it reopens by itself."""

    success: bool
    state: str
    message: str
    ranks: list[RankResult]
    hold_s: float = 0.0


class OperationDocument(msgspec.Struct, frozen=True):
    """One operation: a job that goes on when its client leaves."""

    id: str
    n: int
    kind: str
    phase: str
    started_at: str  # ISO 8601, UTC; for people, never for decisions
    elapsed_ms: float
    done: bool
    actor: str = ""
    reason: str = ""
    target: DesiredState | None = None
    blocked_by: list[Blocker] = []
    ranks: list[RankResult] = []
    answer: OperationAnswer | None = None
    error: ErrorBody | None = None


class OperationsDocument(msgspec.Struct, frozen=True):
    """GET /hicache/operations, oldest first."""

    operations: list[OperationDocument]


class EventDocument(msgspec.Struct, frozen=True):
    """One event of the stream. ``id`` grows by one; the first after connecting has kind ``snapshot``."""

    id: int
    kind: str
    at: str
    data: dict[str, Any] = {}


class ErrorDocument(msgspec.Struct, frozen=True):
    """Every refusal and failure, in every interface."""

    error: ErrorBody


Document = (
    StatusDocument
    | IdleDocument
    | RanksDocument
    | BackendsDocument
    | OperationAnswer
    | ClearAnswer
    | BypassAnswer
    | DrainAnswer
    | OperationDocument
    | OperationsDocument
    | HistoryDocument
    | EventDocument
    | FailoverDocument
)
