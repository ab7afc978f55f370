"""The HTTP application: every route, access, shapes, headers. Called as ASGI; the wire is in test_listener.py."""

from pathlib import Path
from typing import Any

import pytest
import trio
from tests.unit.server.fakes import FakeService, Reply, call

from hicache_proto import api
from hicache_proto.errors import ERRORS, NotIdle
from hicache_sidecar.core.actor import LEVELS, Role
from hicache_sidecar.obs.counters import Counters
from hicache_sidecar.server.auth import Tokens
from hicache_sidecar.server.hosts import Hosts
from hicache_sidecar.server.http import MAX_BODY_BYTES, HttpApi
from hicache_sidecar.server.routes import BACKEND, ROUTES, Route

FULL, VIEWER = "full-token-0123456789", "viewer-token-0123456789"
BODIES: dict[str, Any] = {
    f"PUT {BACKEND}": {"hicache_storage_backend": "file"},
    f"POST {BACKEND}/clear": {"confirm": "ns"},
    f"POST {BACKEND}/bypass": {"enabled": True},
    f"POST {BACKEND}/resolve": {"how": "adopt"},
    "POST /hicache/rollback": {"revision": 3},
    "PUT /hicache/failover": {"policies": {"file": {"action": "bypass"}}},
}


class Site:
    """An application and what is behind it."""

    def __init__(self, tokens: Tokens | None = None, hosts: Hosts | None = None) -> None:
        self.service, self.counters = FakeService(), Counters()
        self.app = HttpApi(self.service, lambda: tokens or Tokens(), lambda: hosts or Hosts(), self.counters)
        self.service.hold_watch = False

    async def call(self, method: str, target: str, body: Any = None, **more: Any) -> Reply:
        return await call(self.app, method, target, body, **more)

    async def route(self, route: Route, **more: Any) -> Reply:
        return await self.call(route.method, route.path.replace("{id}", "op-1"), BODIES.get(route.name), **more)

    @property
    def request(self) -> api.ApiRequest:
        return self.service.seen[-1][0]


@pytest.fixture
def site() -> Site:
    return Site()


@pytest.fixture
def locked(tmp_path: Path) -> Site:
    """With a full and a viewer token."""
    for name, token in (("full", FULL), ("viewer", VIEWER)):
        (tmp_path / name).write_text(token + "\n")
        (tmp_path / name).chmod(0o600)
    return Site(Tokens.load(tmp_path / "full", tmp_path / "viewer"))


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


# ---- routes and access


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
async def test_every_route_has_a_level_and_anonymous_is_401_except_health(route: Route, locked: Site) -> None:
    """F97, F93: enumerate the routes."""
    assert isinstance(route.level, Role)
    if route.request is not None:
        assert route.level is LEVELS[route.request]
    reply = await locked.route(route)
    if route.path in ("/healthz", "/readyz"):
        assert route.level is Role.NONE
        assert reply.status in (200, 503)
    else:
        assert route.level > Role.NONE
        assert (reply.status, reply.code) == (401, "unauthenticated")
        assert reply.headers["www-authenticate"].startswith("Bearer")
        assert (await locked.route(route, headers=bearer(FULL[:-1] + "x"))).status == 401
    assert locked.service.seen == []


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
async def test_every_route_answers_the_full_token(route: Route, locked: Site) -> None:
    reply = await locked.route(route, headers=bearer(FULL))
    assert reply.status == (503 if route.path == "/readyz" else 200)
    assert reply.headers["content-type"].startswith(route.media.replace("text/plain", "application/openmetrics-text"))
    if route.request is not None:
        assert isinstance(locked.request, route.request)
        assert locked.service.seen[-1][1].role is Role.ADMIN


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
async def test_viewer_token_reads_and_changes_nothing(route: Route, locked: Site) -> None:
    reply = await locked.route(route, headers=bearer(VIEWER))
    if route.level > Role.VIEWER:
        assert (reply.status, reply.code) == (403, "forbidden")
        assert locked.service.seen == []
    else:
        assert reply.status in (200, 503)


async def test_every_api_request_has_a_route_or_is_the_sockets_own() -> None:
    """The policy request is PUT on HTTP; everything else has its row."""
    assert {route.request for route in ROUTES if route.request} == set(LEVELS) - {api.PolicyRequest}


