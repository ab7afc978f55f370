"""Who asks, and what that role may do. Identity comes from the connection; the check is made here, once.

Every request type has a declared level (failures.md F97): a request without a row fails a guard test.
"""

from enum import IntEnum

import msgspec

from hicache_proto import api
from hicache_proto.errors import Forbidden, HicacheError, Unauthenticated
from hicache_proto.failover import FailoverRequest, SetFailoverRequest


class Role(IntEnum):
    """Roles in rising order."""

    NONE = 0
    VIEWER = 1
    OPERATOR = 2
    ADMIN = 3


class Actor(msgspec.Struct, frozen=True):
    """The principal behind one connection. ``name`` goes to the audit line and the history."""

    name: str
    role: Role
    transport: str = "socket"  # or "http"
    uid: int | None = None
    gid: int | None = None
    pid: int | None = None


LEVELS: dict[type, Role] = {
    api.StatusRequest: Role.VIEWER,
    api.IdleRequest: Role.VIEWER,
    api.RanksRequest: Role.VIEWER,
    api.HistoryRequest: Role.VIEWER,
    api.WatchRequest: Role.VIEWER,
    api.BackendsRequest: Role.VIEWER,
    api.OperationsRequest: Role.VIEWER,
    FailoverRequest: Role.VIEWER,
    api.AttachRequest: Role.OPERATOR,
    api.DetachRequest: Role.OPERATOR,
    api.PolicyRequest: Role.OPERATOR,
    api.BypassRequest: Role.OPERATOR,
    api.ResolveRequest: Role.OPERATOR,
    api.DrainRequest: Role.OPERATOR,
    api.ResumeRequest: Role.OPERATOR,
    api.CancelRequest: Role.OPERATOR,
    api.RollbackRequest: Role.OPERATOR,
    SetFailoverRequest: Role.OPERATOR,
    api.ClearRequest: Role.ADMIN,
}


def required_role(request: api.ApiRequest) -> Role:
    """The role that ``request`` needs: its type's level, raised for dynamic backends and for force (F18)."""
    level = LEVELS[type(request)]
    if isinstance(request, api.AttachRequest) and (request.force or request.hicache_storage_backend == "dynamic"):
        return Role.ADMIN
    if isinstance(request, SetFailoverRequest):
        policies = [policy for policy in (request.policies or {}).values() if policy is not None]
        if any(spare.hicache_storage_backend == "dynamic" for policy in policies for spare in policy.spares):
            return Role.ADMIN
    return level


def authorize(actor: Actor, request: api.ApiRequest) -> None:
    """Let ``actor`` pass or raise.

    Raises:
        Unauthenticated: no credentials on HTTP.
        Forbidden: known, but not allowed.
    """
    needed = required_role(request)
    if actor.role >= needed:
        return
    error: type[HicacheError] = Unauthenticated if actor.role is Role.NONE and actor.transport == "http" else Forbidden
    raise error(
        f"{type(request).__struct_config__.tag} needs the role {needed.name.lower()}, this caller has "
        f"{actor.role.name.lower()}",
        details={"needed": needed.name.lower(), "role": actor.role.name.lower()},
    )
