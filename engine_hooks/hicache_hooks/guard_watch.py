"""Deadlines, breakers and probes of one store: who may call it, who has waited long enough, when to look again.

There are two breakers: ``read`` (get, exists) and ``write`` (put), since a full disk or a read-only mount stops only
one of them (F62). While a side is not closed its traffic is kept away and the guard probes the store itself, so that
no request pays for finding out. Without a ``Probe`` one call of traffic at a time is the probe. Now and then it looks
whether the store still holds what it held (``guard_epoch``).

Methods marked *locked* are called with the guard's lock held; the others take it.
"""

import logging
import threading
from collections.abc import Callable
from typing import Any, Protocol

from hicache_hooks.breaker import Admit, Breaker
from hicache_hooks.deadlines import Call, Deadlines
from hicache_hooks.guard_beliefs import Beliefs
from hicache_hooks.guard_counts import Counts
from hicache_hooks.guard_epoch import Seen
from hicache_hooks.guard_monitor import Monitor
from hicache_hooks.guard_settings import GuardSettings
from hicache_proto.model import GuardReport

log = logging.getLogger(__name__)

SIDE = {"get": "read", "exists": "read", "put": "write"}
_WORSE = ("closed", "half_open", "open")
MAX_STUCK_PROBES = 4  # a probe that hangs costs a thread: above, the store must first answer one of them (F46)
LOOKS = ("epoch", "forget")  # whether the store still holds what it held, and what follows when it does not
IDLE_PROBES_TO_OPEN = 2  # F79: one lost answer is no outage


class Probe(Protocol):
    """Calls of the guard's own (``backends/probe.py``). They may block and raise as the store does."""

    def read(self, put: bool) -> bool: ...
    def write(self) -> bool: ...


