"""The client against a scripted sidecar on a real Unix socket."""

import socket
import threading
import time
from pathlib import Path

import pytest
from tests.unit.cli.fake_sidecar import Peer, fake_sidecar

from hicache_proto import api, control
from hicache_proto.errors import Forbidden, HicacheError, InvalidRequest, NotIdle, TooLarge
from hicache_proto.framing import HEADER, MAX_FRAME_BYTES
from hicache_sidecar.client import Client, Connection, ConnectionLost, Unreachable

ANSWER = api.OperationAnswer(
    success=True,
    changed=True,
    changed_keys=["hicache_storage_backend"],
    message="rank 0: attached; rank 1: attached",
    operation_id="op-7",
    revision=7,
    state="attached",
    ranks=[api.RankResult(rank=0, success=True, stall_us=12), api.RankResult(rank=1, success=True, stall_us=14)],
    prepare_ms=3.5,
)


def answer_all(document: object):
    def script(peer: Peer, request: control.Request) -> None:
        peer.result(request, document)

    return script


def test_attach_returns_the_typed_document_and_shows_progress(tmp_path: Path) -> None:
    def script(peer: Peer, request: control.Request) -> None:
        peer.progress(request, operation_id="op-7", phase="prepare")
        peer.progress(request, operation_id="op-7", phase="commit")
        peer.result(request, ANSWER)

    seen: list[str] = []
    with fake_sidecar(tmp_path / "s", script) as server:
        with Client.connect(server.path, client="test", on_progress=lambda data: seen.append(data["phase"])) as client:
            answer = client.attach("file", '{"file_storage_path": "/x"}', mode="drain", wait_timeout_s=3)
            assert client.role == "operator"
        assert answer == ANSWER
        assert seen == ["prepare", "commit"]
        assert server.hellos[0].client == "test"
        assert server.requests[0].body == api.AttachRequest(
            hicache_storage_backend="file",
            hicache_storage_backend_extra_config_json='{"file_storage_path": "/x"}',
            mode="drain",
            wait_timeout_s=3,
        )


def test_several_requests_in_flight_get_their_own_answers(tmp_path: Path) -> None:
    held: list[control.Request] = []

    def script(peer: Peer, request: control.Request) -> None:
        held.append(request)
        if len(held) == 3:
            for item in reversed(held):  # answered in the wrong order, progress mixed in
                peer.progress(item, note=item.id)
                peer.result(item, {"number": item.id})

    with fake_sidecar(tmp_path / "s", script) as server, Connection.connect(server.path) as connection:
        numbers = [connection.send({"type": "idle"}) for _ in range(3)]
        notes: list[int] = []
        answers = [connection.wait(n, 5, lambda data: notes.append(data["note"])) for n in numbers]
    assert answers == [{"number": n} for n in numbers]
    assert notes == numbers


def test_an_error_becomes_its_class(tmp_path: Path) -> None:
    blocked = [{"rank": 1, "name": "grammar_queue", "count": 3}]

    def script(peer: Peer, request: control.Request) -> None:
        peer.error(request, NotIdle("Reject attach", details={"blocked_by": blocked}, operation_id="op-3"))

    with fake_sidecar(tmp_path / "s", script) as server, Client.connect(server.path) as client:
        with pytest.raises(NotIdle) as caught:
            client.attach("file")
        assert caught.value.details == {"blocked_by": blocked}
        assert caught.value.operation_id == "op-3"
        assert caught.value.exit_code == 3


def test_a_connection_lost_in_an_operation_names_it_at_once(tmp_path: Path) -> None:
    """interface.md, exit code 5: the operation id is printed with "outcome unknown", at once."""

    def script(peer: Peer, request: control.Request) -> None:
        peer.progress(request, operation_id="op-9", phase="freeze")
        peer.drop()

    with fake_sidecar(tmp_path / "s", script) as server, Client.connect(server.path) as client:
        begun = time.monotonic()
        with pytest.raises(ConnectionLost) as caught:
            client.attach("file")
        assert time.monotonic() - begun < 2  # not the operation's 120 s
        assert caught.value.operation_id == "op-9"
        with pytest.raises(ConnectionLost):
            client.status()


def test_a_silent_sidecar_ends_at_the_deadline(tmp_path: Path) -> None:
    """A stopped sidecar (SIGSTOP) holds the connection open and says nothing."""

    def script(peer: Peer, request: control.Request) -> None:
        peer.progress(request, operation_id="op-2", phase="prepare")

    with fake_sidecar(tmp_path / "s", script) as server, Connection.connect(server.path) as connection:
        with pytest.raises(ConnectionLost, match="no answer within") as caught:
            connection.call({"type": "detach"}, 0.2)
        assert caught.value.operation_id == "op-2"


def test_no_hello_in_time_is_unreachable(tmp_path: Path) -> None:
    with (
        fake_sidecar(tmp_path / "s", answer_all({}), greet=False) as server,
        pytest.raises(Unreachable, match="no hello within"),
    ):
        Connection.connect(server.path, timeout_s=0.2)


def test_nothing_listens(tmp_path: Path) -> None:
    with pytest.raises(Unreachable, match="No such file"):
        Connection.connect(str(tmp_path / "absent"))
    stale = tmp_path / "stale"
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(stale))
    with pytest.raises(Unreachable, match="refused"):
        Connection.connect(str(stale))


def test_permission_denied_is_forbidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(socket.socket):
        def connect(self, _address: object) -> None:
            raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket, "socket", Refusing)
    with pytest.raises(Forbidden) as caught:
        Connection.connect(str(tmp_path / "s"))
    assert caught.value.exit_code == 8


