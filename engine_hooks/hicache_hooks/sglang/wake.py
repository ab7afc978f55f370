"""Ends the sleep of a scheduler that runs with ``--sleep-on-idle``, from any thread.

The engine then sleeps in a ZMQ poller for up to a second; an eventfd of ours in that poller ends it within
milliseconds. A spinning scheduler (the default) needs none of this, and a scheduler whose sleeper has no poller
(the Rust server's) acts within its own second.

Only the leader of a world sleeps there; the other ranks wait in its broadcast. So that a rank that is not the leader
(its builder ended, its lease is over) is not kept waiting, the leader is woken every ``PULSE_S`` while an operation
is open, and for a while after it: the last answers come from ranks that close a set.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)

PULSE_S = 0.02  # against waits of minutes (PREPARE) and of milliseconds (all the rest)
AFTERGLOW_S = 5.0  # longer than a set may take to close (closer.CLOSE_S)


class Waker:
    """One eventfd in the engine's poller. Without a poller every method is a no-op."""

    def __init__(self, sleeper: Any) -> None:
        """``sleeper``: the scheduler's ``idle_sleeper``, or None."""
        poller = getattr(sleeper, "poller", None)
        self.sleeps = poller is not None
        self.signalled = False  # a wake-up that ``clear`` has not forgotten yet
        self._fd = -1
        if poller is not None:
            import zmq

            self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            poller.register(self._fd, zmq.POLLIN)

    def wake(self) -> None:
        """*any thread*: the poll returns."""
        if self._fd < 0:
            return
        with contextlib.suppress(OSError):  # full: it is readable already
            os.eventfd_write(self._fd, 1)
        # After the write: a flag that came first could be cleared before the descriptor becomes readable, and the
        # poller would spin on it for good.
        self.signalled = True

    def clear(self) -> None:
        """*scheduler*: forget the wake-ups so far; one attribute test when there was none."""
        if self.signalled:
            self.signalled = False
            with contextlib.suppress(OSError):
                os.eventfd_read(self._fd)


class Pulse:
    """Wakes the leader again and again while ``wanted`` says so; a thread that waits for ``kick`` otherwise."""

    def __init__(self, waker: Waker, wanted: Callable[[], bool], afterglow_s: float = 0.0) -> None:
        """``wanted`` is read on the pulse's thread; ``afterglow_s``: how long to go on after it said no."""
        self._waker = waker
        self._wanted = wanted
        self._afterglow_s = afterglow_s
        self._kicked = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hicache-pulse", daemon=True)

    def start(self) -> None:
        """Only where the scheduler sleeps in a poller."""
        if self._waker.sleeps:
            self._thread.start()

    def kick(self) -> None:
        """*any thread*: something was posted."""
        self._kicked.set()

    def _run(self) -> None:
        while True:
            self._kicked.wait()
            self._kicked.clear()
            until = time.monotonic() + self._afterglow_s
            while self._look() or time.monotonic() < until:
                if self._look():
                    until = time.monotonic() + self._afterglow_s
                self._waker.wake()
                time.sleep(PULSE_S)

    def _look(self) -> bool:
        try:
            return self._wanted()
        except Exception:
            log.exception("the pulse could not look at the operation")
            return False
