"""When an agent says hello, expects a welcome, beats, and wakes the scheduler: times only, no socket, no thread.

A session that lived for one regular heartbeat resets the back-off; a sidecar that refuses or forgets us at once
is asked less and less often, so that two confused processes do not keep each other busy.
"""

import math

from hicache_proto.hooklink import HEARTBEAT_S

UNHEARD_S = 10.0  # without a peer for this long: the socket may have given up for good, take another
WELCOME_S = 2.0  # a sidecar that runs answers in milliseconds
BACKOFF_FIRST_S = 0.05
BACKOFF_MAX_S = 5.0
HEARTBEAT_RANGE_S = (0.05, 60.0)
REFUSED_RANGE_S = (0.1, 60.0)
MAX_WAIT_S = 5.0  # no wait is longer, whatever the state says
BEAT_SOON_S = 0.02  # a change is told this soon, unless an answer that tells it goes out before
REWAKE_S = 0.25  # a scheduler that did not act on a lease's end is woken again after this


class Session:
    """The present session of one agent. Agent thread only, but ``id`` and ``welcomed`` may be read anywhere."""

    def __init__(self) -> None:
        self.id = ""
        self.said_hello = False
        self.welcomed = False
        self._lived = False
        self._lives_at = 0.0  # welcomed, and one regular heartbeat later
        self._hello_at = 0.0
        self._welcome_by = 0.0
        self._next_beat = 0.0
        self._tell_by: float | None = None  # a change that nobody was told yet
        self._backoff_s = 0.0
        self._heartbeat_s = HEARTBEAT_S
        self._told: tuple[float | None, float] = (None, 0.0)  # the deadline that was passed on, and when

    def renew(self, now: float) -> None:
        """Start over: the connection was lost. Hello as soon as the socket is writable."""
        self.said_hello = self.welcomed = False
        self._hello_at = now
        if self._lived:
            self._backoff_s = 0.0
        self._lived = False

    def back_off(self, now: float, at_least_s: float = 0.0) -> None:
        """Start over, later: refused, forgotten, or not welcomed."""
        self.renew(now)
        self._hello_at = now + max(at_least_s, self._backoff_s)
        self._backoff_s = min(BACKOFF_MAX_S, max(BACKOFF_FIRST_S, 2 * self._backoff_s))

    def refused(self, now: float, retry_s: float) -> None:
        """The sidecar said when to come back."""
        low, high = REFUSED_RANGE_S
        self.back_off(now, min(high, max(low, retry_s)) if math.isfinite(retry_s) else high)

    def hello_due(self, now: float) -> bool:
        """True when a hello should go out as soon as the socket is writable."""
        return not self.said_hello and now >= self._hello_at

    def unheard(self, now: float) -> bool:
        """True when a hello has been due for long and no peer came."""
        return not self.said_hello and now >= self._hello_at + UNHEARD_S

    def hello_sent(self, now: float) -> None:
        """Under ``id``."""
        self.said_hello = True
        self._welcome_by = now + WELCOME_S

    def welcome(self, now: float, heartbeat_s: float) -> None:
        """The session stands."""
        low, high = HEARTBEAT_RANGE_S
        self._heartbeat_s = min(high, max(low, heartbeat_s)) if math.isfinite(heartbeat_s) else HEARTBEAT_S
        self.welcomed = True
        self._next_beat = self._lives_at = now + self._heartbeat_s

    def unwelcome(self, now: float) -> bool:
        """True when no welcome came in time."""
        return self.said_hello and not self.welcomed and now >= self._welcome_by

    def changed(self, now: float) -> None:
        """There is something to tell."""
        if self._tell_by is None:
            self._tell_by = now + BEAT_SOON_S

    def beat_due(self, now: float) -> bool:
        """True when a heartbeat must go out now; counts it as sent."""
        tell = self._tell_by is not None and now >= self._tell_by
        if not self.welcomed or (not tell and now < self._next_beat):
            return False
        self.reported(now)
        return True

    def reported(self, now: float) -> None:
        """A message with a report went out: nothing is left to tell, the next heartbeat is due one period later."""
        self._tell_by = None
        if self.welcomed:
            self._lived = self._lived or now >= self._lives_at
            self._next_beat = now + self._heartbeat_s

    def deadline_due(self, now: float, deadline: float | None) -> bool:
        """True when the scheduler must be told that ``deadline`` has passed; counts it as told."""
        if deadline is None or now < deadline:
            return False
        told, at = self._told
        if told == deadline and now < at + REWAKE_S:
            return False
        self._told = (deadline, now)
        return True

    def timeout_ms(self, now: float, deadline: float | None) -> int:
        """How long to wait for events, in whole milliseconds rounded up: never a wait of 0 before something is due."""
        times = [now + MAX_WAIT_S]
        if not self.said_hello:
            if self._hello_at > now:
                times.append(self._hello_at)
        else:
            times.append(self._next_beat if self.welcomed else self._welcome_by)
            if self.welcomed and self._tell_by is not None:
                times.append(self._tell_by)
        if deadline is not None:
            told, at = self._told
            times.append(at + REWAKE_S if told == deadline else deadline)
        return max(0, math.ceil((min(times) - now) * 1000))
