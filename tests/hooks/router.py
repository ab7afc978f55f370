"""A plain ROUTER that plays the sidecar: it says what a test tells it to, nothing by itself."""

import time
from collections.abc import Callable
from typing import Self, TypeVar

import zmq

from hicache_proto.hooklink import (
    Answer,
    Call,
    CallBody,
    Heartbeat,
    HookMessage,
    Notice,
    RankHello,
    SidecarMessage,
    Welcome,
    decode_from_hook,
    encode,
    phase_of,
)

DEADLINE_S = 10.0  # never reached in a passing run

T = TypeVar("T")


class Router:
    """Binds ``endpoint``; every wait has a deadline and keeps what it did not wait for."""

    def __init__(self, endpoint: str, heartbeat_s: float = 1.0) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(endpoint)
        self.heartbeat_s = heartbeat_s
        self.kept: list[tuple[bytes, HookMessage]] = []
        self.peer = b""
        self.session = ""
        self._calls = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close(linger=0)
        self._context.term()

    def wait_for(self, wanted: Callable[[HookMessage], bool], timeout_s: float = DEADLINE_S) -> HookMessage:
        """The first message, kept or new, that ``wanted`` takes."""
        limit = time.monotonic() + timeout_s
        while True:
            for index, (peer, message) in enumerate(self.kept):
                if wanted(message):
                    del self.kept[index]
                    self.peer = peer
                    return message
            left = limit - time.monotonic()
            assert left > 0, f"not received; kept: {[m for _, m in self.kept]}"
            if self.socket.poll(int(left * 1000) + 1):
                peer, frame = self.socket.recv_multipart()
                self.kept.append((peer, decode_from_hook(frame)))

    def expect(self, kind: type[T], timeout_s: float = DEADLINE_S, **fields: object) -> T:
        """The next message of ``kind`` whose fields are as given."""
        message = self.wait_for(
            lambda m: isinstance(m, kind) and all(getattr(m, k) == v for k, v in fields.items()), timeout_s
        )
        assert isinstance(message, kind)
        return message

    def send(self, message: SidecarMessage) -> None:
        self.raw(encode(message))

    def raw(self, *frames: bytes) -> None:
        self.socket.send_multipart([self.peer, *frames])

    def welcome(self, timeout_s: float = DEADLINE_S) -> RankHello:
        """Take the next hello."""
        hello = self.expect(RankHello, timeout_s)
        self.session = hello.session
        self.send(Welcome(session=hello.session, protocol=hello.protocol, heartbeat_s=self.heartbeat_s))
        return hello

    def call(self, body: CallBody, n: int = 0, session: str | None = None) -> Call:
        """Send one call."""
        self._calls += 1
        own = self.session if session is None else session
        call = Call(session=own, n=n, phase=phase_of(body), call=self._calls, body=body)
        self.send(call)
        return call

    def ask(self, body: CallBody, n: int = 0) -> Answer:
        """Send one call and wait for its answer."""
        return self.expect(Answer, call=self.call(body, n).call)

    def beat(self, **fields: object) -> Heartbeat:
        """A heartbeat whose report has these fields."""
        message = self.wait_for(
            lambda m: isinstance(m, Heartbeat) and all(getattr(m.report, k) == v for k, v in fields.items())
        )
        assert isinstance(message, Heartbeat)
        return message

    def notice(self, kind: str) -> Notice:
        message = self.wait_for(lambda m: isinstance(m, Notice) and m.kind == kind)
        assert isinstance(message, Notice)
        return message
