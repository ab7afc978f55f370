"""The eventfd by which other threads tell the agent that they left something for it."""

import os
import threading
from typing import TYPE_CHECKING

from hicache_hooks.helpers import Postpone

if TYPE_CHECKING:
    from collections import Counter


class Wake:
    """``soon`` and ``now`` from any thread, and again without effect until ``seen``; the rest is the agent thread's.

    In a forked child nobody is woken: the agent is the parent's.
    """

    def __init__(self, postpone: Postpone, counts: "Counter[str]") -> None:
        """``postpone`` may keep what ``soon`` tells; ``counts`` gets ``lost_signals``."""
        self._postpone = postpone
        self._counts = counts
        self._pid = os.getpid()
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._signalled = False  # a wake-up is on its way

    def soon(self) -> None:
        """Wake the agent, at a moment that suits the scheduler."""
        if not self._signalled and not self._postpone(self.now):
            self.now()

    def now(self) -> None:
        """Wake the agent."""
        if self._signalled or os.getpid() != self._pid:
            return  # each write is a system call that lets go of the interpreter, in the middle of a scheduler's step
        self._signalled = True
        with self._lock:  # the number of a closed descriptor may be somebody else's by now
            try:
                if self.fd >= 0:
                    os.eventfd_write(self.fd, 1)
            except OSError:  # full counter: it is readable already
                self._counts["lost_signals"] += 1

    def seen(self) -> None:
        """The descriptor was readable. Look into the queues after this: whoever finds it signalled is in them."""
        os.eventfd_read(self.fd)
        self._signalled = False

    def close(self) -> None:
        """Once, by the agent thread."""
        with self._lock:
            fd, self.fd = self.fd, -1
            os.close(fd)
