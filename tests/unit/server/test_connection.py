"""One control connection on memory streams and virtual time."""

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
import trio
import trio.testing
from tests.unit.server.fakes import ADMIN, ANSWER, FakeService, Peer

from hicache_proto import api, control
from hicache_proto.errors import NoEngine, NotIdle
from hicache_proto.framing import HEADER, MAX_FRAME_BYTES
from hicache_proto.version import PROTOCOL_VERSION
from hicache_sidecar.core.actor import Actor, Role
from hicache_sidecar.obs.counters import Counters
from hicache_sidecar.server.connection import LINGER_S, MAX_IN_FLIGHT, Connection
from hicache_sidecar.server.outbox import MAX_QUEUED_BYTES, SEND_S
from hicache_sidecar.server.reader import FRAME_S, HELLO_S, IDLE_S

DETACH = control.Request(id=1, body=api.DetachRequest())


class Link:
    """A served connection and everything around it."""

    def __init__(self, actor: Actor = ADMIN) -> None:
        near, far = trio.testing.memory_stream_pair()
        self.service, self.counters, self.closing = FakeService(), Counters(), trio.Event()
        self.peer, self.near = Peer(near), near
        self.connection = Connection(far, actor, self.service, self.counters, self.closing)


@asynccontextmanager
async def served(actor: Actor = ADMIN) -> AsyncIterator[Link]:
    link = Link(actor)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(link.connection.run)
        yield link
        await link.near.aclose()
        nursery.cancel_scope.deadline = trio.current_time() + 60  # the connection must end by itself
    assert not nursery.cancel_scope.cancelled_caught


async def test_hello_says_role_and_protocol() -> None:
    async with served() as link:
        hello = await link.peer.hello()
        assert (hello.protocol, hello.role, hello.engine_id) == (PROTOCOL_VERSION, "admin", "engine-1")


async def test_older_protocol_is_understood_and_others_refused_by_number() -> None:
    async with served() as link:
        assert (await link.peer.hello(PROTOCOL_VERSION - 1)).protocol == PROTOCOL_VERSION - 1
    async with served() as link:
        await link.peer.send(control.ClientHello(protocol=PROTOCOL_VERSION + 1))
        error = await link.peer.error()
        assert error.id == 0
        assert error.error.details["peer"] == PROTOCOL_VERSION + 1
        assert await link.peer.ended()


async def test_request_is_answered_under_its_id_after_progress() -> None:
    async with served() as link:
        link.service.progress = [{"phase": "prepare"}, {"phase": "commit"}]
        await link.peer.hello()
        await link.peer.send(control.Request(id=9, body=api.DetachRequest(reason="x")))
        frames = [await link.peer.read() for _ in range(3)]
        assert frames == [
            control.Progress(id=9, data={"phase": "prepare"}),
            control.Progress(id=9, data={"phase": "commit"}),
            control.Result(id=9, document=msgspec.to_builtins(ANSWER)),
        ]
        assert link.service.seen == [(api.DetachRequest(reason="x"), ADMIN)]


async def test_requests_run_side_by_side() -> None:
    async with served() as link:
        link.service.wait = trio.Event()
        await link.peer.hello()
        await link.peer.send(control.Request(id=1, body=api.DetachRequest()))
        await trio.testing.wait_all_tasks_blocked()
        first, link.service.wait = link.service.wait, None
        await link.peer.send(control.Request(id=2, body=api.StatusRequest()))
        second = await link.peer.read()
        assert isinstance(second, control.Result)
        assert second.id == 2
        first.set()
        answer = await link.peer.read()
        assert isinstance(answer, control.Result)
        assert answer.id == 1


async def test_refusals_keep_their_code_and_the_connection_goes_on() -> None:
    async with served() as link:
        await link.peer.hello()
        link.service.raises = NotIdle(
            "busy", details={"blocked_by": [{"rank": 1, "name": "grammar_queue", "count": 3}]}
        )
        await link.peer.send(DETACH)
        error = (await link.peer.error()).error
        assert (error.code, error.retryable) == ("not_idle", True)
        assert error.details["blocked_by"][0]["count"] == 3
        link.service.raises = None
        await link.peer.send(DETACH)
        assert isinstance(await link.peer.read(), control.Result)


