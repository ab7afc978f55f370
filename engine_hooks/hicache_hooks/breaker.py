"""The circuit breaker: when to stop calling a store, when to look at it again. Pure; the clock is given.

::

              ratio, latency share, or a hung store              hold is over
    CLOSED ------------------------------------------> OPEN -------------------> HALF_OPEN
       ^                                                 ^                           |
       |                                                 +---- one probe failed -----+
       +------------------- ``probes_to_close`` probes in a row were good -----------+

Rules

1. A call's weight is the failed share of its keys, so the ratio is that of the error counters (F69); a miss is no
   failure. The ratio counts only with ``min_calls`` calls in the window.
2. A call that ran past its deadline while no other call succeeded is a hung store: open at once. So a store that
   hangs costs one deadline, not ``min_calls`` of them.
3. Every time it opens without having stayed closed for ``calm_s`` the hold doubles, up to ``hold_max_s``, and a
   share of it is random: many engines must not come back in the same moment (F84).
4. Results of calls that began before the last change of state say nothing about the present one and are ignored.
5. Traffic passes only while CLOSED. Probes are calls like any other; who makes them asks ``begin_probe`` and says
   how it went. ``traffic_probes`` lets traffic be the probe where nobody else makes one: ``admit`` then gives one
   caller at a time the permit.

Not thread-safe: callers hold their own lock. ``closed`` alone may be read without one.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from hicache_proto.model import BreakerReport

SLICES = 10  # of the window: old calls leave it in tenths


class Phase(StrEnum):
    """What the breaker does with traffic."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Admit(StrEnum):
    """Answer to one call that wants to go to the store. ``PROBE`` must be answered by ``end_probe``."""

    PASS = "pass"
    PROBE = "probe"
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    """Durations in seconds, shares from 0 to 1."""

    window_s: float = 10.0
    min_calls: int = 10  # below, a ratio says nothing: two failures of three calls happen on healthy stores
    error_ratio: float = 0.5
    slow_s: float = 2.0  # a call that took longer is slow
    slow_ratio: float = 0.8  # above, fetching costs more than computing
    hold_s: float = 2.0
    hold_max_s: float = 60.0
    hold_factor: float = 2.0
    jitter: float = 0.2  # the hold is drawn from 1 - jitter to 1 + jitter of its length
    probes_to_close: int = 3
    probe_gap_s: float = 0.2  # between good probes
    calm_s: float = 60.0  # closed for so long: the next opening starts with the short hold again

    def __post_init__(self) -> None:
        """
        Raises:
            ValueError: a setting with which the breaker could not work.
        """
        if min(self.window_s, self.hold_s, self.hold_max_s) <= 0 or self.hold_factor < 1:
            raise ValueError("durations must be above 0 and the factor at least 1")
        if min(self.min_calls, self.probes_to_close) < 1:
            raise ValueError("min_calls and probes_to_close must be at least 1")
        if not all(0 < share <= 1 for share in (self.error_ratio, self.slow_ratio)) or not 0 <= self.jitter < 1:
            raise ValueError("shares must be above 0 and at most 1")


@dataclass(slots=True)
class _Slice:
    began: float
    calls: int = 0
    failed: float = 0.0
    slow: int = 0


