"""A scripted sidecar on a real Unix socket: one thread, one function per accepted connection.

The client under test is blocking, so the fake is too. ``script(peer, request)`` gets each decoded request and
answers with ``peer.progress``, ``peer.result``, ``peer.error`` or ``peer.drop``.
"""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hicache_proto import control
from hicache_proto.errors import HicacheError
from hicache_proto.framing import HEADER, encode_frame, frame_length

Script = Callable[["Peer", control.Request], None]

# The answer of a change that worked.
DONE: dict[str, Any] = {
    "success": True,
    "changed": True,
    "changed_keys": ["prefetch_threshold"],
    "message": "rank 0: done; rank 1: done",
    "operation_id": "op-5",
    "revision": 5,
    "state": "attached",
    "ranks": [{"rank": 0, "success": True, "message": "done", "stall_us": 11}],
    "prepare_ms": 2.0,
    "freeze_ms": 1.0,
    "commit_ms": 0.5,
}


class Peer:
    """The server's end of one connection."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def read(self) -> control.ClientFrame | None:
        """The next frame; None at the end of the stream."""
        header = self._exactly(HEADER.size)
        if header is None:
            return None
        payload = self._exactly(frame_length(header))
        return None if payload is None else control.decode_client_frame(payload)

    def _exactly(self, count: int) -> bytes | None:
        data = b""
        while len(data) < count:
            chunk = self.sock.recv(count - len(data))
            if not chunk:
                return None
            data += chunk
        return data

    def send(self, frame: control.ServerFrame) -> None:
        self.sock.sendall(encode_frame(control.encode(frame)))

    def progress(self, request: control.Request, **data: Any) -> None:
        self.send(control.Progress(id=request.id, data=data))

    def result(self, request: control.Request, document: Any) -> None:
        self.send(control.Result(id=request.id, document=document))

    def error(self, request: control.Request, error: HicacheError) -> None:
        self.send(control.Error(id=request.id, error=error.body()))

    def drop(self) -> None:
        self.sock.shutdown(socket.SHUT_RDWR)


class FakeSidecar:
    """Accepts connections until closed; keeps every request it decoded."""

    def __init__(self, path: Path, script: Script, protocol: int = 1, greet: bool = True) -> None:
        self.path = str(path)
        self.script = script
        self.protocol = protocol
        self.greet = greet
        self.requests: list[control.Request] = []
        self.hellos: list[control.ClientHello] = []
        self.failures: list[BaseException] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen()
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            with sock:
                try:
                    self._serve(Peer(sock))
                except (BrokenPipeError, ConnectionResetError):
                    pass
                except BaseException as error:  # shown by the fixture: a broken script fails its test
                    self.failures.append(error)

    def _serve(self, peer: Peer) -> None:
        hello = peer.read()
        if not isinstance(hello, control.ClientHello):
            return
        self.hellos.append(hello)
        if self.greet:
            peer.send(control.ServerHello(protocol=self.protocol, server="fake", role="operator"))
        while (frame := peer.read()) is not None:
            assert isinstance(frame, control.Request)
            self.requests.append(frame)
            self.script(peer, frame)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
        self._listener.close()
        self._thread.join(5)
        assert not self._thread.is_alive()
        assert not self.failures, self.failures


@contextlib.contextmanager
def fake_sidecar(path: Path, script: Script, **options: Any) -> Iterator[FakeSidecar]:
    """A running fake; its thread is gone afterwards."""
    server = FakeSidecar(path, script, **options)
    try:
        yield server
    finally:
        server.close()
