"""The guard's own look at an SGLang store that traffic does not reach: bypassed, or idle.

Traffic is the better probe, since it transfers pages; so while a breaker is not closed its calls go first, one at a
time. But a bypassed store sees none, and failover waits for its breaker to close before it ends the bypass; and an
idle store's death should be known before a request pays for it (F79). The probe is a lookup of a key that nobody
stores: it has a deadline, and touches no page of the engine's, so that a lost one can harm nothing. It says that the
store answers, no more; what it cannot do shows in the first calls after.
"""

import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

from hicache_hooks.guard_monitor import Monitor
from hicache_hooks.guard_watch import IDLE_PROBES_TO_OPEN
from hicache_hooks.sglang.deadline import CallDropped

log = logging.getLogger(__name__)

QUIET_S = 1.0  # no traffic for so long: there is none to be the probe
SHORTEST_S = 0.01  # between two turns: the thread never spins


class Probed(Protocol):
    """The guard, for its probes. Each method takes the guard's lock itself."""

    name: str

    def probes_due(self, quiet_s: float) -> list[str]:
        """``read``, ``write``, ``idle``, or ``epoch``, marked as begun."""

    def next_probe_s(self, quiet_s: float) -> float | None:
        """Seconds until one is due; None when nothing can be."""

    def bounded(self, look: Callable[[], Any]) -> Any:
        """``look`` with the guard's deadline, counted as a call that is inside."""

    def probe_ended(self, side: str, ok: bool) -> None:
        """The breaker hears of it."""

    def look_for_epoch(self) -> None:
        """Whether the store still holds what it held; with the guard's deadline. Never raises."""


class Probes:
    """One thread of its own, from the first ``wake`` on."""

    def __init__(self, core: Probed, look: Callable[[], Any]) -> None:
        """``look`` asks the store for a key that nobody stores: 0 is right. It may block and raise."""
        self._core = core
        self._look = look
        self._idle_bad = 0
        self._monitor = Monitor(self.tick, f"hicache-guard-{core.name}")

    def wake(self, in_s: float = 0.0) -> None:
        """*any thread*: look again in ``in_s`` at the latest. One comparison when that is planned."""
        self._monitor.wake(time.monotonic() + in_s)

    def stop(self) -> None:
        """No more probes; waits for none."""
        self._monitor.stop(0.0)

    def tick(self) -> float | None:
        """*own thread*: make what is due; returns when to come again."""
        for side in self._core.probes_due(QUIET_S):
            if side == "epoch":
                self._core.look_for_epoch()
                continue
            ok = self._answers()
            if side != "idle":
                self._core.probe_ended(side, ok is True)
                continue
            self._idle_bad = self._idle_bad + 1 if ok is False else 0
            if self._idle_bad >= IDLE_PROBES_TO_OPEN:  # F79: one lost answer is no outage
                self._idle_bad = 0
                self._core.probe_ended(side, False)
        wait_s = self._core.next_probe_s(QUIET_S)
        return None if wait_s is None else max(SHORTEST_S, wait_s)

    def _answers(self) -> bool | None:
        """None: nothing was learned."""
        try:
            return bool(self._core.bounded(self._look) == 0)
        except (CallDropped, NotImplementedError):
            return None
        except BaseException as exc:  # whatever it is, the store is not well
            log.debug("probe of %s: %s", self._core.name, type(exc).__name__)
            return False
