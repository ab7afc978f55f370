"""The link to the sidecar: one thread that owns the ZMQ socket of one rank.

Theory of operation
===================

The thread waits for four things at once and for nothing else, never without a limit: the socket, its monitor
(a lost connection), an eventfd by which other threads say that they left something in the outbox, and the next
point in time (heartbeat, hello, a lease's end). It never polls in a loop and never calls into the scheduler; it
leaves messages in the scheduler's inbox and wakes it.

* A session starts with a hello under a fresh random id, sent when the socket becomes writable, which with
  IMMEDIATE=1 means: when a peer is there. So nothing old waits in a queue for a new sidecar (rule 5).
* libzmq gives up for good on a peer that breaks its protocol, an oversized message for one. So every lost
  connection gets a new socket, and one that finds no peer for a while is replaced too (F102).
* No welcome in time, ``rehello``, ``refused`` or a lost connection start a new session, with a back-off that a
  session that lived resets. A sidecar that is away for good costs a reconnect attempt per second, no more.
* A message that does not decode, or is of another session, is dropped and counted.
* An answer is sent in the session of its call or not at all. Its report is read when it is sent.
* A send that would block is dropped and counted: the coordinator repeats what matters.
* After a fork the child has no agent: methods called there do nothing.
"""

import logging
import os
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import zmq

from hicache_hooks.agent_socket import AgentSocket
from hicache_hooks.agent_wake import Wake
from hicache_hooks.faults import FaultError, Faults, LinkCut
from hicache_hooks.frames import frame_of
from hicache_hooks.helpers import Postpone, never
from hicache_hooks.leases import Clock, monotonic
from hicache_hooks.session import Session
from hicache_proto.errors import HicacheError
from hicache_proto.hooklink import (
    Answer,
    Call,
    Goodbye,
    Heartbeat,
    HookMessage,
    Notice,
    RankHello,
    Refused,
    Rehello,
    Welcome,
    decode_from_sidecar,
    phase_of,
)
from hicache_proto.model import Plan, RankReport

log = logging.getLogger(__name__)

# As plain numbers: the flags' own arithmetic costs more than the poll.
POLLIN, POLLOUT, EVENTS = int(zmq.POLLIN), int(zmq.POLLOUT), zmq.EVENTS
TROUBLE_PAUSE_S = 0.2  # after a defect of ours, so that it cannot spin
DRAIN_BATCH = 64  # messages per turn, so that heartbeats are not starved
GOODBYE_LINGER_MS = 200  # the only message that may outlive its socket

Outgoing = tuple[str, Callable[[], HookMessage], Call | None]  # session, message made at send time, its call


