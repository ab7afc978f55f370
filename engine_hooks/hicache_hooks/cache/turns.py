"""Turns at a store that wants few calls at a time (``Manifest.calls``).

A call that hangs must not keep the others out for ever, nor make each of them wait: who has waited for the limit takes
the turn of the call that has had one for longest. That one gives nothing back when it returns, so the number of turns
stays right.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

WAIT_S = 5.0  # the guard's own deadline of a call


class Turns:
    """``calls`` turns. Thread-safe."""

    def __init__(self, calls: int, wait_s: float = WAIT_S) -> None:
        """``calls`` below one: any number at a time."""
        self._bounded = calls > 0
        self._free = calls
        self._wait_s = wait_s
        self._changed = threading.Condition()
        self._taken: dict[object, None] = {}  # in the order in which they were taken

    @contextmanager
    def one(self) -> Iterator[None]:
        """Around a call. Waits ``wait_s`` at most."""
        if not self._bounded:
            yield
            return
        mine = object()
        with self._changed:
            if self._changed.wait_for(lambda: self._free > 0, self._wait_s):
                self._free -= 1
            else:
                del self._taken[next(iter(self._taken))]
            self._taken[mine] = None
        try:
            yield
        finally:
            with self._changed:
                if mine in self._taken:
                    del self._taken[mine]
                    self._free += 1
                    self._changed.notify()
