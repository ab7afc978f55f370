"""The control socket: accepts connections, names the peer, and gives each its own ``Connection``.

Strangers are closed before a byte is read and counted (failures.md F96); so are connections beyond the limits, so that
one user cannot lock the others out. Root and the daemon's own user are only bound by their own limit.
"""

import contextlib
import logging
import socket
from collections import Counter
from collections.abc import Callable

import trio

from hicache_sidecar.core.actor import Role
from hicache_sidecar.core.service import Service
from hicache_sidecar.obs.counters import Counters
from hicache_sidecar.server.accepting import accept_until
from hicache_sidecar.server.actors import Access, Peer, peer_of
from hicache_sidecar.server.connection import LINGER_S, Connection

log = logging.getLogger("hicache.server")

MAX_PER_UID = 64  # connections of one user
MAX_TOTAL = 256  # connections of all users that are not admin


class ControlServer:
    """Serves listening Unix sockets until ``stop``."""

    def __init__(self, service: Service, access: Callable[[], Access], counters: Counters) -> None:
        self._service, self._access, self._counters = service, access, counters
        self._open: Counter[int] = Counter()
        self._closing = trio.Event()

    def stop(self) -> None:
        """Accept and read nothing more; running requests get a moment to end."""
        self._closing.set()

    async def serve(
        self, sockets: list[socket.socket], *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Accept until ``stop``; returns when the last connection ended, at most LINGER_S later."""
        async with trio.open_nursery() as connections:
            await accept_until(self._closing, sockets, self._handle, connections, task_status)
            connections.cancel_scope.deadline = trio.current_time() + LINGER_S

    async def _handle(self, stream: trio.SocketStream) -> None:
        try:
            peer = peer_of(stream.socket)  # type: ignore[arg-type]  # the trio socket has getsockopt
        except OSError:
            await trio.aclose_forcefully(stream)
            return
        actor = self._access().actor(peer)
        refused = self._refusal(peer, actor.role)
        if refused:
            self._counters.add("hicache_control_connections", refused)
            log.warning("control connection of uid %d pid %d closed: %s", peer.uid, peer.pid, refused)
            await trio.aclose_forcefully(stream)
            return
        self._open[peer.uid] += 1
        try:
            await Connection(stream, actor, self._service, self._counters, self._closing).run()
        finally:
            self._open[peer.uid] -= 1
            if not self._open[peer.uid]:
                del self._open[peer.uid]

    def _refusal(self, peer: Peer, role: Role) -> str:
        if role is Role.NONE:
            return "stranger"
        if self._open[peer.uid] >= MAX_PER_UID or (role is not Role.ADMIN and self._open.total() >= MAX_TOTAL):
            return "too_many"
        return ""


def prepare_inherited(sock: socket.socket) -> socket.socket:
    """An activated socket as trio wants it. Its file stays (failures.md F107)."""
    with contextlib.suppress(OSError):
        sock.setblocking(False)
    return sock