async def test_role_is_checked_by_the_service_with_the_peers_actor() -> None:
    """F93: a viewer may look and not touch."""
    async with served(Actor(name="bob", role=Role.VIEWER, uid=1000)) as link:
        assert (await link.peer.hello()).role == "viewer"
        await link.peer.send(DETACH)
        assert (await link.peer.error()).error.code == "forbidden"
        await link.peer.send(control.Request(id=2, body=api.StatusRequest()))
        assert isinstance(await link.peer.read(), control.Result)


async def test_unknown_field_and_unknown_request_are_refused_under_their_id() -> None:
    async with served() as link:
        await link.peer.hello()
        for ident, body in ((3, {"type": "detach", "foo": 1}), (4, {"type": "explode"}), (5, {"type": "attach"})):
            await link.peer.send_map({"type": "request", "id": ident, "body": body})
            error = await link.peer.error()
            assert (error.id, error.error.code) == (ident, "invalid_request")
        assert link.counters.get("hicache_control_dropped_frames", "invalid_request") == 3
        await link.peer.send(DETACH)
        assert isinstance(await link.peer.read(), control.Result)


async def test_unhandled_exception_is_internal_and_leaks_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """F94: the client reads a reference, the traceback stays in the log."""
    async with served() as link:
        await link.peer.hello()
        link.service.raises = ValueError("password=hunter2 in /srv/secret")
        await link.peer.send(DETACH)
        error = (await link.peer.error()).error
        assert error.code == "internal"
        assert "hunter2" not in repr(error)
        assert error.details["reference"] in caplog.text
        assert link.counters.get("hicache_internal_errors", "socket") == 1
        link.service.raises = None
        await link.peer.send(DETACH)
        assert isinstance(await link.peer.read(), control.Result)


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (HEADER.pack(MAX_FRAME_BYTES + 1), "too_large"),
        (b"\xff\xff\xff\xff", "too_large"),
        (HEADER.pack(0), "invalid_request"),
        (HEADER.pack(4) + b"\xc1\xc1\xc1\xc1", "invalid_request"),
        (HEADER.pack(64) + b"\x91" * 64, "invalid_request"),
        (HEADER.pack(5) + b"\x80\x04\x95K\x00", "invalid_request"),  # the head of a pickle
    ],
)
async def test_hostile_bytes_end_the_connection_and_are_counted(raw: bytes, code: str) -> None:
    """F95: dropped and counted, before and after the hello."""
    for greet in (False, True):
        async with served() as link:
            if greet:
                await link.peer.hello()
            await link.peer.stream.send_all(raw)
            error = await link.peer.error()
            assert (error.id, error.error.code) == (0, code)
            assert await link.peer.ended()
        dropped = {family.name: series for family, series in link.counters.families()}["hicache_control_dropped_frames"]
        assert sum(dropped.values()) == 1


async def test_random_bytes_never_reach_the_service() -> None:
    """F95: 10 000 fuzz frames; every connection ends, the service sees none of it."""
    rng = random.Random(20261130)
    for _ in range(50):
        async with served() as link:
            await link.peer.hello()
            blob = b"".join(
                HEADER.pack(len(junk)) + junk for junk in (rng.randbytes(rng.randrange(1, 64)) for _ in range(200))
            )
            await link.peer.stream.send_all(blob)
            await link.peer.stream.send_eof()  # type: ignore[attr-defined]
            while await link.peer.read() is not None:
                pass
        assert link.service.seen == []


async def test_silent_client_is_closed_after_the_hello_deadline(autojump_clock: trio.testing.MockClock) -> None:
    async with served() as link:
        started = trio.current_time()
        assert await link.peer.ended()
        assert trio.current_time() - started == pytest.approx(HELLO_S)
    assert link.counters.get("hicache_control_connections", "too_slow") == 1


async def test_half_a_frame_is_closed_after_the_frame_deadline(autojump_clock: trio.testing.MockClock) -> None:
    async with served() as link:
        await link.peer.hello()
        await link.peer.stream.send_all(HEADER.pack(100) + b"abc")
        started = trio.current_time()
        assert await link.peer.ended()
        assert trio.current_time() - started == pytest.approx(FRAME_S)


async def test_idle_connection_is_closed_but_not_while_a_request_runs(autojump_clock: trio.testing.MockClock) -> None:
    async with served() as link:
        await link.peer.hello()
        link.service.wait = trio.Event()
        await link.peer.send(DETACH)
        await trio.sleep(3 * IDLE_S)
        link.service.wait.set()
        assert isinstance(await link.peer.read(), control.Result)
        assert await link.peer.ended()