class Breaker:
    """See the module's text."""

    def __init__(
        self,
        settings: BreakerSettings | None = None,
        *,
        clock: Callable[[], float],
        uniform: Callable[[], float] = random.random,
        traffic_probes: bool = False,
    ) -> None:
        """``clock`` in seconds, monotonic; ``uniform`` draws from 0 to 1 for the jitter."""
        self.settings = settings or BreakerSettings()
        self._clock = clock
        self._uniform = uniform
        self._traffic_probes = traffic_probes
        self._phase = Phase.CLOSED
        self._since = clock()  # of the present phase; results of earlier calls are ignored
        self._opened_at = 0.0  # of the opening that has not been closed yet
        self._window: deque[_Slice] = deque()
        self._last_success = float("-inf")
        self._level = 0  # openings in a row: exponent of the hold
        self._probe_at = 0.0
        self._probing = False
        self._good_probes = 0
        self._reason = ""
        self._ratio_at_opening = 0.0
        self.opened_total = 0

    # -- traffic ---------------------------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        """The present phase. OPEN becomes HALF_OPEN only when a probe begins."""
        return self._phase

    @property
    def closed(self) -> bool:
        """True while traffic passes."""
        return self._phase is Phase.CLOSED

    def admit(self) -> Admit:
        """May this call go to the store?"""
        if self._phase is Phase.CLOSED:
            return Admit.PASS
        return Admit.PROBE if self._traffic_probes and self.begin_probe() else Admit.REFUSE

    def record(self, started: float, *, failed: float = 0.0) -> None:
        """A call that was passed ended now. ``started``: clock at its begin; ``failed``: failed share of its keys."""
        if self._phase is not Phase.CLOSED or started < self._since:
            return
        now = self._clock()
        if failed < 1.0:
            self._last_success = now
        self._add(now, failed, slow=now - started > self.settings.slow_s)
        self._judge(now)

    def record_timeout(self, started: float) -> None:
        """A call that was passed has run past its deadline; it may still be inside the store."""
        if self._phase is not Phase.CLOSED or started < self._since:
            return
        now = self._clock()
        self._add(now, 1.0, slow=True)
        if self._last_success <= started:
            self._open(now, "hung")
        else:
            self._judge(now)

    def trip(self, reason: str) -> None:
        """Open now, whatever the numbers say (no threads left, say). Open already: nothing."""
        if self._phase is Phase.CLOSED:
            self._open(self._clock(), reason)

    # -- probes ----------------------------------------------------------------------------------------------

    def probe_in_s(self) -> float | None:
        """Seconds until the next probe is due, 0 when it is; None while closed or while a probe runs."""
        if self._phase is Phase.CLOSED or self._probing:
            return None
        return max(0.0, self._probe_at - self._clock())

    def begin_probe(self) -> bool:
        """True: the caller makes a probe now and calls ``end_probe``. One at a time, not before it is due."""
        if self.probe_in_s() != 0.0:
            return False
        if self._phase is Phase.OPEN:
            self._phase = Phase.HALF_OPEN
            self._good_probes = 0
        self._probing = True
        return True

    def end_probe(self, ok: bool) -> None:
        """The probe ended. A probe that nobody waits for (it closed meanwhile by ``reset``) says nothing."""
        if not self._probing:
            return
        self._probing = False
        now = self._clock()
        if not ok:
            self._open(now, self._reason)
            return
        self._good_probes += 1
        if self._good_probes >= self.settings.probes_to_close:
            self._close(now)
        else:
            self._probe_at = now + self.settings.probe_gap_s

    def reset(self) -> None:
        """Close by hand, and forget the growth of the hold."""
        self._level = 0
        self._probing = False
        self._close(self._clock())

    # -- views -----------------------------------------------------------------------------------------------

    def ratio(self) -> float:
        """Failed share of the window's calls."""
        self._expire(self._clock())
        calls = sum(part.calls for part in self._window)
        return sum(part.failed for part in self._window) / calls if calls else 0.0

    def snapshot(self) -> BreakerReport:
        """The state for reports. While not closed the ratio is that of the moment of opening."""
        closed = self._phase is Phase.CLOSED
        now = self._clock()
        self._expire(now)
        return BreakerReport(
            state=self._phase.value,
            reason=self._reason,
            opened_for_s=0.0 if closed else now - self._opened_at,
            ratio=self.ratio() if closed else self._ratio_at_opening,
            calls=sum(part.calls for part in self._window),
            opened_total=self.opened_total,
            probe_in_s=self.probe_in_s(),
        )

    # -- inner -----------------------------------------------------------------------------------------------

    def _add(self, now: float, failed: float, *, slow: bool) -> None:
        self._expire(now)
        if not self._window or now - self._window[-1].began >= self.settings.window_s / SLICES:
            self._window.append(_Slice(now))
        part = self._window[-1]
        part.calls += 1
        part.failed += failed
        part.slow += slow

    def _expire(self, now: float) -> None:
        while self._window and now - self._window[0].began > self.settings.window_s:
            self._window.popleft()

    def _judge(self, now: float) -> None:
        calls = sum(part.calls for part in self._window)
        if calls < self.settings.min_calls:
            return
        if sum(part.failed for part in self._window) >= self.settings.error_ratio * calls:
            self._open(now, "errors")
        elif sum(part.slow for part in self._window) >= self.settings.slow_ratio * calls:
            self._open(now, "slow")

    def _open(self, now: float, reason: str) -> None:
        s = self.settings
        if self._phase is Phase.CLOSED:
            calls = sum(part.calls for part in self._window)
            self._ratio_at_opening = sum(part.failed for part in self._window) / calls if calls else 0.0
            self._opened_at = now
            self.opened_total += 1
            if now - self._since >= s.calm_s:
                self._level = 0
        hold = min(s.hold_max_s, s.hold_s * s.hold_factor**self._level)
        if hold < s.hold_max_s:  # a number that grew with every probe for a month would overflow the power
            self._level += 1
        self._probe_at = now + hold * (1 + s.jitter * (2 * self._uniform() - 1))
        self._phase, self._since, self._reason = Phase.OPEN, now, reason

    def _close(self, now: float) -> None:
        self._phase, self._since, self._reason = Phase.CLOSED, now, ""
        self._window.clear()
        self._last_success = float("-inf")
