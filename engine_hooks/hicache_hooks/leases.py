"""Leases: how a hold or an operation ends by itself when nobody is left to end it (design.md, rules 2 and 3; F36).

A lease is armed with a duration that came over the wire and read with this process's monotonic clock; no time
ever crosses the link (rule 4). It is a number and a comparison: who looks at it is its owner's business. The
owner is the scheduler thread; the agent only wakes it when ``deadline`` has passed.
"""

import math
import time
from collections.abc import Callable

Clock = Callable[[], float]
monotonic: Clock = time.monotonic

MAX_LEASE_S = 3600.0  # no operation or drain needs more; a wrong unit must not close admission for days


def checked_s(seconds: float) -> float:
    """A lease length from the wire.

    Raises:
        ValueError: not a finite number above 0 and at most ``MAX_LEASE_S``.
    """
    if not math.isfinite(seconds) or not 0 < seconds <= MAX_LEASE_S:
        raise ValueError(f"lease of {seconds} s: want more than 0 and at most {MAX_LEASE_S:g}")
    return float(seconds)


class Lease:
    """One timer. Not thread-safe to arm; ``deadline`` may be read from any thread."""

    __slots__ = ("_clock", "deadline")

    def __init__(self, clock: Clock = monotonic) -> None:
        self._clock = clock
        self.deadline: float | None = None

    def arm(self, seconds: float) -> None:
        """(Re)start with ``seconds`` from now. Raises ValueError as ``checked_s``."""
        self.deadline = self._clock() + checked_s(seconds)

    def disarm(self) -> None:
        """Stop: it never ends."""
        self.deadline = None

    @property
    def alive(self) -> bool:
        """True while it is armed and not over. A lease that was never armed vouches for nothing."""
        return self.deadline is not None and self._clock() < self.deadline

    @property
    def over(self) -> bool:
        """True once an armed lease has ended."""
        return self.deadline is not None and self._clock() >= self.deadline

    @property
    def left_s(self) -> float | None:
        """Seconds left, at least 0; None when not armed."""
        return None if self.deadline is None else max(0.0, self.deadline - self._clock())