class LinkAgent:
    """The agent of one rank. ``start`` once, ``stop`` once; the other methods may be called from any thread."""

    def __init__(
        self,
        endpoint: str,
        *,
        hello: Callable[[str], RankHello],
        report: Callable[[], RankReport],
        on_call: Callable[[Call], None],
        deadline: Callable[[], float | None],
        on_deadline: Callable[[], None],
        clock: Clock = monotonic,
        faults: Faults | None = None,
        context: "zmq.Context[zmq.Socket[bytes]] | None" = None,
        postpone: Postpone = never,
    ) -> None:
        """Args:
        hello: makes the hello for a session id; report: the rank's state. Agent thread; must not raise.
        on_call: takes a call of the present session. Agent thread.
        deadline: when a lease ends next, on ``clock``; on_deadline: called once that has passed.
        context: shared by many agents of one process (scale tests); else the agent has its own.
        postpone: may keep the agent's wake-ups for a moment (``helpers.Postpone``).
        """
        self._endpoint = endpoint
        self._hello = hello
        self._report = report
        self._on_call = on_call
        self._deadline = deadline
        self._on_deadline = on_deadline
        self._clock = clock
        self._faults = faults or Faults()
        self._context = context
        self._pid = os.getpid()
        self._out: deque[Outgoing] = deque(maxlen=4096)
        self._jobs: deque[Callable[[], None]] = deque()
        self._beat_now = False
        self._stopping = False
        self._goodbye = ""
        self._thread: threading.Thread | None = None
        self.counts: Counter[str] = Counter()
        self._wake = Wake(postpone, self.counts)
        # Agent thread only, from here on:
        self._session = Session()
        self._last_refusal = ""

    # ------------------------------------------------------------------ any thread

    def start(self) -> None:
        """Start the thread. Raises RuntimeError when no thread can be had."""
        self._thread = threading.Thread(target=self._run, name="hicache-agent", daemon=True)
        self._thread.start()

    def stop(self, reason: str = "", timeout_s: float = 2.0) -> bool:
        """Say goodbye and end the thread; False when it did not end in time. Idempotent."""
        if os.getpid() != self._pid or self._thread is None:
            return True
        self._goodbye, self._stopping = reason, True
        self._wake.now()
        self._thread.join(timeout_s)
        self._run_jobs()
        return not self._thread.is_alive()

    @property
    def session(self) -> str:
        """The present session id; empty before the first hello."""
        return self._session.id

    @property
    def connected(self) -> bool:
        """True while the sidecar has welcomed this session."""
        return self._session.welcomed

    def answer(
        self,
        call: Call,
        *,
        ok: bool,
        error: HicacheError | None = None,
        plan: Plan | None = None,
        data: dict[str, Any] | None = None,
        stall_us: int | None = None,
    ) -> None:
        """Queue an answer to ``call``."""
        body = None if error is None else error.body()

        def make() -> Answer:
            return Answer(
                call.session, call.n, call.phase, call.call, ok, self._report(), body, plan, data, stall_us
            )  # fmt: skip

        self._post(call.session, make, call)

    def notice(self, kind: str, detail: str = "") -> None:
        """Queue a notice in the present session."""
        session = self._session.id
        self._post(session, lambda: Notice(session=session, kind=kind, report=self._report(), detail=detail), None)

    def changed(self) -> None:
        """The rank's state changed: heartbeat soon, and look at the deadline again now."""
        self._beat_now = True
        self._wake.soon()

    def run_soon(self, job: Callable[[], None]) -> None:
        """Run a short job on the agent thread: starting a thread, whose wait for the interpreter lock would stall
        the scheduler by milliseconds. Without an agent thread it runs here and now."""
        self._jobs.append(job)
        if self._thread is None or not self._thread.is_alive() or os.getpid() != self._pid:
            self._run_jobs()
        else:
            self._wake.soon()

    def _run_jobs(self) -> None:
        while self._jobs:
            try:
                job = self._jobs.popleft()
            except IndexError:  # another thread took it, while the agent was stopped
                return
            try:
                job()
            except LinkCut:
                raise  # a test cuts the link from outside
            except Exception:
                log.exception("a job failed")

    def _post(self, session: str, make: Callable[[], HookMessage], call: Call | None) -> None:
        self._out.append((session, make, call))
        self._wake.soon()

    # ------------------------------------------------------------------ agent thread

    def _run(self) -> None:
        context = self._context or zmq.Context(io_threads=1)
        try:
            while not self._stopping:
                try:
                    self._connected_life(context)
                except zmq.ZMQError as error:
                    if self._stopping or error.errno == zmq.ETERM:
                        break
                    self._trouble("socket", error)
                except Exception as error:  # a defect of ours must not end the link for good
                    self._trouble("agent", error)
        finally:
            if self._context is None:
                context.term()  # every socket is closed with a bounded linger: this cannot hang (F103)
            self._wake.close()

    def _trouble(self, what: str, error: Exception) -> None:
        self.counts["troubles"] += 1
        log.warning("link to the sidecar, %s: %s: %s; starting again", what, type(error).__name__, error)
        with suppress(LinkCut):
            self._run_jobs()  # without a socket too: a closer may be what frees descriptors for it
        time.sleep(TROUBLE_PAUSE_S)

    def _connected_life(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        """One socket's life: until told to stop, or until the connection is lost, which the next socket mends."""
        socket = AgentSocket(context)
        try:
            monitor = socket.connect(self._endpoint)
            if self._session.said_hello:
                self._session.back_off(self._clock())  # not at all after a session that lived
            else:
                self._session.renew(self._clock())
            self._turns(socket, socket.dealer, monitor)
        except LinkCut as cut:
            self.counts["cuts"] += 1
            log.warning("link cut by fault point %s", cut)
        finally:
            socket.close(GOODBYE_LINGER_MS if self._stopping else 0)

    def _turns(self, both: AgentSocket, socket: "zmq.Socket[bytes]", monitor: "zmq.Socket[bytes]") -> None:
        poller = zmq.Poller()
        poller.register(monitor, POLLIN)
        wake_fd = self._wake.fd
        poller.register(wake_fd, POLLIN)
        polled_for = 0
        while True:
            now = self._clock()
            hello_due = self._session.hello_due(now)
            wanted = POLLIN | POLLOUT if hello_due else POLLIN
            if wanted != polled_for:
                poller.register(socket, wanted)
                polled_for = wanted
            ready = dict(poller.poll(self._session.timeout_ms(now, self._deadline())))
            if wake_fd in ready:
                self._wake.seen()
            self._run_jobs()
            now = self._clock()
            if monitor in ready and both.disconnected() and self._session.said_hello:
                self.counts["disconnects"] += 1
                return
            can = ready.get(socket, 0)
            if can & POLLIN:
                self._receive(socket)
            if self._stopping:
                self._flush(socket, now)
                if self._session.said_hello:
                    self._send(socket, Goodbye(session=self._session.id, reason=self._goodbye))
                return
            if self._session.unheard(now):
                return
            if hello_due and self._session.hello_due(now) and can & POLLOUT:
                self._say_hello(socket, now)
            self._flush(socket, now)
            self._beat(socket, now)
            if self._session.deadline_due(now, self._deadline()):
                self._on_deadline()
            if self._session.unwelcome(now):
                self.counts["no_welcome"] += 1
                self._session.back_off(now)

    # -- sessions

    def _say_hello(self, socket: "zmq.Socket[bytes]", now: float) -> None:
        self._session.id = secrets.token_hex(8)
        if self._send(socket, self._hello(self._session.id)):
            self._session.hello_sent(now)
            self.counts["hellos"] += 1

    # -- receiving

    def _receive(self, socket: "zmq.Socket[bytes]") -> None:
        for count in range(DRAIN_BATCH):
            if count and not int(socket.getsockopt(EVENTS)) & POLLIN:
                return
            try:
                frames = socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            try:
                if len(frames) != 1:
                    raise msgspec.DecodeError(f"{len(frames)} frames")
                message = decode_from_sidecar(frames[0])
            except (msgspec.MsgspecError, HicacheError, UnicodeDecodeError, RecursionError) as error:
                self.counts["malformed"] += 1
                log.debug("dropped a message: %s", error)
                continue
            if message.session != self._session.id or not self._session.said_hello:
                self.counts["foreign"] += 1
                continue
            self._on_message(message)

    def _on_message(self, message: Welcome | Refused | Rehello | Call) -> None:
        now = self._clock()
        match message:
            case Welcome(heartbeat_s=seconds):
                self._session.welcome(now, seconds)
                self._last_refusal = ""
            case Refused(error=error, retry_s=seconds):
                self.counts["refused"] += 1
                if error.message != self._last_refusal:
                    log.error("the sidecar refuses this rank: %s", error.message)
                    self._last_refusal = error.message
                self._session.refused(now, seconds)
            case Rehello():
                self.counts["rehellos"] += 1
                self._session.back_off(now)
            case Call():
                self._take(message)

    def _take(self, call: Call) -> None:
        if call.phase != phase_of(call.body) or call.n < 0:
            self.counts["malformed"] += 1
            return
        try:
            self._faults.hit(call.phase, "recv")
        except FaultError as error:
            self.counts["faults"] += 1
            log.warning("dropped a call: %s", error)
            return
        self._on_call(call)

    # -- sending

    def _flush(self, socket: "zmq.Socket[bytes]", now: float) -> None:
        while self._out:
            session, make, call = self._out.popleft()
            if session != self._session.id or not self._session.said_hello:
                self.counts["stale_answers"] += 1
                continue
            try:
                if call is not None:
                    self._faults.hit(call.phase, "before_send")
                self._beat_now = False  # cleared before the report is read: the answer says what a beat would
                if self._send(socket, make()):
                    self._session.reported(now)
                else:
                    self._beat_now = True
                if call is not None:
                    self._faults.hit(call.phase, "after_send")
            except FaultError as error:
                self.counts["faults"] += 1
                log.warning("answer: %s", error)

    def _beat(self, socket: "zmq.Socket[bytes]", now: float) -> None:
        if self._beat_now:
            self._session.changed(now)
        if not self._session.beat_due(now):
            return
        self._beat_now = False  # before the report is read: a later change beats again
        self._send(socket, Heartbeat(session=self._session.id, report=self._report()))

    def _send(self, socket: "zmq.Socket[bytes]", message: HookMessage) -> bool:
        frame, problem = frame_of(message)
        if problem:
            self.counts["unsendable"] += 1
            log.error("cannot send a %s: %s", type(message).__name__, problem)
        if not frame:
            return False
        try:
            socket.send(frame, zmq.DONTWAIT)
        except zmq.Again:
            self.counts["dropped_sends"] += 1
            return False
        return True
