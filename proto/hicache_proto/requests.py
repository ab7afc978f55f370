"""Requests of the admin API, which both transports decode into (``api.py`` has the documents that answer them).

Tagged structs: the control socket carries them as they are, the HTTP routes build them from path, query and body.
"""

import msgspec

from hicache_proto.failover import FailoverRequest, SetFailoverRequest
from hicache_proto.model import KnobValue

DEFAULT_TIMEOUT_S = 120.0
DEFAULT_DRAIN_WAIT_S = 30.0


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
