"""The ZMQ ROUTER that the ranks' hooks connect to, under trio.

Theory of operation
===================

1. One task, ``_pump``, waits for the socket's descriptor. libzmq's descriptor is edge-triggered: any call on the
   socket may eat the edge. So after *every* send, or burst of sends without a wait between them, we look at EVENTS,
   and if there is input we drain from a callback of the loop (measured: without this, a sender and a receiver hang
   after some 6000 messages).
2. Draining is synchronous: between taking a message and delivering it there is no cancellation point, so nothing is
   lost when a caller is cancelled. It is bounded per pass; then the pump yields to the other tasks.
3. A wake-up that is lost all the same is found by a look at EVENTS every ``HEAL_S``, and counted (F104).
4. A call is known by (session, n, phase, call). An answer that matches no waiter is dropped and counted (F31);
   what cannot be decoded is dropped and counted (F95). No message from a peer can raise out of the pump.
   A waiter is a callback, not a task: 256 ranks in six phases are 1536 of them, and trio's part of a task with its
   cancel scopes cost more than all the rest (0.2 of 0.3 ms per call).
5. A peer that went away is noticed at the send (ROUTER_MANDATORY) and by the socket's monitor, which calls
   ``on_disconnect``; linger is 0, so that closing never waits for a dead peer (F103).

The ipc socket lies in a directory of mode 0700 or 0750, has its own mode, and libzmq lets in only the uids of
``allow_uids``. The daemon holds the runtime directory's lock: a second bind would steal the path silently.
"""

import itertools
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import trio
import zmq
import zmq.utils.monitor

from hicache_proto.errors import HicacheError
from hicache_proto.hooklink import (
    MAX_LINK_BYTES,
    Answer,
    Call,
    CallBody,
    Finalize,
    HookMessage,
    SidecarMessage,
    decode_from_hook,
    encode,
    phase_of,
)
from hicache_sidecar.core.faults import OFF, Faults
from hicache_sidecar.engine.counters import Counters

DRAIN_MAX = 256  # messages per pass: some 10 ms, so that a flood cannot starve the other tasks
HEAL_S = 0.5  # F104: a swallowed wake-up is healed in less than 1 s
SEND_HWM = 1000  # messages queued for one peer that does not read; then the send fails
RECEIVE_HWM = 10_000
CALL_EVENTS = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED

_FINALIZE = phase_of(Finalize())  # answered when the old set is closed; nobody waits that long

OnMessage = Callable[[bytes, HookMessage], None]
OnEnd = Callable[[Answer | None, str], None]  # the answer, or None and why there will be none; must not raise
WaitReadable = Callable[[int], Awaitable[None]]


