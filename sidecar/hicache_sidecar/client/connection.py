"""One connection to the control socket: frames, hello, requests in flight, a deadline on every wait.

Works on plain maps, so that the command line stays quick to start (the typed half is ``typed.py``): a request body
is a map with the ``type`` tag of its struct in ``hicache_proto.api``, or such a struct; an answer is the document as
the HTTP API would return it. Not thread-safe: one connection belongs to one thread.

Durations are seconds. Rules:

1. Frames of several requests may interleave; ``wait`` keeps what belongs to others.
2. A lost connection is said at once, with the operation id if the sidecar had named one.
3. After a frame that cannot be read the stream has no known place any more: the connection is closed.
"""

import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Self

import msgspec

from hicache_proto.errors import ErrorBody, Forbidden, HicacheError, InvalidRequest, from_body
from hicache_proto.framing import HEADER, encode_frame, frame_length
from hicache_proto.version import PROTOCOL_VERSION, negotiate
from hicache_sidecar.client.errors import ConnectionLost, Unreachable

DEFAULT_SOCKET = "/run/hicache-sidecar/control.sock"
CONNECT_TIMEOUT_S = 5.0  # connect and hello; a live sidecar answers within a millisecond
REQUEST_TIMEOUT_S = 30.0
GRACE_S = 10.0  # the sidecar answers deadline_exceeded itself; only then do we give up on it
_RECEIVE_BYTES = 1 << 16
# Requests that change nothing: if the connection is lost, no outcome is in doubt.
ONLY_READ = frozenset({"status", "idle", "ranks", "backends", "operations", "history", "failover", "watch"})

OnProgress = Callable[[dict[str, Any]], None]

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode  # untyped: maps, lists and scalars only, never objects


def default_socket_path() -> str:
    """``$HICACHE_SIDECAR_SOCKET``, else the packaged path."""
    return os.environ.get("HICACHE_SIDECAR_SOCKET") or DEFAULT_SOCKET


