"""Shorter turns of Python's interpreter lock while a backend is built.

A thread that wants the lock asks the holder for it only after the interpreter's switch interval, 5 ms by default.
While a backend is built, the scheduler thread gives the lock away at each of its own waits (a poll, a tensor
operation) and would pay up to 5 ms to get it back, many times in one pass: beside a constructor that computes in
Python a decode step on the test rig took 108 ms in the median, and 65 ms with short turns. The engine's own value is
put back when PREPARE is over: in the steps that follow, the long interval is in the scheduler thread's own favour.
"""

import sys

SHORT_S = 0.0002  # two threads that take turns this fast lose a few per cent, for as long as PREPARE lasts


_ROUNDING_S = 5e-7  # Python cuts to whole microseconds: what was read and is set again would shrink each time


class SwitchInterval:
    """The switch interval of this process. One writer: the scheduler thread."""

    __slots__ = ("_usual_s",)

    def __init__(self) -> None:
        self._usual_s: float | None = None  # None: nothing is changed

    def follow(self, busy: bool) -> None:
        """Short while ``busy``; what it was before, otherwise."""
        if busy == (self._usual_s is not None):
            return
        if busy:
            self._usual_s = sys.getswitchinterval()
            sys.setswitchinterval(min(SHORT_S, self._usual_s))
        elif self._usual_s is not None:
            sys.setswitchinterval(self._usual_s + _ROUNDING_S)
            self._usual_s = None