async def test_watch_streams_events_and_closes_the_iterator() -> None:
    async with served() as link:
        link.service.events = [api.EventDocument(id=n, kind="change", at="t", data={"n": n}) for n in (4, 5)]
        await link.peer.hello()
        await link.peer.send(control.Request(id=2, body=api.WatchRequest(last_event_id=3)))
        frames = [await link.peer.read(), await link.peer.read()]
        assert [frame.data["id"] for frame in frames if isinstance(frame, control.Progress)] == [4, 5]
    assert link.service.watches_closed == 1
    assert link.service.seen[0][0] == api.WatchRequest(last_event_id=3)


async def test_watch_that_ends_is_answered() -> None:
    async with served() as link:
        link.service.hold_watch = False
        await link.peer.hello()
        await link.peer.send(control.Request(id=2, body=api.WatchRequest()))
        assert await link.peer.read() == control.Result(id=2, document=None)


async def test_stop_lets_a_running_request_end() -> None:
    async with served() as link:
        link.service.wait = trio.Event()
        await link.peer.hello()
        await link.peer.send(DETACH)
        await trio.testing.wait_all_tasks_blocked()
        link.closing.set()
        await trio.testing.wait_all_tasks_blocked()
        link.service.wait.set()
        assert isinstance(await link.peer.read(), control.Result)
        assert await link.peer.ended()


async def test_stop_does_not_wait_for_ever(autojump_clock: trio.testing.MockClock) -> None:
    async with served() as link:
        link.service.wait = trio.Event()
        await link.peer.hello()
        await link.peer.send(DETACH)
        await trio.testing.wait_all_tasks_blocked()
        started = trio.current_time()
        link.closing.set()
        assert await link.peer.ended()
        assert trio.current_time() - started == pytest.approx(LINGER_S)


async def test_ids_in_use_and_zero_are_refused() -> None:
    for ident in (0, 1):
        async with served() as link:
            link.service.wait = trio.Event()
            await link.peer.hello()
            await link.peer.send(DETACH)
            await link.peer.send(control.Request(id=ident, body=api.StatusRequest()))
            assert (await link.peer.error()).error.code == "invalid_request"
            assert await link.peer.ended()


async def test_requests_in_flight_are_bounded() -> None:
    async with served() as link:
        link.service.wait = trio.Event()
        await link.peer.hello()
        for ident in range(1, MAX_IN_FLIGHT + 10):
            await link.peer.send(control.Request(id=ident, body=api.StatusRequest()))
        await trio.testing.wait_all_tasks_blocked()
        assert len(link.service.seen) == MAX_IN_FLIGHT
        link.service.wait.set()
        for _ in range(1, MAX_IN_FLIGHT + 10):
            assert isinstance(await link.peer.read(), control.Result)


async def test_slow_reader_is_bounded_and_cut(autojump_clock: trio.testing.MockClock) -> None:
    """A client that reads nothing costs MAX_QUEUED_BYTES at most, and is closed after SEND_S."""
    link = Link()
    blocked = trio.Event()

    async def never() -> None:
        blocked.set()
        await trio.sleep_forever()

    far = link.connection._stream
    assert isinstance(far, trio.StapledStream)
    started = 0.0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(link.connection.run)
        await link.peer.hello()
        far.send_stream.send_all_hook = never  # type: ignore[attr-defined]
        chunk = {"message": "x" * 100_000}
        link.service.progress = [chunk] * 50
        await link.peer.send(DETACH)
        await blocked.wait()
        started = trio.current_time()
        assert link.connection._outbox._bytes <= MAX_QUEUED_BYTES
        assert link.counters.get("hicache_control_dropped_progress") >= 50 - MAX_QUEUED_BYTES // 100_000 - 1
    assert trio.current_time() - started == pytest.approx(SEND_S, abs=0.5)
    assert link.counters.get("hicache_control_connections", "too_slow") == 1


async def test_oversized_result_becomes_an_error() -> None:
    async with served() as link:
        link.service.raises = NoEngine("x" * (MAX_FRAME_BYTES + 1))
        await link.peer.hello()
        await link.peer.send(DETACH)
        error = await link.peer.error()
        assert (error.id, error.error.code) == (1, "too_large")
