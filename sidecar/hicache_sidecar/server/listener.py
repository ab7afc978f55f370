"""TCP listeners under Hypercorn's trio protocol server, with the guards that it leaves out.

Hypercorn's ``worker_serve`` lets one connection's unforeseen exception end every connection, and writes without a
deadline inside a shield, so that a client which stops reading holds up the stop of the daemon (read in 0.18). So its
``TCPServer`` runs here per connection, over a stream that has those deadlines, under a limit of connections.
"""

import logging
import socket
from collections.abc import Callable
from typing import Any

import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.h2 import H2Protocol
from hypercorn.trio.tcp_server import MAX_RECV, TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState

from hicache_sidecar.obs.counters import Counters
from hicache_sidecar.server.accepting import accept_until
from hicache_sidecar.server.bare import status_of_bare, with_body
from hicache_sidecar.server.replies import refusal

log = logging.getLogger("hicache.server")

MAX_CONNECTIONS = 128  # browsers, scrapers and scripts of one host
SEND_S = 10.0  # one write to a client that does not read
KEEP_ALIVE_S = 15.0  # an idle connection; also the time for a request's head
LINGER_S = 0.5  # reading on after our last byte, so that a reset does not swallow the answer (413)
GRACE_S = 1.0  # running requests at the stop (failures.md F103: all is over within two seconds)
MAX_LINGER_BYTES = 16 << 20
BACKLOG = 128


class GuardedStream(trio.abc.HalfCloseableStream):
    """A socket stream whose writes have a deadline and whose close lets the peer read the last answer.

    Writes and the end of the stream wait for each other: Hypercorn ends a connection while the application still
    writes its answer (413 to ``curl -d`` of more than a megabyte, which leaves at once), and trio refuses the second.
    """

    def __init__(self, stream: trio.SocketStream, cancel: Callable[[], None]) -> None:
        self._stream, self._cancel = stream, cancel
        self.socket = stream.socket  # Hypercorn reads the addresses from it
        self._ended = trio.Event()  # the peer closed
        self._sending = trio.Lock()
        self._closing = False

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        try:
            with trio.fail_after(SEND_S):
                async with self._sending:
                    await self._stream.send_all(data)
        except trio.TooSlowError:
            self._closing = True  # no linger for somebody who does not read
            self._ended.set()
            await trio.aclose_forcefully(self._stream)
            raise trio.BrokenResourceError("the client does not read") from None

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        discarded = 0
        while True:
            data = bytes(await self._stream.receive_some(max_bytes))
            discarded += len(data)
            if not data or not self._closing or discarded > MAX_LINGER_BYTES:
                break
        if not data:
            self._ended.set()
        return b"" if self._closing else data

    async def send_eof(self) -> None:
        async with self._sending:  # a client that leaves at once meets the (empty) end of its answer
            await self._stream.send_eof()

    async def aclose(self) -> None:
        """Give the peer LINGER_S to take what was sent, then close and end the connection's tasks."""
        if not self._closing and not self._ended.is_set():
            self._closing = True
            with trio.move_on_after(LINGER_S, shield=True):
                try:
                    await self.receive_some(1 << 16)
                except trio.BusyResourceError:
                    await self._ended.wait()  # the connection's own reader sees the end
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    pass
        await trio.aclose_forcefully(self._stream)
        self._cancel()


class _Connection(TCPServer):
    """Hypercorn's connection, ended when the client has left and its requests are answered; its own errors as JSON.

    By itself (0.18) it waits for the rest of KEEP_ALIVE_S: eight clients a second that leave would fill
    MAX_CONNECTIONS. And it waits for ever for the first request of a client that speaks HTTP/2: 128 of them would.
    """

    _left = False
    _waits = False  # the time of an idle connection runs
    counters: Counters

    async def _read_data(self) -> None:
        while True:
            try:
                data = await self.stream.receive_some(MAX_RECV)
            except (trio.ClosedResourceError, trio.BrokenResourceError):
                break
            await self.protocol.handle(RawData(bytes(data)))
            if data == b"":
                break
            if not self._waits and isinstance(self.protocol.protocol, H2Protocol) and self.protocol.protocol.idle:
                self._waits = True
                await self.idle_task.restart(self._task_group, self._idle_timeout)
        await self.protocol.handle(Closed())
        self._left = True
        await self.idle_task.stop()

    async def protocol_send(self, event: Event) -> None:
        if self._left and isinstance(event, Updated):
            return  # an answer after that: there will be no next request to wait for
        if isinstance(event, Updated):
            self._waits = event.idle
        if isinstance(event, RawData) and (status := status_of_bare(event.data)) is not None:
            self.counters.add("hicache_http_responses", "none", str(status))
            event = RawData(with_body(event.data))
        await super().protocol_send(event)


class HttpServer:
    """Serves listening TCP sockets with one ASGI application until ``stop``."""

    def __init__(self, app: Any, counters: Counters) -> None:
        self._app = ASGIWrapper(app)
        self._counters = counters
        self._config = Config()
        self._config.errorlog = logging.getLogger("hicache.http")
        self._config.keep_alive_timeout = KEEP_ALIVE_S
        self._config.include_server_header = False
        self._config.h2_max_concurrent_streams = 16
        self._context = WorkerContext(None)
        self._closing = trio.Event()
        self._open = 0

    def stop(self) -> None:
        """Accept nothing more; idle connections close, running requests get GRACE_S."""
        self._closing.set()

    async def serve(
        self, sockets: list[socket.socket], *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Accept until ``stop``; returns when the last connection ended."""
        async with trio.open_nursery() as connections:
            await accept_until(self._closing, sockets, self._handle, connections, task_status)
            await self._context.terminated.set()
            connections.cancel_scope.deadline = trio.current_time() + GRACE_S

    async def _handle(self, raw: trio.SocketStream) -> None:
        if self._open >= MAX_CONNECTIONS:
            self._counters.add("hicache_http_connections", "too_many")
            await trio.aclose_forcefully(raw)
            return
        self._open += 1
        result = "closed"
        try:
            with trio.CancelScope() as scope:
                stream = GuardedStream(raw, scope.cancel)
                server = _Connection(self._app, self._config, self._context, ConnectionState({}), stream)  # type: ignore[arg-type]
                server.counters = self._counters
                try:
                    await server.run()
                finally:
                    await trio.aclose_forcefully(raw)
        except* (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            result = "broken"
        except* Exception as group:
            result = "internal"
            refusal(group, self._counters, "http")
        finally:
            self._open -= 1
            self._counters.add("hicache_http_connections", result)


def bind_tcp(host: str, port: int) -> list[socket.socket]:
    """Listening sockets for every address that ``host`` stands for.

    Raises:
        OSError: unknown name, address in use, no such address here.
    """
    found: list[socket.socket] = []
    try:
        for family, _, _, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            # Port 0 means any free one, but the same for all addresses of the name.
            where = (address[0], found[0].getsockname()[1], *address[2:]) if found and port == 0 else address
            sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
            found.append(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind(where)
            sock.listen(BACKLOG)
    except OSError:
        for sock in found:
            sock.close()
        raise
    return found
