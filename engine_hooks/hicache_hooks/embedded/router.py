"""The front's end of the links to the scheduler processes: which replica is up, what it was asked, what it owes.

One ZMQ ROUTER on the asyncio loop. ZMQ's descriptor is edge-triggered, so it is drained until EAGAIN, and looked at
again after every send, which may have eaten the edge (F100).
"""

import asyncio
import contextlib
import itertools
import logging
from dataclasses import dataclass, field
from typing import Any, assert_never

import msgspec
import zmq

from hicache_hooks.embedded import messages
from hicache_proto.errors import HicacheError, InvalidRequest, NoEngine, from_body

log = logging.getLogger(__name__)

DRAIN_AT_ONCE = 256  # messages per turn of the loop
FLUSH_MARGIN_S = 5.0  # beyond a flush's own time-out: only a stuck scheduler needs it


@dataclass(slots=True)
class Replica:
    """One data-parallel rank as the front sees it."""

    rank: int
    epoch: int = 0  # of the start that is expected or up
    up: bool = False
    pid: int = 0
    view: messages.StorageView = field(default_factory=messages.StorageView)
    requests: dict[str, asyncio.Future[messages.Done]] = field(default_factory=dict)
    flushes: dict[int, asyncio.Future[messages.Flushed]] = field(default_factory=dict)

    @property
    def load(self) -> int:
        """Requests that have no answer yet."""
        return len(self.requests)


class Router:
    """Sends requests to replicas and hands their answers back. Loop thread only."""

    def __init__(self, ranks: int) -> None:
        self.replicas = [Replica(rank) for rank in range(ranks)]
        self.changed = asyncio.Event()  # set whenever a replica came up or went down
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # unknown peer: an error, not silence
        self._socket.setsockopt(zmq.LINGER, 200)
        self._loop = asyncio.get_running_loop()
        self._calls = itertools.count(1)
        self._fd = -1

    def bind(self, endpoint: str) -> None:
        """Listen; the caller gives a path in a private directory."""
        self._socket.bind(endpoint)
        self._fd = self._socket.getsockopt(zmq.FD)  # type: ignore[assignment]
        self._loop.add_reader(self._fd, self._drain)

    def close(self) -> None:
        """Fail what is open and end the context; bounded by the linger time (F103)."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
        for replica in self.replicas:
            self.lost(replica.rank, "the engine is stopping")
        self._socket.close()
        self._context.term()

    # ------------------------------------------------------------------ replicas

    def expect(self, rank: int, epoch: int) -> None:
        """A process for this rank is being started; only its own messages count from now on."""
        replica = self.replicas[rank]
        replica.epoch, replica.up, replica.pid = epoch, False, 0

    def lost(self, rank: int, why: str) -> None:
        """The rank's process is gone: everything it owes fails with 503."""
        replica = self.replicas[rank]
        replica.up = False
        error = NoEngine(why, details={"reason": "rank_lost", "dp_rank": rank}, hint="repeat the request")
        futures: list[asyncio.Future[Any]] = [*replica.requests.values(), *replica.flushes.values()]
        for future in futures:
            if not future.done():
                future.set_exception(error)
        self.changed.set()

    @property
    def all_up(self) -> bool:
        """Every replica serves."""
        return all(replica.up for replica in self.replicas)

    def pick(self, dp_rank: int | None) -> Replica:
        """The replica asked for, else the least loaded one that is up.

        Raises:
            InvalidRequest: no such rank.
            NoEngine: it is not up, or none is.
        """
        if dp_rank is not None:
            if not 0 <= dp_rank < len(self.replicas):
                raise InvalidRequest(f"dp_rank {dp_rank}: this engine has {len(self.replicas)} replicas")
            if not self.replicas[dp_rank].up:
                raise NoEngine(f"dp_rank {dp_rank} is not up", details={"reason": "rank_down"}, hint="try again soon")
            return self.replicas[dp_rank]
        up = [replica for replica in self.replicas if replica.up]
        if not up:
            raise NoEngine("no replica is up", details={"reason": "rank_down"}, hint="try again soon")
        return min(up, key=lambda replica: replica.load)

    # ------------------------------------------------------------------ requests

    async def generate(self, replica: Replica, submit: messages.Submit) -> messages.Done:
        """One request. When the caller is cancelled, the request is aborted in the scheduler.

        Raises:
            HicacheError: refused by the scheduler, or its process was lost.
        """
        future: asyncio.Future[messages.Done] = self._loop.create_future()
        replica.requests[submit.rid] = future
        try:
            self._send(replica, submit)
            return await future
        except asyncio.CancelledError:
            with contextlib.suppress(NoEngine):
                self._send(replica, messages.Cancel(submit.rid))
            raise
        finally:
            del replica.requests[submit.rid]

    async def flush(self, replica: Replica, timeout_s: float) -> messages.Flushed:
        """Empty a replica's L1 and L2.

        Raises:
            NoEngine: its process is gone, or does not answer.
        """
        call = next(self._calls)
        future: asyncio.Future[messages.Flushed] = self._loop.create_future()
        replica.flushes[call] = future
        try:
            self._send(replica, messages.Flush(call, timeout_s))
            async with asyncio.timeout(timeout_s + FLUSH_MARGIN_S):
                return await future
        except TimeoutError as error:
            raise NoEngine(f"dp_rank {replica.rank} does not answer") from error
        finally:
            del replica.flushes[call]

    def stop(self, replica: Replica, timeout_s: float) -> bool:
        """Ask a scheduler to leave in good order; False when it cannot be asked."""
        try:
            self._send(replica, messages.Stop(timeout_s))
        except NoEngine:
            return False
        return True

    def _send(self, replica: Replica, message: messages.FrontMessage) -> None:
        peer = messages.routing_id(replica.rank, replica.epoch)
        try:
            self._socket.send_multipart([peer, messages.encode(message)], zmq.DONTWAIT)
        except zmq.ZMQError as error:  # EHOSTUNREACH: not connected; EAGAIN: it does not read
            raise NoEngine(f"dp_rank {replica.rank} cannot be reached: {error}") from error
        self._loop.call_soon(self._drain)

    # ------------------------------------------------------------------ answers

    def _drain(self) -> None:
        for _ in range(DRAIN_AT_ONCE):
            if self._socket.closed:
                return
            try:
                peer, frame = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            except ValueError:
                log.error("dropped a message that is not one frame")
                continue
            try:
                self._take(peer, messages.decode_from_rank(frame))
            except msgspec.MsgspecError:
                log.exception("dropped a message from a scheduler")
        self._loop.call_soon(self._drain)

    def _take(self, peer: bytes, message: messages.RankMessage) -> None:
        replica = next((r for r in self.replicas if messages.routing_id(r.rank, r.epoch) == peer), None)
        if replica is None:
            return  # an earlier start of a rank: its requests have failed already
        match message:
            case messages.Up():
                replica.up, replica.pid, replica.view = True, message.pid, message.view
                self.changed.set()
            case messages.Published():
                replica.view = message.view
            case messages.Done():
                _resolve(replica.requests.get(message.rid), message)
            case messages.Flushed():
                _resolve(replica.flushes.get(message.call), message)
            case messages.Failed():
                _resolve(replica.requests.get(message.rid), from_body(message.error))
            case _:
                assert_never(message)


def _resolve(future: asyncio.Future[Any] | None, value: object) -> None:
    if future is None or future.done():
        return  # its caller left
    if isinstance(value, HicacheError):
        future.set_exception(value)
    else:
        future.set_result(value)
