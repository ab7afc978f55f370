"""The admin API: requests (of ``requests.py``), and the documents that both transports answer with.

Every document is what the HTTP API returns as JSON, and what ``hicachectl -o json`` prints.
"""

from typing import Any

import msgspec

from hicache_proto.errors import ErrorBody
from hicache_proto.failover import FailoverDocument
from hicache_proto.failover import FailoverRequest as FailoverRequest
from hicache_proto.failover import SetFailoverRequest as SetFailoverRequest
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
from hicache_proto.requests import DEFAULT_DRAIN_WAIT_S as DEFAULT_DRAIN_WAIT_S
from hicache_proto.requests import DEFAULT_TIMEOUT_S as DEFAULT_TIMEOUT_S
from hicache_proto.requests import ApiRequest as ApiRequest
from hicache_proto.requests import AttachRequest as AttachRequest
from hicache_proto.requests import BackendsRequest as BackendsRequest
from hicache_proto.requests import BypassRequest as BypassRequest
from hicache_proto.requests import CancelRequest as CancelRequest
from hicache_proto.requests import ChangeOptions as ChangeOptions
from hicache_proto.requests import ClearRequest as ClearRequest
from hicache_proto.requests import DetachRequest as DetachRequest
from hicache_proto.requests import DrainRequest as DrainRequest
from hicache_proto.requests import HistoryRequest as HistoryRequest
from hicache_proto.requests import IdleRequest as IdleRequest
from hicache_proto.requests import OperationsRequest as OperationsRequest
from hicache_proto.requests import PolicyRequest as PolicyRequest
from hicache_proto.requests import RanksRequest as RanksRequest
from hicache_proto.requests import ResolveRequest as ResolveRequest
from hicache_proto.requests import ResumeRequest as ResumeRequest
from hicache_proto.requests import RollbackRequest as RollbackRequest
from hicache_proto.requests import StatusRequest as StatusRequest
from hicache_proto.requests import WatchRequest as WatchRequest


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
