"""Ends the sleep of a scheduler that runs with ``--sleep-on-idle``, from any thread.

The engine then sleeps in a ZMQ poller for up to a second; an eventfd of ours in that poller ends it within
milliseconds. A spinning scheduler (the default) needs none of this, and a scheduler whose sleeper has no poller
(the Rust server's) acts within its own second.

Only the leader of a world sleeps there; the other ranks wait in its broadcast. So that a rank that is not the leader
(its builder ended, its lease is over) is not kept waiting, the leader is woken every ``PULSE_S`` while an operation
is open, and for a while after it: the last answers come from ranks that close a set. Where only another rank's slow
work is waited for, the pauses double up to ``PATIENT_S``: each pass of an idle world is a round of collectives.
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
PATIENT_S = 0.3  # a backend that takes seconds to build is seen a tenth later
AFTERGLOW_S = 5.0  # longer than a set may take to close (closer.CLOSE_S)


class SleepSeam:
    """The engine's poller, telling when the scheduler goes to sleep and that it slept."""

    def __init__(self, poller: Any, before: Callable[[], None], after: Callable[[], None]) -> None:
        self._poller, self._before, self._after = poller, before, after

    def poll(self, timeout: Any = None) -> Any:
        """The sleep."""
        self._before()
        try:
            return self._poller.poll(timeout)
        finally:
            self._after()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._poller, name)


class Waker:
    """One eventfd in the engine's poller. Without a poller every method is a no-op."""

    def __init__(self, sleeper: Any, before_sleep: Callable[[], None] = lambda: None) -> None:
        """``sleeper``: the scheduler's ``idle_sleeper``, or None. ``before_sleep``: its thread; must not raise."""
        poller = getattr(sleeper, "poller", None)
        self.sleeps = poller is not None
        self.signalled = False  # a wake-up that ``clear`` has not forgotten yet
        self.slept = False  # the scheduler slept, and has not pulled since
        self._fd = -1
        if poller is not None:
            import zmq

            self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            poller.register(self._fd, zmq.POLLIN)
            sleeper.poller = SleepSeam(poller, before_sleep, self._woke)

    def _woke(self) -> None:
        self.slept = True

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
        """*scheduler*: forget the wake-ups so far, and the sleep; two attribute tests when there was none."""
        self.slept = False
        if self.signalled:
            self.signalled = False
            with contextlib.suppress(OSError):
                os.eventfd_read(self._fd)


class Pulse:
    """Wakes the leader again and again while ``wanted`` says so; a thread that waits for ``kick`` otherwise."""

    def __init__(
        self,
        waker: Waker,
        wanted: Callable[[], bool],
        afterglow_s: float = 0.0,
        patient: Callable[[], bool] = lambda: False,
    ) -> None:
        """Both questions are asked on the pulse's thread.

        Args:
            afterglow_s: how long to go on, ever slower, after ``wanted`` said no.
            patient: True while nothing is waited for but slow work of another rank.
        """
        self._waker = waker
        self._wanted = wanted
        self._patient = patient
        self._afterglow_s = afterglow_s
        self._kicked = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hicache-pulse", daemon=True)

    def start(self) -> None:
        """Only where the scheduler sleeps in a poller."""
        if self._waker.sleeps:
            self._thread.start()

    def kick(self) -> None:
        """*any thread*: something was posted, and the scheduler was woken for it."""
        self._kicked.set()

    def _run(self) -> None:
        while True:
            self._kicked.wait()
            pause_s, until = PULSE_S, 0.0
            while True:
                if self._kicked.wait(pause_s):
                    self._kicked.clear()
                    pause_s, until = PULSE_S, time.monotonic() + self._afterglow_s
                    self._kicked.wait(pause_s)  # the kick's own wake-up is out already
                wanted = self._ask(self._wanted)
                if wanted:
                    until = time.monotonic() + self._afterglow_s
                elif time.monotonic() >= until:
                    break
                self._waker.wake()
                slow = not wanted or self._ask(self._patient)
                pause_s = min(2 * pause_s, PATIENT_S) if slow else PULSE_S

    def _ask(self, question: Callable[[], bool]) -> bool:
        try:
            return question()
        except Exception:
            log.exception("the pulse could not look at the operation")
            return False
