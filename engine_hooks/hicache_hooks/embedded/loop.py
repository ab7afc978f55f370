"""The scheduler thread's loop: messages in, a pass, answers out, sleep.

It never spins: when a pass did nothing it sleeps in ``poll`` on the front's socket and an eventfd, which releases the
interpreter to the transfer threads (F4). ``wake`` may be called from any thread and from a signal handler.
"""

import contextlib
import logging
import math
import os
import time
from typing import assert_never

import msgspec
import zmq

from hicache_hooks.embedded import messages
from hicache_hooks.embedded.gaps import Gaps
from hicache_hooks.embedded.scheduler import Scheduler

log = logging.getLogger(__name__)

MESSAGES_PER_PASS = 256  # bounds how long a flood of messages keeps passes away
DRAIN_SHARE = 0.5  # of the stop budget: how long running requests may still take; the rest is for detaching


class Waker:
    """An eventfd: one wake-up, however often it was asked for."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def wake(self) -> None:
        """*any thread*: make the loop's poll return. After ``close`` it does nothing."""
        with contextlib.suppress(BlockingIOError, OSError):
            os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        """Forget the wake-ups so far."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def close(self) -> None:
        """Release the descriptor."""
        fd, self.fd = self.fd, -1
        os.close(fd)


class FrontLink:
    """The scheduler's end of the link to the HTTP front. One owner: the scheduler thread (F104)."""

    def __init__(self, endpoint: str, rank: int, epoch: int) -> None:
        """
        Raises:
            zmq.ZMQError: not an endpoint.
        """
        self._context = zmq.Context()
        self.socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.ROUTING_ID, messages.routing_id(rank, epoch))
        self.socket.setsockopt(zmq.LINGER, 500)  # ms: the last answers; termination is bounded (F103)
        self.socket.connect(endpoint)

    def send(self, message: messages.RankMessage) -> None:
        """Never blocks: an answer that cannot be queued belongs to a front that is gone."""
        try:
            self.socket.send(messages.encode(message), zmq.DONTWAIT)
        except zmq.Again:
            log.error("the HTTP front does not take answers; one %s is lost", type(message).__name__)

    def receive(self) -> messages.FrontMessage | None:
        """The next message, None when there is none now. A malformed one is dropped."""
        while True:
            try:
                frame = self.socket.recv(zmq.DONTWAIT)
            except zmq.Again:
                return None
            try:
                return messages.decode_from_front(frame)
            except msgspec.MsgspecError:
                log.exception("dropped a message from the front")

    def close(self) -> None:
        """Close the socket and end its context."""
        self.socket.close()
        self._context.term()


class Loop:
    """Runs a scheduler until it is told to stop."""

    def __init__(self, scheduler: Scheduler, link: FrontLink, waker: Waker, gaps: Gaps | None = None) -> None:
        self.stop_by: float | None = None  # monotonic; set once stopping
        self._gaps = gaps or Gaps()
        self._scheduler = scheduler
        self._link = link
        self._waker = waker
        self._poller = zmq.Poller()
        self._poller.register(link.socket, zmq.POLLIN)
        self._poller.register(waker.fd, zmq.POLLIN)

    def stop(self, timeout_s: float) -> None:
        """Close admission and end within ``timeout_s``; also from a signal handler. The first call counts."""
        if self.stop_by is None:
            self.stop_by = time.monotonic() + timeout_s
            self._waker.wake()

    def run(self) -> None:
        """Until stopped and drained; requests that did not end in time are failed."""
        scheduler = self._scheduler
        drain_by: float | None = None
        while True:
            self._gaps.begin()
            self._receive()
            if self.stop_by is not None:
                if drain_by is None:
                    drain_by = time.monotonic() + DRAIN_SHARE * (self.stop_by - time.monotonic())
                    scheduler.close("the engine is stopping")
                if not scheduler.busy:
                    return
                if time.monotonic() >= drain_by:
                    scheduler.fail_all()
                    return
            did = scheduler.run_pass()
            self._gaps.end()
            if not did:
                self._sleep(scheduler.sleep_s())

    def _receive(self) -> None:
        scheduler = self._scheduler
        for _ in range(MESSAGES_PER_PASS):
            match message := self._link.receive():
                case None:
                    return
                case messages.Submit():
                    scheduler.submit(message)
                case messages.Cancel():
                    scheduler.cancel(message.rid)
                case messages.Flush():
                    scheduler.flush(message)
                case messages.Stop():
                    self.stop(message.timeout_s)
                case _:
                    assert_never(message)

    def _sleep(self, seconds: float) -> None:
        self._poller.poll(math.ceil(seconds * 1000))
        self._waker.clear()