class Watch:
    """See the module's text."""

    def __init__(
        self,
        name: str,
        settings: GuardSettings,
        lock: threading.Lock,
        counts: Counts,
        clock: Callable[[], float],
        probe: Probe | None,
        beliefs: Beliefs,
        *,
        threads: bool = True,
    ) -> None:
        """``threads`` False: nobody calls ``tick`` but the owner, and a probe runs inside it (tests)."""
        self.settings = settings
        self._name = name
        self._lock = lock
        self._counts = counts
        self._clock = clock
        self._probe = probe
        self._beliefs, self._epochs = beliefs, beliefs.epochs
        beliefs.look_soon = self.wake
        self._threads = threads
        self._deadlines = Deadlines()
        self.breakers = {
            side: Breaker(settings.breaker(), clock=clock, traffic_probes=probe is None) for side in ("read", "write")
        }
        self._monitor = Monitor(self.tick, f"hicache-guard-{name}") if threads else None
        self._active_at = clock()
        self._idle_probe = False
        self._idle_bad = 0
        self._look: Callable[[], Seen] = lambda: Seen(-1)
        self._stopped = False
        self.tell_late: Callable[[Any], None] = lambda owner: None
        self.probe_left: Callable[[], None] = lambda: None  # it may have been the last call inside a closing store

    # -- calls -----------------------------------------------------------------------------------------------

    def admit(self, kind: str) -> Admit:
        """*locked*: may traffic of this kind go to the store?"""
        side = SIDE.get(kind)
        return Admit.PASS if side is None else self.breakers[side].admit()

    def enter(
        self,
        kind: str,
        keys: int,
        *,
        owner: Any = None,
        permit: bool = False,
        probe: str = "",
        limit_s: float | None = None,
    ) -> Call:
        """*locked*: a call begins. Afterwards, without the lock: ``watch(call)``. ``limit_s``: not the traffic's."""
        now = self._clock()
        limit_s = self.settings.deadline_s if limit_s is None else limit_s
        call = Call(kind, keys, now, now + limit_s, owner, probe, permit)
        self._deadlines.enter(call)
        return call

    def watch(self, call: Call) -> None:
        """Have its deadline kept."""
        self.wake(call.deadline)

    def wake(self, at: float | None = None) -> None:
        """``tick`` has something to do at ``at``, or now."""
        if self._monitor is not None:
            self._monitor.wake(self._clock() if at is None else at)

    def leave(self, call: Call, *, failed: float = 0.0, timed_out: bool = False) -> bool:
        """*locked*: it came back; False when it was given up meanwhile, then its result must not be used.

        ``failed``: failed share of its keys; ``timed_out``: the store itself said that it took too long.
        """
        if not self._deadlines.leave(call):
            return False
        side = SIDE.get(call.kind)
        if call.probe not in LOOKS:  # no use of the store: it must still be probed when nobody uses it (F79)
            self._active_at = self._clock()
        if side is None or call.probe:
            return True
        self._counts.calls += 1
        self._counts.errors += failed > 0
        self._counts.timeouts += timed_out
        breaker = self.breakers[side]
        if call.permit:
            breaker.end_probe(failed < 1.0)
        elif timed_out and self._active_at - call.started >= self.settings.slow_s:
            breaker.record_timeout(call.started)
        else:
            breaker.record(call.started, failed=failed)
        return True

    def give_up(self, call: Call) -> None:
        """*locked*: nobody waits for it any more, whatever the monitor has noticed."""
        if not call.late:
            call.late = True
            self._fell_late(call)

    def left(self) -> None:
        """After ``leave``, without the lock: a breaker that opened wants its probe."""
        if not (self.breakers["read"].closed and self.breakers["write"].closed):
            self.wake()

    @property
    def probes(self) -> bool:
        """True when probes are the guard's own, not traffic."""
        return self._probe is not None

    def stop(self) -> None:
        """No more deadlines and probes: after this no probe enters the store."""
        with self._lock:
            self._stopped = True
        if self._monitor is not None:
            self._monitor.stop()

    # -- the monitor's turn ----------------------------------------------------------------------------------

    def tick(self) -> float | None:
        """Do what is due; returns the seconds until something is, None when nothing can be."""
        with self._lock:
            now = self._clock()
            late = self._deadlines.overdue(now)
            for call in late:
                self._fell_late(call)
            due = self._due(now)
            wait_s = self._wait_s(now)
        for call in late:
            level = logging.DEBUG if call.probe else logging.WARNING
            log.log(level, "backend %s: %s of %d keys runs for %.1f s in thread %s: given up",
                    self._name, call.kind, call.keys, now - call.started, call.thread)  # fmt: skip
            if call.owner is not None:
                self.tell_late(call.owner)
        for side in due:
            self._launch(side)
        return wait_s

    def _fell_late(self, call: Call) -> None:
        if call.kind == "health":  # a question about the store, no use of it
            return
        side = call.probe or SIDE.get(call.kind)
        if call.probe == "idle":
            self._idle_ended(False)
        elif call.probe == "epoch":
            self._beliefs.looked(None, self.settings.epoch_s)
        elif call.probe == "forget":
            return
        elif call.probe or call.permit:
            self.breakers[side or "read"].end_probe(False)
        if call.probe:
            return
        self._counts.add(call.kind, timeout=call.keys)
        self._counts.calls += 1
        self._counts.timeouts += 1
        if side is not None and not call.permit:
            self.breakers[side].record_timeout(call.started)

    def _due(self, now: float) -> list[str]:
        """Probes to make now, marked as begun."""
        if self._stopped or self._deadlines.stuck_probes() >= MAX_STUCK_PROBES:
            return []
        due = [] if self._probe is None else [side for side, one in self.breakers.items() if one.begin_probe()]
        if self._idle_due_s(now) == 0.0:
            self._idle_probe = True
            due.append("idle")
        if self._epoch_due_s() == 0.0:
            self._look = self._epochs.begin()
            due.append("epoch")
        return due

    def _epoch_due_s(self) -> float | None:
        """A store that does not answer says nothing about what it holds: it is looked at when it is back."""
        return self._epochs.due_in_s(self.settings.epoch_s) if self.breakers["read"].closed else None

    def _idle_due_s(self, now: float) -> float | None:
        idle_s = self.settings.probe_idle_s
        if self._probe is None or idle_s == 0 or self._idle_probe or not self.breakers["read"].closed:
            return None
        return max(0.0, self._active_at + idle_s - now)

    def _wait_s(self, now: float) -> float | None:
        waits = [breaker.probe_in_s() for breaker in self.breakers.values()] if self._probe is not None else []
        if self._deadlines.stuck_probes() >= MAX_STUCK_PROBES:
            waits = []  # the first that comes back wakes us
        else:
            waits += [self._idle_due_s(now), self._epoch_due_s()]
        deadline = self._deadlines.next_deadline()
        if deadline is not None:
            waits.append(max(0.0, deadline - now))
        return min((wait for wait in waits if wait is not None), default=None)

    # -- probes ----------------------------------------------------------------------------------------------

    def _launch(self, side: str) -> None:
        if not self._threads:
            self._run_probe(side)
            return
        # A thread for each probe: there are few, and one that never comes back must not hold up the next.
        thread = threading.Thread(
            target=self._run_probe, args=(side,), name=f"hicache-probe-{self._name}-{side}", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:
            with self._lock:
                self._probe_ended(side, None)

    def _run_probe(self, side: str) -> None:
        with self._lock:
            if self._stopped:
                return
            call = self.enter("probe", 0, probe=side)
            put, look = self.breakers["write"].closed, self._look
        self.watch(call)
        found: bool | Seen | None = None
        try:
            if side == "epoch":
                found = look()
            elif self._probe is not None:
                found = self._probe.write() if side == "write" else self._probe.read(put)
        except BaseException as exc:  # whatever it is, the store is not well
            log.debug("probe of backend %s: %s", self._name, type(exc).__name__)
        with self._lock:
            if lost := self.leave(call) and self._probe_ended(side, found):
                call = self.enter("forget", 0, probe="forget")
        if lost:
            self._forget(call)
        self.probe_left()
        self.wake()

    def _forget(self, call: Call) -> None:
        self.watch(call)
        try:
            self._beliefs.forget()
        except BaseException as exc:  # a dynamic class's own
            log.debug("forget of backend %s: %s", self._name, type(exc).__name__)
        with self._lock:
            self.leave(call)

    def _probe_ended(self, side: str, found: bool | Seen | None) -> bool:
        """True: the store lost what it held, and must ``forget`` it."""
        if side == "epoch":
            return self._beliefs.looked(found if isinstance(found, Seen) else None, self.settings.epoch_s)
        if side == "idle":
            self._idle_ended(found is True)
        else:
            self.breakers[side].end_probe(found is True)
            if side == "read" and self.breakers[side].closed:
                self._epochs.soon()
        return False

    def _idle_ended(self, ok: bool) -> None:
        self._idle_probe = False
        self._active_at = self._clock()
        self._idle_bad = 0 if ok else self._idle_bad + 1
        if self._idle_bad >= IDLE_PROBES_TO_OPEN:
            self._idle_bad = 0
            self.breakers["read"].trip("no_answer")

    def learn_epoch(self) -> None:
        """Ask the store what it holds now, so that a change can be seen. *builder* thread; never raises."""
        if self._epochs.how != "said":
            return
        with self._lock:
            look = self._epochs.begin()
        seen = None
        try:
            seen = look()
        except BaseException as exc:  # the canary passed: it is asked again by the monitor
            log.debug("epoch of backend %s: %s", self._name, type(exc).__name__)
        with self._lock:
            self._beliefs.looked(seen, self.settings.epoch_s)

    # -- views -----------------------------------------------------------------------------------------------

    def configure(self, settings: GuardSettings) -> None:
        """*locked*: new settings; calls that are inside keep their deadline."""
        self.settings = settings
        for breaker in self.breakers.values():
            breaker.settings = settings.breaker()

    def inside(self) -> int:
        """Calls inside the store, probes too."""
        return len(self._deadlines)

    def threads(self) -> list[str]:
        """*locked*: threads inside the store, by name."""
        return self._deadlines.threads()

    def oldest_s(self) -> float:
        """*locked*: age of the oldest call inside the store."""
        started = self._deadlines.oldest()
        return 0.0 if started is None else self._clock() - started

    def report(self) -> GuardReport:
        """*locked*."""
        sides = {side: breaker.snapshot() for side, breaker in self.breakers.items()}
        worse = max(sides.values(), key=lambda side: _WORSE.index(side.state))
        late = [call for call in self._deadlines.late() if not call.probe]
        return GuardReport(
            name=self._name,
            breaker=worse.state,
            opened_for_s=max(side.opened_for_s for side in sides.values()),
            reason=worse.reason,
            ratio=max(side.ratio for side in sides.values()),
            calls=self._counts.calls,
            errors=self._counts.errors,
            timeouts=self._counts.timeouts,
            late=len(late),
            stuck=sorted(call.thread for call in late),
            sides=sides,
            epoch=self._epochs.current,
            epoch_changes=self._epochs.changes,
            epoch_change=self._epochs.last(),
            no_room=self._counts.no_room,
        )
