"""The one table of the HTTP API. The router, the access check and the OpenAPI document are all made from it.

A route without a level cannot be written down (failures.md F97); ``/healthz`` and ``/readyz`` have the level NONE,
which means open.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from hicache_proto import api
from hicache_proto.errors import InvalidRequest
from hicache_proto.failover import FailoverDocument, FailoverRequest, SetFailoverRequest
from hicache_sidecar.core.actor import LEVELS, Role
from hicache_sidecar.server import bodies

MAX_KEY_CHARS = 128  # of an Idempotency-Key


@dataclass(frozen=True)
class Parts:
    """What of an HTTP request becomes an API request."""

    path: Mapping[str, str]
    query: Any = None
    body: Any = None
    if_revision: int | None = None
    request_id: str | None = None


@dataclass(frozen=True, kw_only=True)
class Route:
    """One row. ``build`` makes the API request; rows without it are served by name."""

    method: str
    path: str
    level: Role
    summary: str
    document: type | None = None  # what 200 carries; None: not JSON
    request: type | None = None
    build: Callable[[Parts], api.ApiRequest] | None = None
    query: type = bodies.Empty
    body: type | None = None
    body_optional: bool = False
    conditional: bool = False  # takes If-Match and Idempotency-Key
    media: str = "application/json"

    @property
    def name(self) -> str:
        """Identifier for OpenAPI and the metrics label: the template, so that it is bounded."""
        return f"{self.method} {self.path}"


def _fields(parts: Parts) -> dict[str, Any]:
    """Body or query as keyword arguments."""
    source = parts.body if parts.body is not None else parts.query
    return msgspec.structs.asdict(source)


def _plain(request: type[Any]) -> Callable[[Parts], api.ApiRequest]:
    def build(parts: Parts) -> api.ApiRequest:
        made: api.ApiRequest = request(**_fields(parts))
        return made

    return build


def _changing(request: type[Any]) -> Callable[[Parts], api.ApiRequest]:
    def build(parts: Parts) -> api.ApiRequest:
        made: api.ApiRequest = request(**_fields(parts), if_revision=parts.if_revision, request_id=parts.request_id)
        return made

    return build


def _by_id(request: type[Any]) -> Callable[[Parts], api.ApiRequest]:
    def build(parts: Parts) -> api.ApiRequest:
        made: api.ApiRequest = request(operation_id=parts.path["id"])
        return made

    return build


def _api(method: str, path: str, request: type[Any], document: type, summary: str, **more: Any) -> Route:
    """A row whose level is the one of its request type."""
    more.setdefault("build", (_changing if more.get("conditional") else _plain)(request))
    return Route(
        method=method, path=path, request=request, document=document, level=LEVELS[request], summary=summary, **more
    )


BACKEND = "/hicache/storage-backend"

ROUTES: tuple[Route, ...] = (
    _api("GET", BACKEND, api.StatusRequest, api.StatusDocument, "Status of all ranks", query=bodies.StatusQuery),
    _api("PUT", BACKEND, api.AttachRequest, api.OperationAnswer, "Attach, change policies, or swap",
         body=bodies.AttachBody, conditional=True),
    _api("DELETE", BACKEND, api.DetachRequest, api.OperationAnswer, "Detach (idempotent)",
         query=bodies.DetachQuery, conditional=True),
    _api("POST", f"{BACKEND}/clear", api.ClearRequest, api.ClearAnswer, "Delete this namespace's pages",
         body=bodies.ClearBody),
    _api("POST", f"{BACKEND}/bypass", api.BypassRequest, api.BypassAnswer, "Reads miss, writes are skipped",
         body=bodies.BypassBody),
    _api("POST", f"{BACKEND}/resolve", api.ResolveRequest, api.OperationAnswer, "Settle drift",
         body=bodies.ResolveBody),
    _api("POST", "/hicache/drain", api.DrainRequest, api.DrainAnswer, "Close admission and wait for idle",
         body=bodies.DrainBody, body_optional=True),
    _api("POST", "/hicache/resume", api.ResumeRequest, api.DrainAnswer, "Open admission again",
         body=bodies.Empty, body_optional=True),
    _api("GET", "/hicache/idle", api.IdleRequest, api.IdleDocument, "Every counter of every rank"),
    _api("GET", "/hicache/ranks", api.RanksRequest, api.RanksDocument, "Ranks with capabilities"),
    _api("GET", "/hicache/backends", api.BackendsRequest, api.BackendsDocument, "Known backends and their options"),
    _api("GET", "/hicache/operations", api.OperationsRequest, api.OperationsDocument, "Operations, newest last"),
    _api("GET", "/hicache/operations/{id}", api.OperationsRequest, api.OperationDocument, "One operation",
         build=_by_id(api.OperationsRequest)),
    _api("DELETE", "/hicache/operations/{id}", api.CancelRequest, api.OperationDocument, "Cancel; state restored",
         build=_by_id(api.CancelRequest)),
    _api("GET", "/hicache/history", api.HistoryRequest, api.HistoryDocument, "Revisions"),
    _api("POST", "/hicache/rollback", api.RollbackRequest, api.OperationAnswer, "Go back to a revision",
         body=bodies.RollbackBody, conditional=True),
    _api("GET", "/hicache/failover", FailoverRequest, FailoverDocument, "Failover policies and where they stand"),
    _api("PUT", "/hicache/failover", SetFailoverRequest, FailoverDocument, "Set failover policies, or release a hold",
         body=bodies.FailoverBody),
    Route(method="GET", path="/events", level=Role.VIEWER, request=api.WatchRequest,
          summary="A snapshot, then numbered changes; Last-Event-ID resumes", media="text/event-stream"),
    Route(method="GET", path="/healthz", level=Role.NONE, document=bodies.Health, summary="The loop turns"),
    Route(method="GET", path="/readyz", level=Role.NONE, document=bodies.Health,
          summary="Topology complete and recovery ended"),
    Route(method="GET", path="/metrics", level=Role.VIEWER, summary="Prometheus or OpenMetrics", media="text/plain"),
    Route(method="GET", path="/openapi.json", level=Role.VIEWER, document=dict, summary="This document"),
)  # fmt: skip


def parse_if_match(value: str | None) -> int | None:
    """The revision in an If-Match header: ``"7"``, ``7``; ``*`` asks for nothing.

    Raises:
        InvalidRequest: anything else.
    """
    if value is None or value.strip() == "*":
        return None
    text = value.strip().removeprefix("W/").strip('"')
    if not (text.isascii() and text.isdecimal()) or len(text) > 18:
        raise InvalidRequest('If-Match carries one revision, such as "7"', details={"header": "If-Match"})
    return int(text)


def parse_request_id(value: str | None) -> str | None:
    """An Idempotency-Key: 1 to MAX_KEY_CHARS printable ASCII characters.

    Raises:
        InvalidRequest: anything else.
    """
    if value is None:
        return None
    if not 1 <= len(value) <= MAX_KEY_CHARS or not all(" " <= char <= "~" for char in value):
        raise InvalidRequest(
            f"Idempotency-Key has 1 to {MAX_KEY_CHARS} printable ASCII characters",
            details={"header": "Idempotency-Key"},
        )
    return value