async def test_loopback_without_token_is_operator_and_may_not_clear(site: Site) -> None:
    """F118: clear, dynamic backends and force need a token."""
    assert (await site.call("PUT", BACKEND, {"hicache_storage_backend": "file"})).status == 200
    assert site.service.seen[-1][1].role is Role.OPERATOR
    assert (await site.call("POST", f"{BACKEND}/clear", {"confirm": "ns"})).code == "forbidden"
    assert (await site.call("PUT", BACKEND, {"hicache_storage_backend": "dynamic"})).code == "forbidden"
    forced = {"hicache_storage_backend": "file", "force": True}
    assert (await site.call("PUT", BACKEND, forced)).code == "forbidden"
    assert len(site.service.seen) == 1


async def test_unknown_route_and_method_have_the_error_shape(site: Site, locked: Site) -> None:
    missing = await site.call("GET", "/hicache/nothing")
    assert (missing.status, missing.code) == (404, "not_found")
    method = await site.call("PATCH", BACKEND)
    assert (method.status, method.code) == (405, "method_not_allowed")
    assert method.headers["allow"] == "DELETE, GET, PUT"
    assert (await locked.call("GET", "/hicache/nothing")).status == 401


# ---- requests


async def test_put_carries_every_field_and_header(site: Site) -> None:
    body = {
        "hicache_storage_backend": "file",
        "hicache_storage_backend_extra_config_json": "{}",
        "hicache_storage_prefetch_policy": "timeout",
        "hicache_write_policy": "write_back",
        "mode": "drain",
        "swap": True,
        "wait_timeout_s": 5,
        "timeout_s": 60.5,
        "dry_run": True,
        "reason": "upgrade",
    }
    headers = {"If-Match": '"12"', "Idempotency-Key": "key-1"}
    reply = await site.call("PUT", BACKEND, body, headers=headers)
    assert site.request == api.AttachRequest(**body, if_revision=12, request_id="key-1")
    assert reply.headers["etag"] == '"7"'
    assert reply.json["operation_id"] == "op-1"


async def test_delete_takes_query_parameters(site: Site) -> None:
    target = f"{BACKEND}?mode=drain&wait_timeout_s=2.5&timeout_s=9&reason=a%20b"
    await site.call("DELETE", target, headers={"If-Match": "*"})
    assert site.request == api.DetachRequest(mode="drain", wait_timeout_s=2.5, timeout_s=9, reason="a b")


async def test_status_has_an_etag_and_fresh(site: Site) -> None:
    reply = await site.call("GET", f"{BACKEND}?fresh=1")
    assert site.request == api.StatusRequest(fresh=True)
    assert reply.headers["etag"] == '"7"'
    assert (await site.call("GET", BACKEND)).status == 200
    assert site.request == api.StatusRequest()


async def test_operations_by_id(site: Site) -> None:
    await site.call("GET", "/hicache/operations/op-42")
    assert site.request == api.OperationsRequest(operation_id="op-42")
    await site.call("DELETE", "/hicache/operations/op-42")
    assert site.request == api.CancelRequest(operation_id="op-42")


async def test_drain_and_resume_need_no_body(site: Site) -> None:
    await site.call("POST", "/hicache/drain")
    assert site.request == api.DrainRequest(timeout_s=30, hold_s=300)
    await site.call("POST", "/hicache/drain", {"timeout_s": 1, "hold_s": 2})
    assert site.request == api.DrainRequest(timeout_s=1, hold_s=2)
    await site.call("POST", "/hicache/resume")
    assert site.request == api.ResumeRequest()


