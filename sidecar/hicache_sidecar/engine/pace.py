"""How soon a restarted rank is brought to the desired state: at once the first time, then with growing pauses (F70).

An engine that restarts again and again must not be built for, and attached to its store, each time at once; whether an
attempt succeeded makes no difference, for the next restart undoes it. A state that held for a while ends the growth.
Pauses are jittered, since the sidecars of a rack meet the same outage. Pure; times are seconds of one clock.
"""

import math
from collections.abc import Callable

FIRST_PAUSE_S = 0.05  # before the first attempt: several sidecars of a host start together
MAX_PAUSE_S = 60.0
STEADY_S = 60.0  # no attempt was needed for so long, though one was allowed: the growth ends


class Pace:
    """``uniform(low, high)`` draws the jitter."""

    def __init__(self, uniform: Callable[[float, float], float]) -> None:
        self._uniform = uniform
        self._attempts = 0
        self._drawn = False  # the first attempt's pause was
        self.held_until = -math.inf  # no attempt before

    def not_before(self, now: float) -> float:
        """When the next attempt may begin."""
        # From the end of the pause: at the cap the pause itself is as long as what counts as steady.
        if self._attempts and now - self.held_until > STEADY_S:
            self._attempts, self._drawn = 0, False
        if self._attempts == 0 and not self._drawn:
            self._drawn = True
            self.held_until = now + FIRST_PAUSE_S * self._uniform(0, 1)
        return self.held_until

    def tried(self, now: float) -> None:
        """An attempt begins."""
        self._attempts += 1
        self.held_until = now + min(MAX_PAUSE_S, 2.0 ** min(self._attempts, 32)) * self._uniform(0.5, 1.5)