@pytest.mark.parametrize(("protocol", "understood"), [(1, True), (0, True), (2, False), (-1, False)])
def test_protocol_versions(tmp_path: Path, protocol: int, understood: bool) -> None:
    """A peer one version older is understood, anything else is refused by number."""
    with fake_sidecar(tmp_path / "s", answer_all({}), protocol=protocol) as server:
        if understood:
            Connection.connect(server.path).close()
        else:
            with pytest.raises(InvalidRequest, match=f"protocol version {protocol}"):
                Connection.connect(server.path)


def test_too_large_a_request_is_not_sent_and_the_connection_lives(tmp_path: Path) -> None:
    with (
        fake_sidecar(tmp_path / "s", answer_all({"ok": True})) as server,
        Connection.connect(server.path) as connection,
    ):
        with pytest.raises(TooLarge):
            connection.send({"type": "attach", "hicache_storage_backend": "x" * MAX_FRAME_BYTES})
        assert connection.call({"type": "idle"}, 5) == {"ok": True}
        assert [type(r.body) for r in server.requests] == [api.IdleRequest]


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff\xff\xff\xff",
        HEADER.pack(3) + b"\xc1\xc1\xc1",
        HEADER.pack(1) + b"\x05",
        b"\x00\x00\x00\x00",
        HEADER.pack(100_000) + b"\x91" * 99_999 + b"\xc0",
    ],
    ids=["huge", "not msgpack", "no map", "empty", "nested"],
)
def test_a_server_that_sends_garbage_is_lost_not_believed(tmp_path: Path, garbage: bytes) -> None:
    def script(peer: Peer, request: control.Request) -> None:
        peer.sock.sendall(garbage)

    with (
        fake_sidecar(tmp_path / "s", script) as server,
        Connection.connect(server.path) as connection,
        pytest.raises(ConnectionLost, match="cannot read"),
    ):
        connection.call({"type": "idle"}, 5)


def test_frames_split_into_single_bytes(tmp_path: Path) -> None:
    def script(peer: Peer, request: control.Request) -> None:
        payload = control.encode(control.Result(id=request.id, document={"text": "x" * 50}))
        for byte in HEADER.pack(len(payload)) + payload:
            peer.sock.send(bytes([byte]))

    with fake_sidecar(tmp_path / "s", script) as server, Connection.connect(server.path) as connection:
        assert connection.call({"type": "idle"}, 5) == {"text": "x" * 50}


def test_watch_yields_events_and_stops_at_loss(tmp_path: Path) -> None:
    def script(peer: Peer, request: control.Request) -> None:
        assert request.body == api.WatchRequest(last_event_id=4)
        for number in (5, 6):
            peer.progress(request, id=number, kind="state", at="2026-01-01T00:00:00Z", data={"state": "attached"})
        peer.drop()

    got: list[int] = []
    with (
        fake_sidecar(tmp_path / "s", script) as server,
        Client.connect(server.path) as client,
        pytest.raises(ConnectionLost),
    ):
        for event in client.watch(last_event_id=4, quiet_timeout_s=5):
            got.append(event.id)
    assert got == [5, 6]


def test_an_error_for_an_unreadable_frame_reaches_the_caller(tmp_path: Path) -> None:
    """Error frames with id 0: the sidecar could not read far enough to know which request it was."""

    def script(peer: Peer, request: control.Request) -> None:
        peer.send(control.Error(id=0, error=InvalidRequest("nested deeper than 32 levels").body()))

    with (
        fake_sidecar(tmp_path / "s", script) as server,
        Connection.connect(server.path) as connection,
        pytest.raises(HicacheError, match="nested deeper"),
    ):
        connection.call({"type": "idle"}, 5)


def test_every_request_of_the_api_has_a_client_method(tmp_path: Path) -> None:
    """A request without a method would be reachable over HTTP only."""
    calls = {
        "status": lambda c: c.status(), "idle": lambda c: c.idle(), "ranks": lambda c: c.ranks(),
        "backends": lambda c: c.backends(), "attach": lambda c: c.attach("file"), "detach": lambda c: c.detach(),
        "policy": lambda c: c.policy(knobs={"prefetch_threshold": 1}), "clear": lambda c: c.clear("ns"),
        "bypass": lambda c: c.bypass(True), "resolve": lambda c: c.resolve("adopt"), "drain": lambda c: c.drain(),
        "resume": lambda c: c.resume(), "operations": lambda c: c.operations(), "cancel": lambda c: c.cancel("x"),
        "history": lambda c: c.history(), "rollback": lambda c: c.rollback(1), "watch": lambda c: list(c.watch()),
        "failover": lambda c: c.failover(), "set_failover": lambda c: c.set_failover(release=True),
    }  # fmt: skip
    tags = {str(t.__struct_config__.tag) for t in api.ApiRequest.__args__}
    assert set(calls) == tags

    def script(peer: Peer, request: control.Request) -> None:
        peer.error(request, Forbidden("seen"))

    with fake_sidecar(tmp_path / "s", script) as server, Client.connect(server.path) as client:
        for tag, call in calls.items():
            with pytest.raises(Forbidden, match="seen"):
                call(client)
            assert server.requests[-1].body.__struct_config__.tag == tag


def test_connections_use_no_threads(tmp_path: Path) -> None:
    with fake_sidecar(tmp_path / "s", answer_all({})) as server:
        before = threading.active_count()
        with Connection.connect(server.path) as connection:
            connection.call({"type": "idle"}, 5)
            assert threading.active_count() == before
