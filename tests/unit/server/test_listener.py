"""HTTP on a real TCP socket: Hypercorn's protocol under our guards."""

import contextlib
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
import trio
from tests.unit.server.fakes import FakeService

from hicache_proto import api
from hicache_sidecar.obs.counters import Counters
from hicache_sidecar.server import listener
from hicache_sidecar.server.auth import Tokens
from hicache_sidecar.server.hosts import Hosts
from hicache_sidecar.server.http import MAX_BODY_BYTES, HttpApi
from hicache_sidecar.server.listener import GRACE_S, HttpServer, bind_tcp
from hicache_sidecar.server.routes import BACKEND


class Site:
    def __init__(self) -> None:
        self.service, self.counters = FakeService(), Counters()
        self.api = HttpApi(self.service, Tokens, Hosts, self.counters)
        self.server = HttpServer(self.api, self.counters)
        self.sockets = bind_tcp("127.0.0.1", 0)
        self.port = self.sockets[0].getsockname()[1]

    async def connect(self) -> trio.SocketStream:
        return await trio.open_tcp_stream("127.0.0.1", self.port)

    async def send(self, stream: trio.SocketStream, head: str, body: bytes = b"") -> None:
        await stream.send_all(f"{head}\r\nHost: 127.0.0.1:{self.port}\r\n".encode() + b"\r\n" + body)

    async def get(self, path: str = BACKEND) -> bytes:
        stream = await self.connect()
        await self.send(stream, f"GET {path} HTTP/1.1\r\nConnection: close")
        return await everything(stream)


async def everything(stream: trio.SocketStream) -> bytes:
    data = b""
    try:
        async for chunk in stream:
            data += bytes(chunk)
    except trio.BrokenResourceError:
        pass
    await stream.aclose()
    return data


@asynccontextmanager
async def serving() -> AsyncIterator[Site]:
    site = Site()
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            await nursery.start(site.server.serve, site.sockets)
            yield site
            site.api.closing.set()
            site.server.stop()


async def test_status_over_tcp() -> None:
    async with serving() as site:
        answer = await site.get()
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"hypercorn" not in answer.lower()
        assert b'"state":"engine_down"' in answer


HOST = "Host: 127.0.0.1"


@pytest.mark.parametrize(
    ("raw", "status", "code"),
    [
        ("garbage\r\n\r\n", 400, "invalid_request"),
        ("GET / HTTP/1.1\r\n\r\n", 400, "invalid_request"),  # no Host
        (f"GET /healthz HTTP/1.1\r\n{HOST}\r\nX: {'a' * 70_000}\r\n\r\n", 431, "too_large"),
        (f"PUT {BACKEND} HTTP/1.1\r\n{HOST}\r\nContent-Length: -5\r\n\r\n", 400, "invalid_request"),
        (f"PUT {BACKEND} HTTP/1.1\r\n{HOST}\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n", 400, "invalid_request"),
        (f"PUT {BACKEND} HTTP/1.1\r\n{HOST}\r\nTransfer-Encoding: gzip\r\n\r\nZZ", 501, "invalid_request"),
        (
            f"GET /events HTTP/1.1\r\n{HOST}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n",
            403,
            "forbidden",
        ),
    ],
    ids=["garbage", "no-host", "head", "length", "chunk", "encoding", "websocket"],
)
async def test_what_is_no_request_gets_an_error_of_the_usual_shape(raw: str, status: int, code: str) -> None:
    """interface.md: JSON out, errors too; also where the HTTP layer alone answers."""
    async with serving() as site:
        stream = await site.connect()
        await stream.send_all(raw.encode())
        head, _, body = (await everything(stream)).partition(b"\r\n\r\n")
        assert head.startswith(f"HTTP/1.1 {status} ".encode())
        assert b"content-type: application/json" in head
        assert f"content-length: {len(body)}".encode() in head
        error = msgspec.json.decode(body, type=api.ErrorDocument).error
        assert (error.code, error.retryable, error.details["reason"]) == (code, False, "http")
        assert site.counters.get("hicache_http_responses", "none", str(status)) == 1


async def test_keep_alive_serves_several_requests() -> None:
    async with serving() as site:
        stream = await site.connect()
        for _ in range(3):
            await site.send(stream, f"GET {BACKEND} HTTP/1.1")
            data = b""
            while not data.endswith(b"}"):
                data += bytes(await stream.receive_some())
            assert data.startswith(b"HTTP/1.1 200")
        await stream.aclose()


async def test_large_body_is_refused_and_the_answer_arrives() -> None:
    """413 unread; the client, which went on sending, still reads the answer."""
    async with serving() as site:
        stream = await site.connect()
        await site.send(stream, f"PUT {BACKEND} HTTP/1.1\r\nContent-Length: {4 * MAX_BODY_BYTES}", b"x" * 300_000)
        data = await everything(stream)
        assert data.startswith(b"HTTP/1.1 413")
        assert b'"too_large"' in data
        assert site.service.seen == []


