"""The real ``hicache-sidecar`` process without an engine: documents, refusals, hostile bytes."""

import os
import random
import socket
import stat
import time

from tests.e2e.daemon.helpers import Client, metric
from tests.rigs.procs import Processes, http_json, http_ok

from hicache_proto import api, control
from hicache_proto.framing import HEADER

BACKEND = "/hicache/storage-backend"


# ---- without an engine


def test_status_is_200_and_changes_are_503(processes: Processes) -> None:
    sidecar = processes.sidecar()
    status, document = http_json("GET", sidecar.url + BACKEND)
    assert (status, document["state"], document["ranks"]) == (200, "engine_down", [])
    assert http_json("GET", f"{sidecar.url}/readyz")[0] == 503
    for method, path, body in (
        ("PUT", BACKEND, {"hicache_storage_backend": "file"}),
        ("DELETE", BACKEND, None),
        ("POST", f"{BACKEND}/bypass", {"enabled": True}),
        ("GET", "/hicache/idle", None),
    ):
        status, document = http_json(method, sidecar.url + path, body)
        assert (status, document["error"]["code"]) == (503, "no_engine"), (method, path)
    with Client(sidecar.socket) as client:
        assert isinstance(client.hello, control.ServerHello)
        answer = client.ask(api.AttachRequest(hicache_storage_backend="file"))
        assert isinstance(answer, control.Error)
        assert answer.error.code == "no_engine"
        answer = client.ask(api.StatusRequest())
        assert isinstance(answer, control.Result)
        assert answer.document["state"] == "engine_down"
    assert "attach hicache_storage_backend=file" in sidecar.process.text()  # the audit line


def test_every_document_is_the_same_on_both_transports(processes: Processes) -> None:
    sidecar = processes.sidecar()
    with Client(sidecar.socket) as client:
        for path, request in (
            ("/hicache/ranks", api.RanksRequest()),
            ("/hicache/operations", api.OperationsRequest()),
            ("/hicache/history", api.HistoryRequest()),
        ):
            answer = client.ask(request)
            assert isinstance(answer, control.Result)
            assert http_json("GET", sidecar.url + path) == (200, answer.document)


def test_watch_begins_with_a_snapshot(processes: Processes) -> None:
    sidecar = processes.sidecar()
    with Client(sidecar.socket) as client:
        client.send(control.Request(id=5, body=api.WatchRequest()))
        frame = client.read()
        assert isinstance(frame, control.Progress)
        assert (frame.id, frame.data["kind"]) == (5, "snapshot")
        assert frame.data["data"]["state"] == "engine_down"


def test_sockets_have_their_modes(processes: Processes) -> None:
    sidecar = processes.sidecar()
    assert stat.S_IMODE(os.stat(sidecar.socket).st_mode) == 0o660
    assert stat.S_IMODE((sidecar.state).stat().st_mode) == 0o700
    assert sorted(entry.name for entry in sidecar.runtime.iterdir() if not entry.name.endswith(".lock")) == [
        "control.sock", "hooks.sock",
    ]  # fmt: skip


# ---- hostile bytes


def test_random_bytes_and_huge_lengths_are_dropped_and_counted(processes: Processes) -> None:
    """F95: on both Unix sockets and on HTTP; the daemon lives, counts, and goes on answering."""
    sidecar = processes.sidecar()
    rng = random.Random(7)
    junk = [b"\xff" * 4, HEADER.pack(1 << 30), HEADER.pack(8) + b"\x80\x04\x95\x00\x00\x00\x00.", rng.randbytes(400)]
    for path in (sidecar.socket, str(sidecar.runtime / "hooks.sock")):
        for blob in junk:
            with socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(20)
                sock.connect(path)
                try:
                    sock.sendall(blob)
                    sock.shutdown(socket.SHUT_WR)
                    while sock.recv(65536):
                        pass
                except (BrokenPipeError, ConnectionResetError):
                    pass
    with socket.create_connection(("127.0.0.1", sidecar.port)) as sock:
        sock.sendall(rng.randbytes(300))
        sock.shutdown(socket.SHUT_WR)
        sock.settimeout(20)
        while sock.recv(65536):
            pass
    assert metric(sidecar, "hicache_control_dropped_frames_total") >= 4
    assert http_json("GET", sidecar.url + BACKEND)[0] == 200
    with Client(sidecar.socket) as client:
        assert isinstance(client.ask(api.StatusRequest()), control.Result)
    assert "Traceback" not in sidecar.process.text()


def test_pickles_on_the_hook_link_are_counted(processes: Processes) -> None:
    """F95: a well-formed ZMQ peer that sends a pickle and random bytes."""
    import zmq

    sidecar = processes.sidecar()
    context = zmq.Context()
    try:
        dealer = context.socket(zmq.DEALER)
        dealer.linger = 5000
        dealer.connect(sidecar.endpoint)
        for blob in (b"\x80\x04\x95.", random.Random(3).randbytes(100), b"", b"\xc1" * 50):
            dealer.send(blob)
        deadline = time.monotonic() + 20
        while metric(sidecar, 'hicache_hook_messages_total{what="malformed"}') < 4:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        dealer.close()
    finally:
        context.term()
    assert http_ok(f"{sidecar.url}/healthz")
