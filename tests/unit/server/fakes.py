"""A small service and small clients for the transports' tests."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import trio

from hicache_proto import api, control
from hicache_proto.framing import HEADER, encode_frame
from hicache_proto.version import PROTOCOL_VERSION
from hicache_sidecar.core.actor import Actor, Role, authorize
from hicache_sidecar.core.service import Progress

ANSWER = api.OperationAnswer(
    success=True,
    changed=True,
    changed_keys=[],
    message="done",
    operation_id="op-1",
    revision=7,
    state="attached",
    ranks=[],
)
STATUS = api.StatusDocument(
    hicache_storage_backend=None,
    hicache_storage_backend_extra_config=None,
    hicache_storage_prefetch_policy=None,
    hicache_write_policy=None,
    revision=7,
    state="engine_down",
    desired=None,
    drift=[],
    usage={},
    ranks=[],
)
ADMIN = Actor(name="root", role=Role.ADMIN, uid=0, pid=1)


class FakeService:
    """Checks the role as the real one does, then answers what the test put into it."""

    def __init__(self) -> None:
        self.seen: list[tuple[api.ApiRequest, Actor]] = []
        self.raises: Exception | None = None
        self.answer: api.Document = ANSWER
        self.wait: trio.Event | None = None
        self.progress: list[dict[str, Any]] = []
        self.events: list[api.EventDocument] = []
        self.hold_watch = True
        self.watches_closed = 0
        self.is_ready = False
        self.engine_id: str | None = "engine-1"

    async def handle(self, request: api.ApiRequest, actor: Actor, progress: Progress) -> api.Document:
        authorize(actor, request)
        self.seen.append((request, actor))
        for data in self.progress:
            progress(data)
        if self.wait is not None:
            await self.wait.wait()
        if self.raises is not None:
            raise self.raises
        return STATUS if isinstance(request, api.StatusRequest) else self.answer

    async def watch(self, request: api.WatchRequest, actor: Actor) -> AsyncIterator[api.EventDocument]:
        authorize(actor, request)
        self.seen.append((request, actor))
        try:
            for event in self.events:
                yield event
            if self.hold_watch:
                await trio.sleep_forever()
        finally:
            self.watches_closed += 1

    def live(self) -> dict[str, Any]:
        return {"loop": "turns"}

    def ready(self) -> tuple[bool, dict[str, Any]]:
        return self.is_ready, {} if self.is_ready else {"reason": "no rank is connected"}

    def metrics(self, accept: str) -> tuple[bytes, str]:
        return b"# EOF\n", "application/openmetrics-text"


class Peer:
    """The client's end of a control connection, by hand."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.stream = stream
        self._buffer = b""

    async def hello(self, protocol: int = PROTOCOL_VERSION) -> control.ServerHello:
        await self.send(control.ClientHello(protocol=protocol, client="test"))
        answer = await self.read()
        assert isinstance(answer, control.ServerHello)
        return answer

    async def send(self, frame: control.ClientFrame) -> None:
        await self.stream.send_all(encode_frame(control.encode(frame)))

    async def send_map(self, document: Any) -> None:
        """A frame that our own types would not make."""
        await self.stream.send_all(encode_frame(msgspec.msgpack.encode(document)))

    async def read(self) -> control.ServerFrame | None:
        """The next frame, None at the end of the stream."""
        header = await self._take(HEADER.size)
        if header is None:
            return None
        payload = await self._take(HEADER.unpack(header)[0])
        assert payload is not None
        return control.decode_server_frame(payload)

    async def ended(self) -> bool:
        """Nothing more comes."""
        return await self.read() is None

    async def error(self) -> control.Error:
        frame = await self.read()
        assert isinstance(frame, control.Error), frame
        return frame

    async def _take(self, size: int) -> bytes | None:
        while len(self._buffer) < size:
            try:
                data = await self.stream.receive_some(65536)
            except (trio.BrokenResourceError, ConnectionResetError):
                return None
            if not data:
                return None
            self._buffer += data
        taken, self._buffer = self._buffer[:size], self._buffer[size:]
        return taken


class Reply:
    """What an ASGI application answered."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.body)

    @property
    def code(self) -> str:
        return str(self.json["error"]["code"])


async def call(
    app: Callable[..., Any],
    method: str,
    target: str,
    body: Any = None,
    *,
    headers: dict[str, str] | None = None,
    host: str | None = "127.0.0.1:30080",
    local: tuple[str, int] = ("127.0.0.1", 30080),
    chunks: list[bytes] | None = None,
) -> Reply:
    """One request straight into an ASGI application. ``body`` is bytes, or a document that becomes JSON."""
    raw = body if isinstance(body, bytes) else b"" if body is None else msgspec.json.encode(body)
    parts = [raw] if chunks is None else list(chunks)
    path, _, query = target.partition("?")
    names = {"host": host} if host is not None else {}
    if chunks is None and raw:
        names["content-length"] = str(len(raw))
    names |= {name.lower(): value for name, value in (headers or {}).items()}
    scope = {
        "type": "http", "http_version": "1.1", "asgi": {"version": "3.0"}, "method": method, "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": query.encode(), "root_path": "",
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in names.items()],
        "client": ("127.0.0.1", 50000), "server": local,
    }  # fmt: skip
    reply = Reply()
    reply.unread = parts  # type: ignore[attr-defined]

    async def receive() -> dict[str, Any]:
        await trio.lowlevel.checkpoint()
        if parts:
            return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}
        await trio.sleep_forever()  # the client stays until it is answered
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        await trio.lowlevel.checkpoint()
        if message["type"] == "http.response.start":
            reply.status = message["status"]
            reply.headers = {name.decode().lower(): value.decode() for name, value in message["headers"]}
        else:
            reply.body += message.get("body", b"")

    await app(scope, receive, send)
    return reply