def _readable(sock: "zmq.Socket[bytes]") -> bool:
    return bool(int(sock.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


class LinkRefused(OSError):
    """The socket of the ranks cannot be bound; the text says why."""

    def __str__(self) -> str:
        return str(self.strerror)


class SessionLost(Exception):
    """The rank behind a session is gone, or its queue is full; the call's fate is unknown."""


class _Waiter:
    """One outstanding call."""

    __slots__ = ("ended", "n", "phase", "session")

    def __init__(self, session: str, n: int, phase: str, ended: OnEnd) -> None:
        self.session, self.n, self.phase, self.ended = session, n, phase, ended


class HookLink:
    """Sends to sessions, delivers what they say. ``on_message`` gets everything but answers, and must not block."""

    def __init__(
        self,
        counters: Counters,
        *,
        wait_readable: WaitReadable = trio.lowlevel.wait_readable,
        faults: Faults = OFF,
    ) -> None:
        self.counters, self._faults = counters, faults
        self.on_message: OnMessage = lambda _peer, _message: None
        self.on_answer: Callable[[bytes, Answer], None] = lambda _peer, _answer: None
        self.on_disconnect: Callable[[], None] = lambda: None
        self._wait_readable = wait_readable
        self._peers: dict[str, bytes] = {}
        self._waiters: dict[int, _Waiter] = {}
        self._ids = itertools.count(1)
        self._socket: zmq.Socket[bytes] | None = None
        self._taken = 0  # messages since the pump began to wait
        self._token: trio.lowlevel.TrioToken | None = None
        self._bursts = 0  # open ``burst`` blocks
        self._drain_due = False  # ``_drain_soon`` is on its way

    # ---- lifetime

    async def serve(
        self,
        path: Path,
        *,
        mode: int = 0o600,
        allow_uids: frozenset[int] = frozenset(),
        task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Bind ``ipc://path`` and pump until cancelled. Reports the endpoint once bound.

        Raises:
            OSError: the path cannot be bound.
        """
        with self._bound(path, mode, allow_uids) as (sock, monitor):
            self._socket, self._token = sock, trio.lowlevel.current_trio_token()
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._pump, sock)
                    nursery.start_soon(self._watch_monitor, monitor)
                    task_status.started(f"ipc://{path}")
            finally:
                self._socket = None
                for session in {w.session for w in self._waiters.values()}:
                    self.fail(session, "the link is closing")

    @contextmanager
    def _bound(
        self, path: Path, mode: int, allow_uids: frozenset[int]
    ) -> Iterator[tuple["zmq.Socket[bytes]", "zmq.Socket[bytes]"]]:
        context = zmq.Context(io_threads=1)
        sock: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        try:
            for option, value in (
                (zmq.LINGER, 0),
                (zmq.SNDHWM, SEND_HWM),
                (zmq.RCVHWM, RECEIVE_HWM),
                (zmq.MAXMSGSIZE, MAX_LINK_BYTES),
                (zmq.ROUTER_MANDATORY, 1),
                (zmq.HANDSHAKE_IVL, 5000),
            ):
                sock.setsockopt(option, value)
            for uid in sorted(allow_uids):
                sock.setsockopt(zmq.IPC_FILTER_UID, uid)
            monitor = sock.get_monitor_socket(CALL_EVENTS)
            monitor.setsockopt(zmq.LINGER, 0)
            umask = os.umask(0o177)  # no moment with a wider mode; nothing else runs between these lines
            try:
                sock.bind(f"ipc://{path}")
            except zmq.ZMQError as exc:
                raise LinkRefused(exc.errno, f"cannot bind {path}: {os.strerror(exc.errno or 0)}") from exc
            finally:
                os.umask(umask)
            path.chmod(mode)
            yield sock, monitor
        finally:
            sock.disable_monitor()
            sock.close(linger=0)
            context.destroy(linger=0)
            with suppress(OSError):
                path.unlink()

    # ---- receiving

    async def _pump(self, sock: "zmq.Socket[bytes]") -> None:
        fd = int(sock.fd)
        while True:
            if self._drain() >= DRAIN_MAX:
                await trio.lowlevel.checkpoint()
                continue
            self._taken = 0
            with trio.move_on_after(HEAL_S) as scope:
                await self._wait_readable(fd)
            # Under load the callbacks after sends take everything and leave the pump no edge: that is no miss.
            if scope.cancelled_caught and not self._taken and _readable(sock):
                self.counters.missed_wakeups += 1

    def _drain(self) -> int:
        """Deliver what has arrived, at most ``DRAIN_MAX`` messages; returns how many. Never raises."""
        sock = self._socket
        taken = 0
        while sock is not None and taken < DRAIN_MAX:
            try:
                parts = sock.recv_multipart(zmq.DONTWAIT)
            except zmq.ZMQError:  # Again: the queue is empty and the edge is armed; others: the socket closes
                break
            taken += 1
            self._taken += 1
            self._deliver(parts)
        return taken

    def _drain_soon(self) -> None:
        self._drain_due = False
        if self._drain() >= DRAIN_MAX:
            self._want_drain()

    def _want_drain(self) -> None:
        if not self._drain_due and self._token is not None:
            self._drain_due = True  # asked for once: each request is a system call that wakes the loop
            self._token.run_sync_soon(self._drain_soon)

    def _look(self) -> None:
        """The sends ran libzmq's command queue and may have eaten the edge that the pump waits for."""
        sock = self._socket
        if sock is not None and not sock.closed and not self._drain_due and _readable(sock):
            self._want_drain()

    def _deliver(self, parts: list[bytes]) -> None:
        if len(parts) != 2:
            self.counters.malformed += 1
            return
        peer, frame = parts
        try:
            message = decode_from_hook(frame)
        except (msgspec.MsgspecError, HicacheError, RecursionError, UnicodeDecodeError):
            self.counters.malformed += 1
            return
        self.counters.link_received += 1
        if isinstance(message, Answer):
            self._answered(peer, message)
        else:
            self.on_message(peer, message)

    def _answered(self, peer: bytes, answer: Answer) -> None:
        self._faults.hit(answer.phase, "recv")
        waiter = self._waiters.get(answer.call)
        if waiter is None or (waiter.session, waiter.n, waiter.phase) != (answer.session, answer.n, answer.phase):
            if answer.phase == _FINALIZE and answer.session in self._peers:
                self.counters.late_finalize += 1
            else:
                self.counters.stale_replies += 1
            return
        del self._waiters[answer.call]
        self._peers[answer.session] = peer  # a reconnected DEALER has another routing id, and the same session
        self.on_answer(peer, answer)
        waiter.ended(answer, "")

    async def _watch_monitor(self, monitor: "zmq.Socket[bytes]") -> None:
        fd = int(monitor.fd)
        while True:
            seen = 0
            with suppress(zmq.ZMQError):
                while seen < DRAIN_MAX:
                    monitor.recv_multipart(zmq.DONTWAIT)
                    seen += 1
            if seen:
                self.on_disconnect()
                await trio.lowlevel.checkpoint()
                continue
            with trio.move_on_after(HEAL_S):
                await trio.lowlevel.wait_readable(fd)

    # ---- sending

    def route(self, session: str, peer: bytes) -> None:
        """Messages for ``session`` go to ``peer`` from now on."""
        self._peers[session] = peer

    def forget(self, session: str, why: str) -> None:
        """Drop a session's route and fail its waiters."""
        self._peers.pop(session, None)
        self.fail(session, why)

    def fail(self, session: str, why: str) -> None:
        """Fail all waiters of ``session`` at once."""
        for call, waiter in [(c, w) for c, w in self._waiters.items() if w.session == session]:
            if self._waiters.pop(call, None) is not None:
                waiter.ended(None, why)

    def send(self, peer: bytes, message: SidecarMessage) -> None:
        """Queue one message for a peer; never blocks.

        Raises:
            SessionLost: the peer is gone, or does not read (``SEND_HWM`` messages wait for it).
        """
        sock = self._socket
        if sock is None:
            raise SessionLost("the link is closed")
        try:
            sock.send_multipart([peer, encode(message)], zmq.DONTWAIT)
        except zmq.Again as exc:
            self.counters.send_failures += 1
            raise SessionLost("it does not read its messages") from exc
        except zmq.ZMQError as exc:  # EHOSTUNREACH
            self.counters.send_failures += 1
            raise SessionLost("its connection is gone") from exc
        finally:
            if not self._bursts:
                self._look()
        self.counters.link_sent += 1

    @contextmanager
    def burst(self) -> Iterator[None]:
        """Many sends and no ``await``: one look at EVENTS after the last is enough (rule 1)."""
        self._bursts += 1
        try:
            yield
        finally:
            self._bursts -= 1
            if not self._bursts:
                self._look()

    def reachable(self, session: str, probe: SidecarMessage) -> bool:
        """Whether the session's peer still has a connection; ``probe`` is sent to find out."""
        peer = self._peers.get(session)
        if peer is None:
            return False
        try:
            self.send(peer, probe)
        except SessionLost as exc:
            return isinstance(exc.__cause__, zmq.Again)  # a full queue is still a connection
        return True

    def post(self, session: str, n: int, body: CallBody, ended: OnEnd) -> int:
        """Ask one rank and return at once, with the call's number for ``drop``.

        Args:
            n: the operation; 0 for stateless questions.
            ended: called once, later, with the answer, or without one when the rank left; never after ``drop``.

        Raises:
            SessionLost: the rank left, or cannot be reached; ``ended`` is not called.
        """
        peer = self._peers.get(session)
        if peer is None:
            raise SessionLost("it is not connected")
        call, phase = next(self._ids), phase_of(body)
        self._faults.hit(phase, "before_send")
        self.send(peer, Call(session=session, n=n, phase=phase, call=call, body=body))
        self._faults.hit(phase, "after_send")
        self._waiters[call] = _Waiter(session, n, phase, ended)
        return call

    def drop(self, call: int) -> None:
        """Nobody waits for this call any more; an answer that still comes is counted. Idempotent."""
        self._waiters.pop(call, None)

    async def call(self, session: str, n: int, body: CallBody, deadline: float) -> Answer:
        """Ask one rank and wait for its answer until ``deadline`` (trio time). ``n`` as in ``post``.

        Raises:
            SessionLost: the rank left, or cannot be reached.
            trio.TooSlowError: no answer by the deadline; a later one is dropped and counted.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        done = trio.Event()
        result: list[tuple[Answer | None, str]] = []

        def ended(answer: Answer | None, why: str) -> None:
            result.append((answer, why))
            done.set()

        call = self.post(session, n, body, ended)
        try:
            with trio.move_on_at(deadline):
                await done.wait()
        finally:
            self.drop(call)
        if not result:
            raise trio.TooSlowError
        answer, why = result[0]
        if answer is None:
            raise SessionLost(why)
        return answer

    @property
    def waiting(self) -> int:
        """Number of outstanding calls."""
        return len(self._waiters)

    def describe(self) -> dict[str, Any]:
        """Facts for logs."""
        return {"sessions": len(self._peers), "waiting": len(self._waiters)}