PUT = {"hicache_storage_backend": "file"}
WRONG: list[tuple[str, str, Any, dict[str, str]]] = [
    ("PUT", BACKEND, PUT | {"foo": 1}, {}),
    ("PUT", BACKEND, {}, {}),
    ("PUT", BACKEND, PUT | {"hicache_storage_backend": 7}, {}),
    ("PUT", BACKEND, PUT | {"hicache_storage_backend_extra_config_json": {"a": 1}}, {}),
    ("PUT", BACKEND, PUT | {"hicache_storage_prefetch_policy": "sometimes"}, {}),
    ("PUT", BACKEND, PUT | {"hicache_write_policy": "never"}, {}),
    ("PUT", BACKEND, PUT | {"mode": "gentle"}, {}),
    ("PUT", BACKEND, PUT | {"swap": "yes"}, {}),
    ("PUT", BACKEND, PUT | {"wait_timeout_s": -1}, {}),
    ("PUT", BACKEND, PUT | {"timeout_s": 0}, {}),
    ("PUT", BACKEND, b'{"hicache_storage_backend": "file", "timeout_s": NaN}', {}),
    ("PUT", BACKEND, b'{"hicache_storage_backend": "file", "timeout_s": 1e400}', {}),
    ("PUT", BACKEND, b'{"hicache_storage_backend": "file", "type": "attach"}', {}),
    ("PUT", BACKEND, b"[1, 2]", {}),
    ("PUT", BACKEND, b"{", {}),
    ("PUT", BACKEND, b"\xff\xfe", {}),
    ("PUT", BACKEND, b'{"a":' * 100_000, {}),
    ("PUT", BACKEND, None, {}),
    ("PUT", BACKEND, PUT, {"If-Match": '"x"'}),
    ("PUT", BACKEND, PUT, {"If-Match": '"1", "2"'}),
    ("PUT", BACKEND, PUT, {"Idempotency-Key": ""}),
    ("PUT", BACKEND, PUT, {"Idempotency-Key": "k" * 129}),
    ("PUT", f"{BACKEND}?swap=1", PUT, {}),
    ("DELETE", f"{BACKEND}?foo=1", None, {}),
    ("DELETE", f"{BACKEND}?mode=x", None, {}),
    ("DELETE", f"{BACKEND}?mode=drain&mode=strict", None, {}),
    ("DELETE", BACKEND, {"mode": "drain"}, {}),
    ("GET", f"{BACKEND}?fresh=maybe", None, {}),
    ("POST", f"{BACKEND}/bypass", {"enabled": 1}, {}),
    ("POST", f"{BACKEND}/bypass", {"enabled": True}, {"If-Match": '"3"'}),
    ("POST", f"{BACKEND}/resolve", {"how": "guess"}, {}),
    ("POST", "/hicache/rollback", {"revision": -1}, {}),
    ("POST", "/hicache/resume", {"x": 1}, {}),
    ("GET", "/events", None, {"Last-Event-ID": "abc"}),
]


@pytest.mark.parametrize("case", WRONG, ids=lambda case: f"{case[0]} {case[1]} {str(case[2])[:60]} {case[3]}"[:100])
async def test_wrong_shapes_are_422_before_anything_is_touched(
    case: tuple[str, str, Any, dict[str, str]], site: Site
) -> None:
    method, target, body, headers = case
    reply = await site.call(method, target, body, headers=headers)
    assert (reply.status, reply.code) == (422, "invalid_request")
    assert site.service.seen == []


async def test_body_over_the_limit_is_refused_unread(site: Site) -> None:
    parts = [b"x"]
    reply = await site.call("PUT", BACKEND, headers={"Content-Length": str(MAX_BODY_BYTES + 1)}, chunks=parts)
    assert (reply.status, reply.code, reply.headers["connection"]) == (413, "too_large", "close")
    assert reply.unread == [b"x"]  # type: ignore[attr-defined]
    chunks = [b" " * 100_000] * 20
    reply = await site.call("PUT", BACKEND, chunks=chunks)
    assert reply.status == 413
    assert reply.unread  # type: ignore[attr-defined]
    assert site.service.seen == []


# ---- answers


@pytest.mark.parametrize("code", sorted(ERRORS))
async def test_every_error_has_its_status_and_shape(code: str, site: Site) -> None:
    cls = ERRORS[code]
    site.service.raises = cls("no", details={"reason": "r"}, operation_id="op-9")
    reply = await site.call("PUT", BACKEND, PUT)
    assert reply.status == cls.status
    error = reply.json["error"]
    assert set(error) == {"code", "message", "retryable", "hint", "operation_id", "details"}
    assert (error["code"], error["operation_id"], error["details"]["reason"]) == (code, "op-9", "r")
    assert ("retry-after" in reply.headers) == cls.retryable


async def test_busy_answer_names_the_blocker_as_json(site: Site) -> None:
    """F3: 400 with exactly the blockers, JSON content type."""
    blocker = {"rank": 1, "name": "grammar_queue", "count": 3}
    site.service.raises = NotIdle("Reject attach", details={"blocked_by": [blocker]})
    reply = await site.call("PUT", BACKEND, PUT)
    assert (reply.status, reply.headers["content-type"]) == (400, "application/json")
    assert reply.json["error"]["details"]["blocked_by"] == [blocker]