HOSTILE = [
    b"\x00\x01\x02\x03" * 50,
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\xaa" * 200,  # a TLS hello
    b"GET / HTTP/1.1\r\n\r\n",  # no Host
    b"GET " + b"/" * 200_000 + b" HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999999999999999999\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffffffff\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 100,
    b"GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: h2c\r\nHTTP2-Settings: AAAA\r\nConnection: Upgrade\r\n\r\n",
    b"GET /events HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    b"GET /events HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n",
]


@pytest.mark.parametrize("raw", HOSTILE, ids=lambda raw: raw[:30])
async def test_hostile_bytes_end_their_connection_only(raw: bytes) -> None:
    """F95 on the HTTP side: whatever came, the next client is served and nothing reached the service."""
    async with serving() as site:
        stream = await site.connect()
        try:
            await stream.send_all(raw)
            await stream.send_eof()
        except trio.BrokenResourceError:
            pass
        await everything(stream)
        assert site.service.seen == []
        assert (await site.get("/healthz")).startswith(b"HTTP/1.1 200")


async def test_operation_goes_on_when_its_client_leaves() -> None:
    async with serving() as site:
        site.service.wait = trio.Event()
        stream = await site.connect()
        body = b'{"hicache_storage_backend":"file"}'
        await site.send(stream, f"PUT {BACKEND} HTTP/1.1\r\nContent-Length: {len(body)}", body)
        await until(lambda: bool(site.service.seen))
        await stream.aclose()
        assert (await site.get("/healthz")).startswith(b"HTTP/1.1 200")
        site.service.wait.set()
        await until(lambda: site.counters.get("hicache_http_responses", f"PUT {BACKEND}", "200") == 1)


async def test_event_stream_ends_when_the_client_leaves() -> None:
    async with serving() as site:
        site.service.events = [api.EventDocument(id=1, kind="snapshot", at="t")]
        stream = await site.connect()
        await site.send(stream, "GET /events HTTP/1.1")
        data = b""
        while b"event: snapshot" not in data:
            data += bytes(await stream.receive_some())
        await stream.aclose()
        await until(lambda: site.service.watches_closed == 1)


async def test_stop_is_quick_with_idle_streaming_and_busy_connections() -> None:
    """F103: everything is over in less than two seconds."""
    async with serving() as site:
        site.service.wait = trio.Event()  # never set: a request that does not end
        idle, events, busy = [await site.connect() for _ in range(3)]
        await site.send(events, "GET /events HTTP/1.1")
        await events.receive_some()
        await site.send(busy, f"GET {BACKEND} HTTP/1.1")
        await until(lambda: len(site.service.seen) == 2)
        started = trio.current_time()
    assert trio.current_time() - started < GRACE_S + 0.9
    for stream in (idle, events, busy):
        await stream.aclose()


async def test_client_that_does_not_read_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "SEND_S", 0.2)
    async with serving() as site:
        site.service.events = [
            api.EventDocument(id=n, kind="change", at="t", data={"x": "y" * 100_000}) for n in range(400)
        ]
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", site.port))
        client.sendall(f"GET /events HTTP/1.1\r\nHost: 127.0.0.1:{site.port}\r\n\r\n".encode())
        await until(lambda: site.service.watches_closed == 1)
        client.close()


async def test_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "MAX_CONNECTIONS", 3)
    async with serving() as site:
        streams = [await site.connect() for _ in range(3)]
        await until(lambda: site.server._open == 3)
        assert await site.get("/healthz") == b""
        assert site.counters.get("hicache_http_connections", "too_many") == 1
        for stream in streams:
            await stream.aclose()


async def until(done: object) -> None:
    """Wait for something that has no event of its own, with a deadline."""
    assert callable(done)
    with trio.fail_after(20):
        while not done():  # noqa: ASYNC110 - the condition is a counter of the code under test
            await trio.sleep(0.01)


def test_address_in_use_is_an_error() -> None:
    first = bind_tcp("127.0.0.1", 0)[0]
    with first, pytest.raises(OSError):
        bind_tcp("127.0.0.1", first.getsockname()[1])


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("head", ["", "GET /h", "GET {} HTTP/1.1", "GET /events HTTP/1.1", "GET /nothing HTTP/1.1"])
async def test_a_client_that_leaves_gives_its_place_back_at_once(head: str, reset: bool) -> None:
    """Not after the keep-alive time: a script that asks ten times a second had filled every place with the departed."""
    async with serving() as site:
        site.service.hold_watch = True
        stream = await site.connect()
        if head.endswith("1.1"):
            await site.send(stream, head.format(BACKEND))
            await stream.receive_some()
        else:
            await stream.send_all(head.encode())
        with trio.fail_after(5):
            while site.server._open != 1:  # noqa: ASYNC110 - nothing to wait on
                await trio.sleep(0.01)
        if reset:
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await stream.aclose()
        with trio.fail_after(listener.KEEP_ALIVE_S / 3):
            while site.server._open:  # noqa: ASYNC110
                await trio.sleep(0.01)


