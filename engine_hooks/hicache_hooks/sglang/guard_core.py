"""What every call to a guarded storage object goes through: counters, breakers, bypass, deadline, close.

The rules are those of ``storage_guard``; nothing here knows SGLang.
"""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from hicache_hooks.breaker import Admit, Breaker, BreakerSettings
from hicache_hooks.counts import CallCounts
from hicache_hooks.guard import describe_exception
from hicache_hooks.guard_settings import GuardSettings as GuardKnobs
from hicache_hooks.sglang.deadline import CallDropped, CallThreads, CallTimedOut
from hicache_hooks.sglang.guard_epochs import StoreEpochs
from hicache_hooks.sglang.guard_probe import Probes
from hicache_proto.model import BreakerReport, GuardReport, OpUsage

KINDS = ("put", "get", "exists")
SIDES = {"put": "write", "get": "read", "exists": "read"}  # a full disk must not stop reads (F62)
CALL_DEADLINE_S = 10.0  # 128 pages of 2 MiB at 25 MB/s; a store that needs longer is worse than computing

T = TypeVar("T")
Judge = Callable[[Any], tuple[int, int]]  # an answer's hits and bytes; raises for a wrong shape


class GuardSettings(msgspec.Struct, frozen=True):
    """Of one guard. ``page_bytes``: of one page, for byte counters on paths where no tensor tells."""

    deadline_s: float = CALL_DEADLINE_S
    breaker: BreakerSettings = BreakerSettings()
    page_bytes: int = 0
    probe_idle_s: float = 10.0  # no call for so long: the store is asked whether it answers; 0: never
    epoch_s: float = 10.0  # between two looks whether it still holds what it held; 0: never


