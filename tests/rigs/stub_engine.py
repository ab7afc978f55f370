"""STUB(n): a scriptable engine with n hook ranks over real ZMQ DEALERs, for the sidecar's tests.

One thread serves all ranks (``stub_ranks.StubRank``). Nothing here sleeps; a test waits on what ranks say or
on ``wait_for``.

    with StubEngine(endpoint, dp=2) as stub:
        stub.ranks[1].set(counters={"grammar_queue": 3})
"""

import contextlib
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable
from types import TracebackType

import zmq
from tests.rigs.stub_link import WAIT_S
from tests.rigs.stub_ranks import StubRank

from hicache_proto.hooklink import (
    Goodbye,
)
from hicache_proto.model import (
    RankIdentity,
)
from hicache_proto.transaction import Ended, RankPhase
from hicache_proto.version import PROTOCOL_VERSION


class StubEngine:
    """All ranks of one engine launch, on one thread. ``restart`` makes the next launch."""

    def __init__(
        self,
        endpoint: str,
        *,
        dp: int = 1,
        pp: int = 1,
        tp: int = 1,
        engine_id: str = "stub",
        epoch: int = 1,
        frontends: int = 0,
        absent: tuple[int, ...] = (),
        protocol: int = PROTOCOL_VERSION,
        before: Callable[["StubEngine"], None] | None = None,
    ) -> None:
        self.endpoint, self.engine_id, self.epoch, self.protocol = endpoint, engine_id, epoch, protocol
        self.incarnation = secrets.token_hex(4)
        self.pid = os.getpid()
        self.context = zmq.Context()
        identities = [
            RankIdentity(d, p, t, dp, pp, tp) for d in range(dp) for p in range(pp) for t in range(tp)
        ]  # fmt: skip
        self.ranks = {i.rank: StubRank(self, i) for i in identities if i.rank not in absent}
        self.frontends = [StubRank(self, RankIdentity(), "frontend") for _ in range(frontends)]
        self._todo: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._news = threading.Condition()
        self._stop = False
        self._failed: BaseException | None = None
        self._wake_address = f"inproc://{secrets.token_hex(4)}"
        self._wake_in = self.context.socket(zmq.PAIR)
        self._wake_in.bind(self._wake_address)
        self._wake_lock = threading.Lock()
        self._wake_out = self.context.socket(zmq.PAIR)
        self._wake_out.connect(self._wake_address)
        if before is not None:
            before(self)
        self._thread = threading.Thread(target=self._run, name="stub-engine")

    def __enter__(self) -> "StubEngine":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def do(self, work: Callable[[], None]) -> None:
        """Run ``work`` in the stub's thread."""
        self._todo.put(work)
        with self._wake_lock, contextlib.suppress(zmq.Again):
            # Not waited for: once the thread has ended there is no peer, and a PAIR without one blocks for ever.
            self._wake_out.send(b"", zmq.DONTWAIT)

    def stop(self) -> None:
        """End the thread and free the sockets; raises what broke the thread."""
        if self._stop:
            return
        self._stop = True  # the thread may see it before the wake-up, and end
        self.do(lambda: None)
        self._thread.join(WAIT_S)
        self._wake_out.close(linger=0)
        self.context.destroy(linger=0)
        if self._failed is not None:
            raise self._failed

    def kill(self, rank: int) -> None:
        """As SIGKILL of one rank's process."""
        done = threading.Event()
        self.do(lambda: (self.ranks[rank].close(), done.set())[1])
        done.wait(WAIT_S)

    def leave(self, rank: int, reason: str = "stopping") -> None:
        """One rank says goodbye and goes."""
        stub = self.ranks[rank]

        def go() -> None:
            stub.send(Goodbye(session=stub.session, reason=reason))
            stub.script.muted = True

        self.do(go)

    def replace(self, rank: int) -> StubRank:
        """A new process for one rank of this launch: fresh, epoch + 1."""
        old = self.ranks[rank]
        new = StubRank(self, old.identity)
        new.epoch = old.epoch + 1
        new.pid = old.pid + 1
        new.script.counters = dict(old.script.counters)

        def go() -> None:
            old.close()
            self.ranks[rank] = new
            new.connect()

        self.do(go)
        return new

    def wait_for(self, what: Callable[[], bool], within_s: float = WAIT_S) -> bool:
        """Block the calling thread until ``what()`` holds; looked at after everything that the stub does."""
        with self._news:
            return self._news.wait_for(what, within_s)

    @property
    def backends(self) -> dict[int, str | None]:
        """What each rank runs."""
        return {rank: stub.state.backend for rank, stub in self.ranks.items()}

    def settled(self) -> bool:
        """No rank is inside an operation."""
        return all(s.rec.phase in (RankPhase.NONE, RankPhase.QUARANTINED) for s in self.ranks.values())

    def ended(self, rank: int) -> Ended:
        """How the last operation ended on a rank."""
        return self.ranks[rank].rec.ended

    def _run(self) -> None:
        try:
            everyone = [*self.ranks.values(), *self.frontends]
            for stub in everyone:
                stub.connect()
            while not self._stop:
                self._turn()
        except BaseException as exc:
            self._failed = exc
        finally:
            for stub in [*self.ranks.values(), *self.frontends]:
                stub.close()
            self._wake_in.close(linger=0)

    def _turn(self) -> None:
        everyone = [s for s in [*self.ranks.values(), *self.frontends] if s.socket is not None]
        until = min((stub.tick() for stub in everyone), default=time.monotonic() + 1.0)
        poller = zmq.Poller()
        poller.register(self._wake_in, zmq.POLLIN)
        for stub in everyone:
            if stub.socket is not None:
                poller.register(stub.socket, zmq.POLLIN)
        wait_s = min(max(0.0, until - time.monotonic()), 1.0)
        ready = dict(poller.poll(int(wait_s * 1000) + 1))
        if self._wake_in in ready:
            self._wake_in.recv()
            while not self._todo.empty():
                self._todo.get()()
        for stub in everyone:
            if stub.socket is not None and stub.socket in ready:
                while True:
                    try:
                        frame = stub.socket.recv(zmq.DONTWAIT)
                    except zmq.ZMQError:
                        break
                    stub.take(frame)
                    if stub.socket is None:
                        break
        with self._news:
            self._news.notify_all()