async def test_unhandled_exception_is_internal_and_leaks_nothing(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.service.raises = RuntimeError("s3cr3t")
    reply = await site.call("PUT", BACKEND, PUT)
    assert (reply.status, reply.code) == (500, "internal")
    assert b"s3cr3t" not in reply.body
    assert reply.json["error"]["details"]["reference"] in caplog.text


async def test_malformed_body_is_not_echoed(site: Site) -> None:
    """F94: a parse error gives position and type, not content."""
    reply = await site.call("PUT", BACKEND, b'{"hicache_storage_backend": "file", "password": "hunter2", ')
    assert reply.status == 422
    assert b"hunter2" not in reply.body


async def test_readyz_says_why_not(site: Site) -> None:
    reply = await site.call("GET", "/readyz")
    assert (reply.status, reply.json["ok"], reply.json["error"]["code"]) == (503, False, "no_engine")
    assert reply.json["details"]["reason"] == "no rank is connected"
    site.service.is_ready = True
    reply = await site.call("GET", "/readyz")
    assert (reply.status, reply.json["ok"]) == (200, True)
    assert (await site.call("GET", "/healthz")).json["details"] == {"loop": "turns"}


# ---- Host and Origin


async def test_foreign_host_and_origin_are_refused_everywhere(site: Site) -> None:
    for target in (BACKEND, "/healthz", "/nowhere"):
        assert (await site.call("GET", target, host="evil.example:30080")).json["error"]["details"]["reason"] == "host"
        assert (await site.call("GET", target, host=None)).status == 403
    for origin in ("http://evil.example", "null", "http://127.0.0.1:9999"):
        assert (await site.call("GET", BACKEND, headers={"Origin": origin})).status == 403
    assert (await site.call("GET", BACKEND, headers={"Origin": "http://localhost:30080"})).status == 200
    assert [request for request, _ in site.service.seen] == [api.StatusRequest()]


# ---- events


async def test_events_stream_and_resume(site: Site) -> None:
    site.service.events = [api.EventDocument(id=n, kind="change", at="t", data={"line": "a\nb"}) for n in (4, 5)]
    reply = await site.call("GET", "/events", headers={"Last-Event-ID": "3"})
    assert reply.status == 200
    assert site.request == api.WatchRequest(last_event_id=3)
    first = b'id: 4\nevent: change\ndata: {"id":4,"kind":"change","at":"t","data":{"line":"a\\nb"}}\n\n'
    assert reply.body.startswith(first)
    assert reply.body.count(b"\n\n") == 2
    assert site.service.watches_closed == 1


async def test_event_stream_keeps_alive_and_ends_at_the_stop(autojump_clock: trio.testing.MockClock) -> None:
    site = Site()
    site.service.hold_watch = True
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        await trio.sleep_forever()
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        await trio.lowlevel.checkpoint()
        sent.append(message)

    scope = {
        "type": "http", "method": "GET", "path": "/events", "raw_path": b"/events", "query_string": b"",
        "scheme": "http", "root_path": "", "headers": [(b"host", b"localhost:30080")], "server": ("127.0.0.1", 30080),
    }  # fmt: skip
    async with trio.open_nursery() as nursery:
        nursery.start_soon(site.app, scope, receive, send)
        await trio.sleep(40)
        assert [message["body"] for message in sent[1:]] == [b": keep-alive\n\n"] * 2
        site.app.closing.set()
    assert sent[-1]["more_body"] is False
    assert site.service.watches_closed == 1


async def test_websockets_are_closed(site: Site) -> None:
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await site.app({"type": "websocket"}, None, send)  # type: ignore[arg-type]
    assert sent == [{"type": "websocket.close", "code": 1003}]


async def test_responses_are_counted_by_route_and_status(site: Site) -> None:
    await site.call("GET", "/hicache/operations/one")
    await site.call("GET", "/hicache/operations/two")
    await site.call("GET", "/nowhere")
    assert site.counters.get("hicache_http_responses", "GET /hicache/operations/{id}", "200") == 2
    assert site.counters.get("hicache_http_responses", "none", "404") == 1
