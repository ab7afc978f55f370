"""The guard in front of every backend: whatever a store does, the engine sees hits and misses.

Rules:

1. Traffic calls never raise. Any exception of a backend, ``SystemExit`` and its like too, and any answer of the wrong
   shape counts as errors of all its keys and reads as misses, so that serving recomputes (F38, F80).
2. Results are counted per key and a miss is no error (F91): ``hit`` found or stored, ``miss`` not there or not taken,
   ``error``, ``timeout`` (the backend said so, or its deadline passed), ``skipped`` (bypass, breaker, or closed).
3. Bypass works at once and under load (F77): calls that start are skipped, results of calls that are on their way
   are dropped. It is a plain attribute, so setting it waits for nothing.
4. The backend is closed once, and never while a call is inside it: the last call to leave closes it (F27). A native
   client that is used after its close ends the process.
5. Exceptions are named by type; their text may hold secrets (F94).
6. A call that runs past its deadline is counted as timed out there and then, whoever made it is told
   (``on_late``), and what it brings later is dropped. Its memory stays its own until it is back.
7. While a breaker is not closed its side's traffic is skipped (``guard_watch``); a page that the store promised and
   did not deliver is not promised again for a while (``negative``).
8. A store that lost all it held is no failing one: what is believed about it is dropped, here and by whoever asked to
   be told (``on_lost``), and serving goes on (F70, ``guard_beliefs``).

``_call`` is the one place through which traffic goes to the backend; the guard's own probes go through ``Watch``.
"""

import errno
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from hicache_hooks.backends.base import Backend, Got, Manifest
from hicache_hooks.breaker import Admit
from hicache_hooks.deadlines import Call
from hicache_hooks.describe import describe_exception
from hicache_hooks.guard_admin import CLEAR_S, AdminCalls, StillRunning, StoreClosing, not_cleared
from hicache_hooks.guard_beliefs import Beliefs
from hicache_hooks.guard_counts import Counts
from hicache_hooks.guard_results import GOT, check_shape, counted_bytes, errors, is_bool, is_got, is_put, put_errors
from hicache_hooks.guard_settings import GuardSettings
from hicache_hooks.guard_watch import SIDE, Probe, Watch
from hicache_hooks.signatures import takes
from hicache_proto.model import GuardReport, OpUsage, StoreUsage

__all__ = ["Guard", "describe_exception"]

log = logging.getLogger(__name__)