async def test_many_short_clients_are_all_served() -> None:
    async with serving() as site:
        for _ in range(2 * listener.MAX_CONNECTIONS):
            stream = await site.connect()
            await site.send(stream, "GET /healthz HTTP/1.1")
            assert bytes(await stream.receive_some()).startswith(b"HTTP/1.1 200")
            await stream.aclose()
    assert site.counters.get("hicache_http_connections", "too_many") == 0


async def test_a_client_that_asks_before_it_sends_too_much_reads_why() -> None:
    """``curl -d`` of more than a megabyte: ``100 Continue`` and the refusal are written by two tasks (F95)."""
    async with serving() as site:
        for _ in range(10):
            stream = await site.connect()
            head = f"PUT {BACKEND} HTTP/1.1\r\nContent-Length: {2 * MAX_BODY_BYTES}\r\nExpect: 100-continue"
            await site.send(stream, head)
            answer = await everything(stream)
            assert b"HTTP/1.1 413" in answer
            assert answer.endswith(b"}")
        assert site.service.seen == []
    assert site.counters.get("hicache_http_connections", "internal") == 0


async def test_two_writers_wait_for_each_other() -> None:
    """The same, without its luck: neither write fails, and neither is inside the other."""
    ours, theirs = (trio.SocketStream(trio.socket.from_stdlib_socket(sock)) for sock in socket.socketpair())
    stream = listener.GuardedStream(ours, lambda: None)
    parts = [bytes([letter]) * 300_000 for letter in b"ab"]  # more than the socket holds: the first one waits
    async with trio.open_nursery() as nursery:
        for part in parts:
            nursery.start_soon(stream.send_all, part)
        with trio.fail_after(20):
            data = bytes(await theirs.receive_some())
            nursery.start_soon(stream.send_eof)  # behind both
            while chunk := await theirs.receive_some():
                data += bytes(chunk)
    assert data in (parts[0] + parts[1], parts[1] + parts[0])
    await theirs.aclose()
    await ours.aclose()


async def test_http2_has_the_same_checks() -> None:
    """A browser page with a foreign name, or a tool, may speak HTTP/2 in clear text: Host counts there as well."""
    import h2.connection
    import h2.events

    async with serving() as site:
        for authority, status in ((f"127.0.0.1:{site.port}", "200"), ("evil.example", "403")):
            stream, peer = await site.connect(), h2.connection.H2Connection()
            peer.initiate_connection()
            names = (("method", "GET"), ("path", BACKEND), ("scheme", "http"), ("authority", authority))
            peer.send_headers(1, [(f":{name}", value) for name, value in names], end_stream=True)
            await stream.send_all(peer.data_to_send())
            found = ""
            while not found:
                for event in peer.receive_data(bytes(await stream.receive_some())):
                    if isinstance(event, h2.events.ResponseReceived):
                        found = {bytes(k): bytes(v) for k, v in event.headers}[b":status"].decode()
            assert found == status
            await stream.aclose()


@pytest.mark.parametrize("said", ["", "settings", "half", "ping", "answered"])
async def test_an_http2_connection_without_a_request_ends(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    """Anybody can open one, without a token: they must not fill MAX_CONNECTIONS for ever."""
    import h2.connection

    monkeypatch.setattr(listener, "KEEP_ALIVE_S", 2.0 if said == "answered" else 0.3)  # it must be answered first
    async with serving() as site:
        stream, peer = await site.connect(), h2.connection.H2Connection()
        if said == "":
            await stream.send_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        else:
            peer.initiate_connection()
            names = (
                ("method", "GET"),
                ("path", "/healthz"),
                ("scheme", "http"),
                ("authority", f"127.0.0.1:{site.port}"),
            )
            if said == "answered":
                peer.send_headers(1, [(f":{name}", value) for name, value in names], end_stream=True)
            await stream.send_all(peer.data_to_send() + (b"\x00\x40\x00\x00" if said == "half" else b""))
        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:

                async def keep_saying() -> None:
                    while said == "ping":
                        peer.ping(b"12345678")
                        with contextlib.suppress(trio.BrokenResourceError):
                            await stream.send_all(peer.data_to_send())
                        await trio.sleep(0.02)  # a client's pace

                nursery.start_soon(keep_saying)
                data = await everything(stream)
                nursery.cancel_scope.cancel()
        assert (b'"ok":true' in data) == (said == "answered")


async def test_an_upgrade_to_http2_has_the_same_checks() -> None:
    async with serving() as site:
        stream = await site.connect()
        upgrade = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA"
        await stream.send_all(f"GET {BACKEND} HTTP/1.1\r\nHost: evil.example\r\n{upgrade}\r\n\r\n".encode())
        data = b""
        while b"403" not in data and b"200" not in data and b"forbidden" not in data:
            data += bytes(await stream.receive_some())
        assert b"forbidden" in data or b"403" in data
        assert b"engine_down" not in data
        await stream.aclose()
