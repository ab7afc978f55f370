"""The pace of a failover: growing, jittered pauses, how long places rest, and the count for the flap hold. Pure."""

import math
from collections import deque
from collections.abc import Callable

from hicache_proto.failover import FailoverPolicy

MAX_DOUBLINGS = 30  # of a pause; the cap is reached long before


class Pace:
    """Times are of the caller's clock, seconds; ``uniform`` draws from 0 to 1."""

    def __init__(self, uniform: Callable[[], float], not_before: float | None = None) -> None:
        self._uniform = uniform
        self._transitions: deque[float] = deque()
        self._not_before = not_before  # of the next return; None: not drawn yet
        self._rest: dict[int, tuple[float, int]] = {}  # place -> (not before, failures)
        self.attempts = 0  # returns tried since home was last well for steady_s

    # ---- going back

    @property
    def not_before(self) -> float | None:
        """Of the next return, as drawn: it outlives the sidecar."""
        return self._not_before

    def back_at(self, now: float, policy: FailoverPolicy) -> float:
        """When home may be tried again: never later than any draw of this policy could say, so that a wall clock that
        was set back while the sidecar was away costs one pause at most."""
        if self._not_before is None:
            return self.draw_return(now, policy)
        self._not_before = min(self._not_before, now + max(policy.min_stay_s, policy.backoff_max_s))
        return self._not_before

    def draw_return(self, now: float, policy: FailoverPolicy, *, at_least: float = 0.0) -> float:
        """A new time for the next return; the pause grows with ``attempts``."""
        self._not_before = now + max(at_least, self._pause(policy, self.attempts))
        return self._not_before

    def at_once(self, now: float) -> None:
        """By hand: no pause, and no growth."""
        self.attempts, self._not_before = 0, now

    def _pause(self, policy: FailoverPolicy, failures: int) -> float:
        longest = min(policy.backoff_max_s, policy.backoff_s * 2.0 ** min(failures, MAX_DOUBLINGS))
        return longest * (0.5 + 0.5 * self._uniform())

    # ---- places that could not be reached

    def ready_at(self, place: int) -> float:
        """When a place may be tried again."""
        return self._rest.get(place, (-math.inf, 0))[0]

    def failed(self, now: float, place: int, policy: FailoverPolicy) -> None:
        """A place could not be reached: it rests, longer each time."""
        failures = self._rest.get(place, (0.0, 0))[1]
        self._rest[place] = now + self._pause(policy, failures), failures + 1

    def reached(self, place: int) -> None:
        """A place was reached."""
        self._rest.pop(place, None)

    def forget(self) -> None:
        """The episode is over, or its policy is another one."""
        self._rest.clear()

    def episode_over(self) -> None:
        """The next episode draws its own times. The transitions stay: flapping spans episodes."""
        self._rest.clear()
        self._not_before = None

    # ---- flapping

    @property
    def transitions(self) -> int:
        """Within the window, at the last look."""
        return len(self._transitions)

    def transition(self, now: float) -> None:
        """One happened."""
        self._transitions.append(now)

    def look(self, now: float, policy: FailoverPolicy) -> None:
        """Drop transitions that left the window."""
        while self._transitions and now - self._transitions[0] > policy.flap_window_s:
            self._transitions.popleft()

    def room(self, policy: FailoverPolicy, more: int) -> bool:
        """Whether ``more`` transitions stay within the limit."""
        return len(self._transitions) + more <= policy.flap_limit

    def calm(self) -> None:
        """An operator took over: counts from zero."""
        self._transitions.clear()
        self.attempts = 0
