"""What HTTP clients send: JSON bodies and query parameters, typed and bounded, with the names of interface.md.

Each becomes one request of ``hicache_proto.api``; If-Match and Idempotency-Key are headers and join there. Unknown
fields are refused.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from hicache_proto.api import DEFAULT_TIMEOUT_S
from hicache_proto.errors import ErrorBody
from hicache_proto.failover import FailoverPolicy

ModeName = Literal["strict", "drain", "hot"]
PrefetchPolicy = Literal["best_effort", "wait_complete", "timeout"]
WritePolicy = Literal["write_back", "write_through", "write_through_selective"]
MAX_WAIT_S = 86400.0  # one day; a longer wait is a mistake
WaitSeconds = Annotated[float, Meta(ge=0, le=MAX_WAIT_S, description="Seconds.")]
TimeoutSeconds = Annotated[float, Meta(gt=0, le=MAX_WAIT_S, description="Seconds for the whole operation.")]
Checkpoint = Annotated[
    bool,
    Meta(description="Swap, detach: first store L1 and L2 in the store that stays; if that fails nothing changes."),
]
Reason = Annotated[str, Meta(max_length=1024, description="Shown in the history and the audit line.")]


class Empty(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """No fields; ``{}`` or no body at all."""


class AttachBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """PUT /hicache/storage-backend: attach, policy update, or swap."""

    hicache_storage_backend: Annotated[str, Meta(min_length=1, max_length=128)]
    hicache_storage_backend_extra_config_json: str | None = None
    hicache_storage_prefetch_policy: PrefetchPolicy | None = None
    hicache_write_policy: WritePolicy | None = None
    mode: ModeName = "strict"
    swap: bool = False
    checkpoint: Checkpoint = False
    wait_timeout_s: WaitSeconds = 0.0
    timeout_s: TimeoutSeconds = DEFAULT_TIMEOUT_S
    dry_run: bool = False
    reason: Reason = ""
    force: bool = False


class DetachQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Query parameters of DELETE /hicache/storage-backend."""

    mode: ModeName = "strict"
    checkpoint: Checkpoint = False
    wait_timeout_s: WaitSeconds = 0.0
    timeout_s: TimeoutSeconds = DEFAULT_TIMEOUT_S
    reason: Reason = ""


class StatusQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``?fresh=1`` asks the ranks now."""

    fresh: bool = False


class ClearBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The namespace, spelt out, so that nothing is deleted by accident."""

    confirm: Annotated[str, Meta(min_length=1, max_length=1024)]
    timeout_s: TimeoutSeconds = DEFAULT_TIMEOUT_S


class BypassBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """POST /hicache/storage-backend/bypass."""

    enabled: bool


class ResolveBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """POST /hicache/storage-backend/resolve."""

    how: Literal["adopt", "reapply"]
    reason: Reason = ""
    timeout_s: TimeoutSeconds = DEFAULT_TIMEOUT_S


class DrainBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """POST /hicache/drain."""

    timeout_s: TimeoutSeconds = 30.0
    hold_s: Annotated[float, Meta(gt=0, le=MAX_WAIT_S, description="Seconds until admission reopens by itself.")] = (
        300.0
    )
    reason: Reason = ""


class RollbackBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """POST /hicache/rollback."""

    revision: Annotated[int, Meta(ge=0)]
    mode: ModeName = "strict"
    wait_timeout_s: WaitSeconds = 0.0
    timeout_s: TimeoutSeconds = DEFAULT_TIMEOUT_S
    reason: Reason = ""


class FailoverBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """PUT /hicache/failover: policies by backend (``*``: any other); null removes one when others are kept."""

    policies: dict[str, FailoverPolicy | None] | None = None
    keep_others: bool = False
    release: bool = False
    reason: Reason = ""


class Health(msgspec.Struct, frozen=True, omit_defaults=True):
    """GET /healthz and /readyz. ``error`` is there when not ready."""

    ok: bool
    details: dict[str, Any] = {}
    error: ErrorBody | UnsetType = UNSET