class Connection:
    """A connected, greeted control socket. Make one with ``Connection.connect``; use it as a context manager."""

    def __init__(self, sock: socket.socket, hello: dict[str, Any], rest: bytearray) -> None:
        self._sock: socket.socket | None = sock
        self._buffer = rest
        self._next_id = 1
        self._waiting: dict[int, deque[dict[str, Any]]] = {}
        self._operations: dict[int, str] = {}
        self._only_read: set[int] = set()
        self.hello = hello

    @classmethod
    def connect(cls, path: str | None = None, timeout_s: float = CONNECT_TIMEOUT_S, client: str = "") -> Self:
        """Connect and exchange hellos within ``timeout_s``.

        Raises:
            Unreachable: nothing listens there, or it did not say hello in time.
            HicacheError: this user may not (``forbidden``), or another protocol version.
        """
        path = path or default_socket_path()
        deadline = time.monotonic() + timeout_s
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout_s)
            sock.connect(path)
            sock.sendall(encode_frame(_encode({"type": "hello", "protocol": PROTOCOL_VERSION, "client": client})))
            buffer = bytearray()
            frame = _read_frame(sock, buffer, deadline)
            if frame.get("type") == "error":
                raise _refusal(frame)
            if frame.get("type") != "hello" or not isinstance(frame.get("protocol"), int):
                raise Unreachable(f"{path} did not answer with a hello: no hicache-sidecar")
            negotiate(frame["protocol"])
        except PermissionError as error:
            sock.close()
            raise Forbidden(
                f"this user may not open {path}", hint="join the socket's group, or run as root", details={"path": path}
            ) from error
        except TimeoutError as error:
            sock.close()
            raise Unreachable(f"{path}: no hello within {timeout_s:g} s") from error
        except (OSError, EOFError) as error:
            sock.close()
            why = error.strerror or str(error) if isinstance(error, OSError) else "closed before its hello"
            raise Unreachable(f"{path}: {why}") from error
        except BaseException:
            sock.close()
            raise
        return cls(sock, frame, buffer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave. Operations in flight go on in the sidecar. Idempotent."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def operation_id(self, request: int) -> str | None:
        """The operation id that progress named for ``request``, if any yet."""
        return self._operations.get(request)

    def send(self, body: Any, timeout_s: float = REQUEST_TIMEOUT_S) -> int:
        """Send one request and return its number for ``wait``; does not wait for the answer.

        Raises:
            ConnectionLost: the sidecar is gone, or takes nothing within ``timeout_s``.
            TooLarge, InvalidRequest: the request is over the frame limit, or no message can hold it; nothing was sent.
        """
        try:
            payload = _encode({"type": "request", "id": self._next_id, "body": body})
        except (OverflowError, ValueError) as error:  # a number over 64 bits, bytes of a command line that are no text
            raise InvalidRequest(f"the request cannot be written: {error}") from None
        frame = encode_frame(payload)
        sock = self._open()
        number = self._next_id
        self._next_id += 1
        if _tag(body) in ONLY_READ:
            self._only_read.add(number)
        try:
            sock.settimeout(timeout_s)
            sock.sendall(frame)
        except OSError as error:
            self.close()
            raise self._lost(number, f"the sidecar closed the connection: {error.strerror or error}") from error
        self._waiting[number] = deque()
        return number

    def wait(self, request: int, timeout_s: float = REQUEST_TIMEOUT_S, on_progress: OnProgress | None = None) -> Any:
        """The document that answers ``request``; progress goes to ``on_progress`` on the way.

        Raises:
            HicacheError: the sidecar's error.
            ConnectionLost: gone, or no answer within ``timeout_s``; carries the operation id seen in progress.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            frame = self._next(request, deadline, timeout_s)
            kind = frame.get("type")
            if kind == "progress":
                if on_progress is not None:
                    on_progress(_mapping(frame.get("data")))
                continue
            self._waiting.pop(request, None)
            if kind == "result":
                return frame.get("document")
            raise _refusal(frame)

    def call(self, body: Any, timeout_s: float = REQUEST_TIMEOUT_S, on_progress: OnProgress | None = None) -> Any:
        """``send`` and ``wait``."""
        return self.wait(self.send(body, timeout_s), timeout_s, on_progress)

    def stream(self, body: Any, quiet_timeout_s: float | None = None) -> Iterator[dict[str, Any]]:
        """Events of a ``watch`` until the sidecar ends it.

        ``quiet_timeout_s`` bounds the silence between two events; None waits as long as the sidecar lives, which is
        what a person at ``hicachectl watch`` wants (a dead sidecar ends the stream at once).

        Raises:
            HicacheError, ConnectionLost: as ``wait``.
        """
        request = self.send(body)
        while True:
            deadline = None if quiet_timeout_s is None else time.monotonic() + quiet_timeout_s
            frame = self._next(request, deadline, quiet_timeout_s)
            if frame.get("type") == "progress":
                yield _mapping(frame.get("data"))
                continue
            self._waiting.pop(request, None)
            if frame.get("type") == "result":
                return
            raise _refusal(frame)

    def _open(self) -> socket.socket:
        if self._sock is None:
            raise ConnectionLost("the connection is closed")
        return self._sock

    def _lost(self, request: int, message: str) -> ConnectionLost:
        return ConnectionLost(message, operation_id=self.operation_id(request), only_read=request in self._only_read)

    def _next(self, request: int, deadline: float | None, timeout_s: float | None) -> dict[str, Any]:
        """The next frame of ``request``."""
        mine = self._waiting.get(request)
        if mine is None:
            raise KeyError(f"request {request} is not in flight")
        while not mine:
            self._receive(request, deadline, timeout_s)
        return mine.popleft()

    def _receive(self, request: int, deadline: float | None, timeout_s: float | None) -> None:
        try:
            frame = _read_frame(self._open(), self._buffer, deadline)
        except TimeoutError as error:
            raise self._lost(request, f"no answer within {timeout_s:g} s") from error
        except (OSError, EOFError, HicacheError, msgspec.MsgspecError) as error:
            self.close()
            gone = isinstance(error, EOFError | OSError)
            why = "closed the connection" if gone else f"sent what we cannot read: {error}"
            raise self._lost(request, f"the sidecar {why}") from error
        number = frame.get("id")
        if number == 0 and frame.get("type") == "error":  # a frame of ours was refused unread
            self.close()
            raise _refusal(frame)
        if isinstance(number, int) and number in self._waiting:
            data = frame.get("data")
            if isinstance(data, dict) and isinstance(data.get("operation_id"), str):
                self._operations[number] = data["operation_id"]
            self._waiting[number].append(frame)


def _read_frame(sock: socket.socket, buffer: bytearray, deadline: float | None) -> dict[str, Any]:
    """The next frame as a map.

    Raises:
        TimeoutError: ``deadline`` (monotonic seconds) passed. EOFError: the peer left. OSError: the socket failed.
        HicacheError, msgspec.MsgspecError: not a frame.
    """
    need = HEADER.size
    body = False
    while True:
        while len(buffer) < need:
            if deadline is None:
                sock.settimeout(None)
            else:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError
                sock.settimeout(left)
            chunk = sock.recv(_RECEIVE_BYTES)
            if not chunk:
                raise EOFError
            buffer += chunk
        if body:
            break
        need += frame_length(bytes(buffer[: HEADER.size]))
        body = True
    payload = bytes(buffer[HEADER.size : need])
    del buffer[:need]
    try:
        # No walk before it, as the daemon does: that costs more than the answer itself, and the sender is the service
        # that the user asked. The decoder bounds its own depth.
        return _mapping(_decode(payload))
    except RecursionError as error:
        raise msgspec.ValidationError("the frame is nested too deep") from error


def _tag(body: Any) -> Any:
    return body.get("type") if isinstance(body, dict) else type(body).__struct_config__.tag


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise msgspec.ValidationError("expected a map")
    return value


def _refusal(frame: dict[str, Any]) -> HicacheError:
    return from_body(msgspec.convert(_mapping(frame.get("error")), ErrorBody))
