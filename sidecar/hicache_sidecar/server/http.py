"""The HTTP admin API as an ASGI application: route table in, JSON out, one function for every answer.

The order of the checks: Host and Origin (403), token (401), route and method (404, 405), size of the body (413), its
shape (422); then the request goes to the service, which checks the role (403) and everything else. Who is not
authenticated learns nothing about routes and bodies.
"""

import logging
from collections.abc import Callable
from typing import Any

import msgspec
import trio
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as Path
from starlette.routing import Router
from starlette.types import Receive, Scope, Send

from hicache_proto import api
from hicache_proto.errors import ErrorBody, Forbidden, InvalidRequest, MethodNotAllowed, NoEngine, NotFound, TooLarge
from hicache_proto.framing import MAX_FRAME_BYTES
from hicache_sidecar.core.actor import Actor, Role, authorize
from hicache_sidecar.core.service import Service
from hicache_sidecar.obs.counters import Counters
from hicache_sidecar.server import openapi, sse
from hicache_sidecar.server.auth import Tokens
from hicache_sidecar.server.bodies import Health
from hicache_sidecar.server.hosts import Hosts
from hicache_sidecar.server.replies import invalid, refusal, retry_after_s, status_of
from hicache_sidecar.server.routes import ROUTES, Parts, Route, parse_if_match, parse_request_id

log = logging.getLogger("hicache.server")

MAX_BODY_BYTES = MAX_FRAME_BYTES  # interface.md: over 1 MiB is refused unread
BODY_S = 30.0  # a client that sends its megabyte slower than this is not a client
_JSON = "application/json"


class HttpApi:
    """ASGI application. ``tokens`` and ``hosts`` are asked per request, so that a reload takes effect at once."""

    def __init__(
        self, service: Service, tokens: Callable[[], Tokens], hosts: Callable[[], Hosts], counters: Counters
    ) -> None:
        self._service, self._tokens, self._hosts, self._counters = service, tokens, hosts, counters
        self.closing = trio.Event()  # set when the daemon stops: event streams end
        self._open = {route.path for route in ROUTES if route.level is Role.NONE}
        by_path: dict[str, dict[str, Route]] = {}
        for route in ROUTES:
            by_path.setdefault(route.path, {})[route.method] = route
        paths = [Path(path, endpoint=_Resource(self, methods)) for path, methods in by_path.items()]
        self._router = Router(paths, redirect_slashes=False, default=_nowhere)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1003})
            return
        request = Request(scope, receive)
        try:
            self._hosts().check(request.headers.get("host"), request.headers.get("origin"), scope.get("server"))
            if request.url.path not in self._open:
                scope["hicache.actor"] = self._tokens().actor(request.headers.get("authorization"))
            await self._router(scope, receive, send)
        except Exception as exc:
            headers = {"Allow": str(exc.details.get("allow", ""))} if isinstance(exc, MethodNotAllowed) else None
            response = error_response(refusal(exc, self._counters, "http"), headers=headers)
            self._count(scope, response.status_code)
            await response(scope, receive, send)

    async def serve_route(self, route: Route, request: Request, send: Send) -> None:
        """Answer one request of a known route."""
        request.scope["hicache.route"] = route.name
        actor: Actor | None = request.scope.get("hicache.actor")
        if route.level is not Role.NONE and (actor is None or actor.role < Role.VIEWER):
            raise Forbidden("this route needs a role")
        if route.request is api.WatchRequest:
            await self._events(actor or _anonymous(), request, send)
            return
        response = await self._respond(route, actor or _anonymous(), request)
        self._count(request.scope, response.status_code)
        await response(request.scope, request.receive, send)

    async def _respond(self, route: Route, actor: Actor, request: Request) -> Response:
        parts = await _read(route, request)
        if route.build is not None:
            document = await self._service.handle(route.build(parts), actor, lambda _progress: None)
            return _json(document, headers=_etag(document))
        match route.path:
            case "/healthz":
                return _json(Health(ok=True, details=self._service.live()))
            case "/readyz":
                return self._readyz()
            case "/metrics":
                body, content_type = self._service.metrics(request.headers.get("accept", ""))
                return _bytes(body, content_type)
            case "/openapi.json":
                return _bytes(openapi.document(), _JSON)
            case _:
                raise NotFound(f"nothing serves {route.name}")

    def _readyz(self) -> Response:
        ready, details = self._service.ready()
        if ready:
            return _json(Health(ok=True, details=details))
        body = NoEngine("not ready", details=details).body()
        health = Health(ok=False, details=details, error=body)
        return _json(health, status=503, headers={"Retry-After": str(retry_after_s(body))})

    async def _events(self, actor: Actor, request: Request, send: Send) -> None:
        last = request.headers.get("last-event-id")
        if last is not None and not (last.isascii() and last.isdecimal() and len(last) <= 18):
            raise InvalidRequest("Last-Event-ID is a number", details={"header": "Last-Event-ID"})
        watch = api.WatchRequest(last_event_id=None if last is None else int(last))
        authorize(actor, watch)
        self._count(request.scope, 200)
        await sse.stream(self._service.watch(watch, actor), request.receive, send, self.closing)

    def _count(self, scope: Scope, status: int) -> None:
        self._counters.add("hicache_http_responses", scope.get("hicache.route", "none"), str(status))