class GuardCore:
    """Counters, breakers, bypass and close of one guarded object. Any thread."""

    def __init__(
        self,
        name: str,
        settings: GuardSettings,
        clock: Callable[[], float],
        close: Callable[[], None],
        look: Callable[[], Any] | None = None,
        there: Callable[[str], bool] | None = None,
    ) -> None:
        """``look``: see ``Probes``; None: traffic alone is the probe. ``there``: see ``StoreEpochs``; with ``look``."""
        self.name = name
        self.settings = settings
        self.bypass = False
        self.closing = self.closed = False
        self.close_error = self.last_error = ""
        self.threads = CallThreads(f"hicache-call-{name}")
        self._clock = clock
        self._close = close
        self._lock = threading.RLock()
        self._counts = {kind: CallCounts() for kind in KINDS}
        self._calls = {"calls": 0, "errors": 0, "timeouts": 0}
        self._breakers = {
            side: Breaker(settings.breaker, clock=clock, traffic_probes=True) for side in ("read", "write")
        }
        self._waiting: dict[int, tuple[str, float, str]] = {}  # engine threads in a call: kind, since, thread
        self._hung: set[int] = set()  # of those, told to the breaker
        self._inside = 0  # runs inside the object, abandoned ones too
        self._serial = 0
        self._tried_at = self._called_at = clock()  # by traffic: refused or not; and back from the store
        self._idle_probe_at = float("-inf")
        self._hung_news = False  # the breaker heard of a hung call, the probes have not
        self._probes = None if look is None else Probes(self, look)
        self.epochs = StoreEpochs(name, there, clock, lambda: self.watch(now=True))

    # -- one call

    def run(
        self, kind: str, keys: int, work: Callable[[], T], judge: Judge, otherwise: Callable[[], T], *, bounded: bool
    ) -> T:
        """One call to the store, or ``otherwise()``: skipped, failed, too late, or of the wrong shape."""
        entered = self._enter(kind, keys)
        self.watch(now=self._hung_news)
        if entered is None:
            return otherwise()
        token, started, probe = entered
        failed: BaseException | None = None
        hit = nbytes = 0
        out = None
        try:
            if bounded:
                out = self.threads.call(work, self.settings.deadline_s, self._left)
            else:
                try:
                    out = work()
                finally:
                    self._left()
            hit, nbytes = judge(out)
        except BaseException as exc:  # rule 1: the thread is the engine's, the exception is not
            failed = exc
        used = self._leave(kind, keys, token, started, probe, hit, nbytes, failed)
        if failed is not None:
            self.watch(now=True)  # a breaker may have opened
        return out if used and out is not None else otherwise()

    def _enter(self, kind: str, keys: int) -> tuple[int, float, bool] | None:
        with self._lock:
            self._watch()
            self._tried_at = self._clock()
            admit = Admit.REFUSE
            if not (self.closing or self.bypass):
                admit = self._breakers[SIDES[kind]].admit()
            if admit is Admit.REFUSE:
                self._counts[kind].skipped += keys
                return None
            self._serial += 1
            self._inside += 1
            started = self._clock()
            self._waiting[self._serial] = (kind, started, threading.current_thread().name)
            return self._serial, started, admit is Admit.PROBE

    def _leave(
        self,
        kind: str,
        keys: int,
        token: int,
        started: float,
        probe: bool,
        hit: int,
        nbytes: int,
        failed: BaseException | None,
    ) -> bool:
        """Count; True when the answer may be used."""
        with self._lock:
            del self._waiting[token]
            hung = token in self._hung
            self._hung.discard(token)
            self._called_at = self._clock()
            counts, breaker = self._counts[kind], self._breakers[SIDES[kind]]
            counts.took(self._clock() - started)
            self._calls["calls"] += 1
            if isinstance(failed, CallDropped) or (failed is None and self.bypass):
                counts.skipped += keys
                if probe:
                    breaker.end_probe(False)
                return False
            if failed is None:
                counts.hit += hit
                counts.miss += keys - hit
                counts.bytes += nbytes
            elif isinstance(failed, TimeoutError):
                counts.timeout += keys
                self._calls["timeouts"] += 1
            else:
                counts.error += keys
                self._calls["errors"] += 1
            if failed is not None:
                self.last_error = f"{kind}: {describe_exception(failed)}"
            if probe:
                breaker.end_probe(failed is None)
            elif isinstance(failed, CallTimedOut):
                breaker.record_timeout(started)
            elif not hung:  # a hung one has been recorded
                breaker.record(started, failed=0.0 if failed is None else 1.0)
        return failed is None

    def _left(self) -> None:
        with self._lock:
            self._inside -= 1
            last = self.closing and not self._inside
        if last:
            self._close_now()

    def _watch(self) -> None:
        """A call that cannot be given up and is past the deadline: the breaker hears of it once (rule 5)."""
        now = self._clock()
        for token, (kind, started, _) in self._waiting.items():
            if token not in self._hung and now - started > self.settings.deadline_s:
                self._hung.add(token)
                self._hung_news = True
                self._calls["timeouts"] += 1
                self._breakers[SIDES[kind]].record_timeout(started)

    # -- probes of its own (``Probed``)

    def watch(self, now: bool = False) -> None:
        """*any thread*: have the store looked at while traffic does not reach it; costs a comparison or two.

        ``now``: something changed, so that a probe may be due earlier than planned.
        """
        if self._probes is None or self.closing:
            return
        if now:
            self._hung_news = False
            self._probes.wake()
        elif self.settings.probe_idle_s:
            self._probes.wake(self.settings.probe_idle_s)

    def probes_due(self, quiet_s: float) -> list[str]:
        """See ``Probed``."""
        with self._lock:
            if self.closing:
                return []
            self._watch()
            due = []
            if self._quiet_in_s(quiet_s) == 0.0:
                due = [side for side, breaker in self._breakers.items() if breaker.begin_probe()]
            if self._idle_in_s() == 0.0:
                self._idle_probe_at = self._clock()
                due.append("idle")
            if self._epoch_in_s() == 0.0:
                self.epochs.begin()
                due.append("epoch")
            return due

    def next_probe_s(self, quiet_s: float) -> float | None:
        """See ``Probed``."""
        with self._lock:
            if self.closing:
                return None
            quiet_in_s = self._quiet_in_s(quiet_s)
            due = (breaker.probe_in_s() for breaker in self._breakers.values())
            waits = [max(wait, quiet_in_s) for wait in due if wait is not None]
            waits += [wait for wait in (self._idle_in_s(), self._epoch_in_s()) if wait is not None]
            return min(waits, default=None)

    def bounded(self, look: Callable[[], Any]) -> Any:
        """See ``Probed``. Raises as ``CallThreads.call``."""
        with self._lock:
            if self.closing:
                raise CallDropped
            self._inside += 1
        return self.threads.call(look, self.settings.deadline_s, self._left)

    def probe_ended(self, side: str, ok: bool) -> None:
        """See ``Probed``. ``idle``: the store did not answer again and again."""
        with self._lock:
            if side == "idle":
                self._breakers["read"].trip("no_answer")
            else:
                self._breakers[side].end_probe(ok)

    def _quiet_in_s(self, quiet_s: float) -> float:
        """When traffic will have been silent for so long that it is no probe; bypassed, it never is one."""
        return 0.0 if self.bypass else max(0.0, self._tried_at + quiet_s - self._clock())

    def _idle_in_s(self) -> float | None:
        idle_s = self.settings.probe_idle_s
        if not idle_s or not self._breakers["read"].closed:
            return None
        return max(0.0, max(self._called_at, self._idle_probe_at) + idle_s - self._clock())

    def look_for_epoch(self) -> None:
        """See ``Probed``."""
        self.epochs.look(self.bounded, self.settings.epoch_s)

    def _epoch_in_s(self) -> float | None:
        quiet = self.bypass or not self._breakers["read"].closed
        return None if quiet else self.epochs.due_in_s(self.settings.epoch_s)

    # -- control and views

    def set_bypass(self, enabled: bool) -> bool:
        """Rule 3. Returns what it was. Leaving bypass closes the breakers: an operator has looked."""
        with self._lock:
            was, self.bypass = self.bypass, enabled
            if was and not enabled:
                for breaker in self._breakers.values():
                    breaker.reset()
        if enabled:
            self.threads.drop_all()
        self.watch(now=True)
        return was

    def tune(self, told: GuardKnobs) -> None:
        """The live keys ``guard_...``, whole. Calls that are inside keep their deadline. Never raises."""
        with self._lock:
            self.settings = msgspec.structs.replace(
                self.settings,
                deadline_s=told.deadline_s,
                probe_idle_s=told.probe_idle_s,
                epoch_s=told.epoch_s,
                breaker=told.breaker(),
            )
            for breaker in self._breakers.values():
                breaker.settings = self.settings.breaker
        self.watch(now=True)

    def in_flight(self) -> int:
        """Engine threads inside a call now; abandoned runs are not among them."""
        return len(self._waiting)

    def oldest_call_s(self) -> float:
        """Age of the oldest of those, in seconds; 0 when there is none."""
        with self._lock:
            started = min((since for _, since, _ in self._waiting.values()), default=None)
        return 0.0 if started is None else self._clock() - started

    def in_trouble(self) -> bool:
        """True while a breaker is not closed, or a call that was given up is still inside the store."""
        return self.threads.abandoned > 0 or not all(breaker.closed for breaker in self._breakers.values())

    def usage(self) -> dict[str, OpUsage]:
        """Counters by call kind, per key."""
        with self._lock:
            return {kind: counts.usage() for kind, counts in self._counts.items()}

    def report(self) -> GuardReport:
        """What failover decides on."""
        order = ("closed", "half_open", "open")
        with self._lock:
            self._watch()
            sides = {side: breaker.snapshot() for side, breaker in self._breakers.items()}
            worse: BreakerReport = max(sides.values(), key=lambda report: order.index(report.state))
            return GuardReport(
                name=self.name,
                breaker=worse.state,
                opened_for_s=max(report.opened_for_s for report in sides.values()),
                reason=worse.reason,
                ratio=max(report.ratio for report in sides.values()),
                late=self.threads.abandoned + len(self._hung),
                stuck=sorted(self._waiting[token][2] for token in self._hung),
                sides=sides,
                calls=self._calls["calls"],
                errors=self._calls["errors"],
                timeouts=self._calls["timeouts"],
                **self.epochs.reported(),
            )

    def close(self) -> None:
        """Rule 4. Idempotent, never raises, never waits for a call."""
        with self._lock:
            self.closing = True
            idle = not self._inside
        if self._probes is not None:
            self._probes.stop()
        self.threads.drop_all()
        if idle:
            self._close_now()

    def _close_now(self) -> None:
        with self._lock:
            if self.close_error == "closing" or self.closed:
                return
            self.close_error = "closing"
        failed = ""
        try:
            self._close()
        except BaseException as exc:  # rule 1
            failed = describe_exception(exc)
        self.close_error, self.closed = failed, True
        self.threads.end()