T = TypeVar("T")
_LOG_EVERY_S = 10.0  # a broken store must not fill the log
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class Guard:
    """See the module's text. Methods may be called from any thread."""

    def __init__(
        self,
        backend: Backend,
        *,
        name: str = "",
        inner: str = "",
        instance: str = "",
        manifest: Manifest | None = None,
        settings: GuardSettings | None = None,
        probe: Probe | None = None,
        clock: Callable[[], float] = time.monotonic,
        threads: bool = True,
    ) -> None:
        """``backend`` is open and canaried; the guard owns it from now on. ``inner``: the vendor's connector (F75).
        ``instance``: the operator's name for it (F92). ``manifest``: with its options; else the backend's own.

        ``probe`` looks at the store while its traffic is kept away; ``threads`` False: ``tick`` is called by hand.
        """
        self.name = name
        self.inner = inner
        self.instance = instance
        self.facts: dict[str, bool | int | str] = {}  # of the store, for status
        self._backend = backend
        self._manifest = manifest
        self._clock = clock
        self._takes = {
            method: [word for word in ("prefix_keys", "arrived") if takes(getattr(backend, method), word)]
            for method in ("batch_put", "batch_get", "batch_exists")
        }
        self._lock = threading.Lock()
        self._counts = Counts()
        self._beliefs = Beliefs(name, backend, clock)
        self._watch = Watch(
            name, settings or GuardSettings(), self._lock, self._counts, clock, probe, self._beliefs, threads=threads
        )
        self._watch.probe_left = self._close_if_last
        self._admin = AdminCalls(name, self._watch, self._lock, lambda: self._closing, self._close_if_last)
        self._whose: Callable[[], Any] = lambda: None
        self._bypass = self._closing = self._closed = False
        self._close_error = ""
        self._last_error = ""
        self._logged_at = float("-inf")

    def on_late(self, whose: Callable[[], Any], tell: Callable[[Any], None]) -> None:
        """``whose()`` names the caller of a call that begins; ``tell(owner)`` says that it is late (rule 6).

        ``tell`` runs on the guard's thread and must not raise. The owner may be through by then.
        """
        self._whose = whose
        self._watch.tell_late = tell

    def on_lost(self, tell: Callable[[], None]) -> None:
        """``tell()`` says that nothing that was stored may be believed to be there (rule 8). Any thread, under the
        guard's lock: it must be short, and must not raise."""
        self._beliefs.tell_lost = tell

    def learn_epoch(self) -> None:
        """See ``Watch.learn_epoch``."""
        self._watch.learn_epoch()

    # -------------------------------------------------------------- traffic

    # ``prefix_keys`` (the keys before the batch in its chain) and ``arrived`` (see base.py) reach what takes them.

    def batch_put(
        self, keys: Sequence[str], pages: Sequence[memoryview], *, prefix_keys: Sequence[str] | None = None
    ) -> list[bool]:
        """True per key that is stored now. Never raises."""
        extra = self._extra("batch_put", prefix_keys)
        done = self._call("put", len(keys), lambda: self._backend.batch_put(keys, pages, **extra), is_put, put_errors)
        if done is None:
            return [False] * len(keys)
        stored = [bool(item) for item in done]
        hits, failed = stored.count(True), put_errors(done)
        with self._lock:
            nbytes = counted_bytes(pages, stored)
            self._counts.add("put", hit=hits, miss=len(keys) - hits - failed, error=failed, nbytes=nbytes)
            self._beliefs.stored(keys, stored)
        return stored

    def batch_get(
        self, keys: Sequence[str], pages: Sequence[memoryview], *, prefix_keys: Sequence[str] | None = None,
        arrived: Callable[[str], None] | None = None,
    ) -> list[Got]:  # fmt: skip
        """What was read into ``pages``; a page whose result is not HIT holds garbage. Never raises."""
        extra = self._extra("batch_get", prefix_keys, arrived)
        done = self._call("get", len(keys), lambda: self._backend.batch_get(keys, pages, **extra), is_got, errors)
        if done is None:
            return [Got.MISS] * len(keys)
        got = [GOT[item] for item in done]
        hits = [item is Got.HIT for item in got]
        with self._lock:
            self._counts.add(
                "get",
                hit=got.count(Got.HIT),
                miss=got.count(Got.MISS),
                error=got.count(Got.ERROR),
                nbytes=counted_bytes(pages, hits),
            )
            self._beliefs.delivered(keys, hits, self._watch.settings.negative_ttl_s)
        return got

    def batch_exists(self, keys: Sequence[str], *, prefix_keys: Sequence[str] | None = None) -> list[bool]:
        """Which keys are stored. Never raises."""
        extra = self._extra("batch_exists", prefix_keys)
        done = self._call("exists", len(keys), lambda: self._backend.batch_exists(keys, **extra), is_bool)
        if done is None:
            return [False] * len(keys)
        there = [bool(item) for item in done]
        with self._lock:
            there = self._beliefs.promised(keys, there)
            self._counts.add("exists", hit=there.count(True), miss=there.count(False))
        return there

    def set_aside(self, key: str, reason: str) -> None:
        """A page failed its check. Goes through in bypass too: it keeps the page from being read. Never raises."""

        def call() -> list[bool]:
            self._backend.set_aside(key, reason)
            return [True]

        with self._lock:
            self._beliefs.set_aside(key, self._watch.settings.negative_ttl_s)
        if self._call("set_aside", 1, call, is_bool, always=True) is not None:
            with self._lock:
                self._counts.add("set_aside", hit=1)

    def refuses(self, kind: str, keys: int) -> bool:
        """True when a call now would be skipped; then it is counted as that. Saves the caller its preparations."""
        if self.open_for(kind):
            return False
        with self._lock:
            self._counts.skip(kind, keys, self._why_not())
        return True

    def open_for(self, kind: str) -> bool:
        """False when a call of this kind would be skipped. Reads attributes only."""
        if self._bypass or self._closing:
            return False
        side = self._watch.breakers[SIDE[kind]]
        return side.closed or (not self._watch.probes and side.probe_in_s() == 0.0)

    def _why_not(self) -> str:
        return "closed" if self._closing else "bypass" if self._bypass else "breaker"

    def _extra(self, method: str, prefix_keys: Sequence[str] | None, arrived: object = None) -> dict[str, Any]:
        given = {"prefix_keys": prefix_keys, "arrived": arrived}
        return {word: given[word] for word in self._takes[method] if given[word] is not None}

    def _call(
        self,
        kind: str,
        keys: int,
        call: Callable[[], Sequence[T]],
        valid: Callable[[object], bool],
        failed_keys: Callable[[Sequence[T]], int] = lambda out: 0,
        *,
        always: bool = False,
    ) -> Sequence[T] | None:
        """One backend call; None when its result must not be used, which is then counted."""
        entered = self._enter(kind, keys, always)
        if entered is None:
            return None
        failed: BaseException | None = None
        out: Sequence[T] = []
        share = 1.0
        try:
            out = call()
            check_shape(out, keys, valid)
            share = failed_keys(out) / max(1, keys)
        except BaseException as exc:  # rule 1: the thread is the engine's, the exception is not
            failed = exc
        in_time = self._leave(entered, share, failed)
        if not in_time:  # counted when it became late
            return None
        if failed is not None:
            self._failed(kind, keys, failed)
            return None
        if self._bypass and not always:
            with self._lock:
                self._counts.skip(kind, keys, "bypass")
            return None
        return out

    def _enter(self, kind: str, keys: int, always: bool) -> Call | None:
        with self._lock:
            admit = Admit.REFUSE if self._closing or (self._bypass and not always) else self._watch.admit(kind)
            if admit is Admit.REFUSE:
                self._counts.skip(kind, keys, self._why_not())
                return None
            entered = self._watch.enter(kind, keys, owner=self._whose(), permit=admit is Admit.PROBE)
        self._watch.watch(entered)
        return entered

    def _leave(self, call: Call, share: float, failed: BaseException | None) -> bool:
        with self._lock:
            in_time = self._watch.leave(call, failed=share, timed_out=isinstance(failed, TimeoutError))
            self._counts.by_kind[call.kind].took(self._clock() - call.started)
            if call.kind == "put" and isinstance(failed, OSError) and failed.errno in _NO_SPACE:
                self._watch.breakers["write"].trip("no_space")  # F62: the next put would say the same
        self._watch.left()
        self._close_if_last()
        return in_time

    def _failed(self, kind: str, keys: int, exc: BaseException) -> None:
        with self._lock:
            self._counts.add(kind, **{"timeout" if isinstance(exc, TimeoutError) else "error": keys})
        self._last_error = f"{kind}: {describe_exception(exc)}"
        now = self._clock()
        if now - self._logged_at >= _LOG_EVERY_S:
            self._logged_at = now
            log.warning("backend %s failed: %s", self.name, self._last_error)

    # -------------------------------------------------------------- control

    def configure(self, settings: GuardSettings) -> None:
        """Take new settings for the calls to come."""
        with self._lock:
            self._watch.configure(settings)

    def tick(self) -> float | None:
        """See ``Watch.tick``."""
        return self._watch.tick()

    def report(self) -> GuardReport:
        """Breakers, late calls and totals, for failover and status. Never raises."""
        with self._lock:
            return self._watch.report()

    def looked_up(self, *, below_threshold: bool = False) -> None:
        """A request could have read from the store; or it lacked too little to be worth asking (F57)."""
        with self._lock:
            self._counts.looked_up()
            self._counts.skipped["threshold"] += below_threshold

    def found(self, *, too_short: bool = False, gap_pages: int = 0) -> None:
        """F57: of a look-up: less than the threshold; or so many pages behind one of their chain that is not there."""
        with self._lock:
            self._counts.found(too_short=too_short, gap_pages=gap_pages)

    def store_usage(self) -> StoreUsage:
        """Everything that this store was used for."""
        with self._lock:
            return self._counts.store_usage()

    def set_bypass(self, enabled: bool) -> bool:
        """Reads miss, writes are skipped (rule 3). Returns what it was."""
        was, self._bypass = self._bypass, enabled
        return was

    @property
    def bypass(self) -> bool:
        """True while bypassed."""
        return self._bypass

    def in_flight(self) -> int:
        """Calls inside the backend now."""
        return self._watch.inside()

    def inside(self) -> list[str]:
        """Threads inside the backend now, by name."""
        with self._lock:
            return self._watch.threads()

    def oldest_call_s(self) -> float:
        """Age of the oldest call inside the backend, in seconds; 0 when there is none."""
        with self._lock:
            return self._watch.oldest_s()

    def usage(self) -> dict[str, OpUsage]:
        """Counters by call kind (rule 2)."""
        with self._lock:
            return self._counts.usage()

    def health(self) -> dict[str, Any]:
        """The backend's facts, and ``ok``, ``last_error``. Never raises, and waits for one deadline at most."""
        facts: dict[str, Any] = {}
        failed = ""
        try:
            facts = dict(self._admin.run("health", self._backend.health, self._watch.settings.deadline_s))
        except StoreClosing:
            pass
        except BaseException as exc:  # rule 1
            failed = describe_exception(exc)
        ok = not failed and not self._closing
        return {**facts, "ok": ok, "error": failed, "last_error": self._last_error, "bypass": self._bypass}

    def clear(self) -> int:
        """Delete this namespace's pages; an admin call, so failure is said, not hidden (F68).

        Raises:
            PrepareFailed: the store failed; reason ``clear_failed``; or ``clear_late``: it goes on, and nobody waits.
        """
        failed: BaseException | None = None
        deleted, began = 0, self._clock()
        try:
            deleted = self._admin.run("clear", self._backend.clear, CLEAR_S)
        except BaseException as exc:  # rule 1
            failed = exc
        late = isinstance(failed, StillRunning)
        with self._lock:
            self._counts.by_kind["clear"].took(self._clock() - began)
            self._counts.add("clear", hit=deleted, error=failed is not None and not late, timeout=late)
            self._beliefs.emptied()
        if failed is not None:
            raise not_cleared(failed)
        return deleted

    def close(self) -> None:
        """Close the backend, at once or when the last call has left it (rule 4). Idempotent, never raises."""
        with self._lock:
            self._closing = True
        self._watch.stop()
        self._close_if_last()

    @property
    def manifest(self) -> Manifest | None:
        """What the backend can be used for; None: a class of somebody's that does not say."""
        return self._manifest or getattr(self._backend, "manifest", None)

    @property
    def closed(self) -> bool:
        """True when the backend's own close has returned."""
        return self._closed

    @property
    def close_error(self) -> str:
        """Why the backend's close failed; empty when it did not."""
        return self._close_error

    def _close_if_last(self) -> None:
        with self._lock:
            if not self._closing or self._watch.inside() or self._closed or self._close_error == "closing":
                return
            self._close_error = "closing"
        failed = ""
        try:
            self._backend.close()
        except BaseException as exc:  # rule 1
            failed = describe_exception(exc)
            with suppress(Exception):
                log.error("backend %s: close failed: %s", self.name, failed)
        self._close_error = failed
        self._closed = True