class _Resource:
    """All methods of one path."""

    def __init__(self, http: HttpApi, methods: dict[str, Route]) -> None:
        self._http, self._methods = http, methods

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        route = self._methods.get("GET" if request.method == "HEAD" else request.method)
        if route is None:
            allow = ", ".join(sorted(self._methods))
            raise MethodNotAllowed(f"this route does not take {request.method[:20]}", details={"allow": allow})
        await self._http.serve_route(route, request, send)


async def _nowhere(scope: Scope, receive: Receive, send: Send) -> None:
    raise NotFound("no such route", hint="GET /openapi.json lists them")


def _anonymous() -> Actor:
    return Actor(name="anonymous", role=Role.NONE, transport="http")


# ---- reading


async def _read(route: Route, request: Request) -> Parts:
    """Everything of the request that counts, checked for shape."""
    raw = await read_body(request)
    conditions: dict[str, Any] = {}
    if route.conditional:
        conditions = {
            "if_revision": parse_if_match(request.headers.get("if-match")),
            "request_id": parse_request_id(request.headers.get("idempotency-key")),
        }
    elif request.method not in ("GET", "HEAD") and "if-match" in request.headers:
        # Ignoring a condition would do what the caller said not to do.
        raise InvalidRequest("this route does not take If-Match", details={"header": "If-Match"})
    return Parts(path=request.path_params, query=_query(route, request), body=_body(route, raw), **conditions)


async def read_body(request: Request) -> bytes:
    """The body, refused unread when its announced length is over the limit.

    Raises:
        TooLarge: over MAX_BODY_BYTES.
        InvalidRequest: slower than BODY_S, or cut off.
    """
    announced = request.headers.get("content-length", "0")
    if not announced.isdecimal() or int(announced) > MAX_BODY_BYTES:
        raise TooLarge(f"body of {announced[:20]} bytes: at most {MAX_BODY_BYTES}")
    body = bytearray()
    with trio.move_on_after(BODY_S) as scope:
        while True:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise InvalidRequest("the body was cut off")
            body += message.get("body", b"")
            if len(body) > MAX_BODY_BYTES:
                raise TooLarge(f"body of more than {MAX_BODY_BYTES} bytes")
            if not message.get("more_body", False):
                break
    if scope.cancelled_caught:
        raise InvalidRequest(f"the body did not come within {BODY_S:.0f} s")
    return bytes(body)


def _query(route: Route, request: Request) -> Any:
    items = request.query_params.multi_items()
    values = dict(items)
    if len(values) != len(items):
        raise InvalidRequest("a query parameter is given twice")
    try:
        return msgspec.convert(values, route.query, strict=False)
    except msgspec.ValidationError as exc:
        raise invalid(exc, route.query) from None


def _body(route: Route, raw: bytes) -> Any:
    if route.body is None:
        if raw.strip():
            raise InvalidRequest("this route takes no body", details={"reason": "unexpected_body"})
        return None
    if not raw.strip():
        if not route.body_optional:
            raise InvalidRequest("this route needs a JSON body", details={"reason": "no_body"})
        raw = b"{}"
    try:
        return msgspec.json.decode(raw, type=route.body)
    except msgspec.ValidationError as exc:
        raise invalid(exc, route.body) from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None


# ---- writing


def _json(document: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return _bytes(msgspec.json.encode(document), _JSON, status=status, headers=headers)


def _bytes(body: bytes, media: str, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    common = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "Content-Type": media}
    return Response(body, status_code=status, headers=common | (headers or {}))


def error_response(body: ErrorBody, *, headers: dict[str, str] | None = None) -> Response:
    """The one error answer: shape, status, and the headers that go with a code."""
    extra = dict(headers or {})
    retry = retry_after_s(body)
    if retry is not None:
        extra["Retry-After"] = str(retry)
    if body.code == "unauthenticated":
        extra["WWW-Authenticate"] = 'Bearer realm="hicache-sidecar"'
    if body.code == "too_large":
        extra["Connection"] = "close"  # the rest of the body is never read
    return _json(api.ErrorDocument(error=body), status=status_of(body), headers=extra)


def _etag(document: api.Document) -> dict[str, str]:
    if isinstance(document, api.StatusDocument | api.OperationAnswer):
        return {"ETag": f'"{document.revision}"'}
    return {}
