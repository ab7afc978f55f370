"""The guard in front of every backend: whatever a store does, the engine sees hits and misses.

Rules:

1. Traffic calls never raise. Any exception of a backend, ``SystemExit`` and its like too, and any answer of the wrong
   shape counts as errors of all its keys and reads as misses, so that serving recomputes (F38, F80).
2. Results are counted per key and a miss is no error (F91): ``hit`` found or stored, ``miss`` not there or not taken,
   ``error``, ``timeout`` (the backend said so), ``skipped`` (bypass, or closed).
3. Bypass works at once and under load (F77): calls that start are skipped, results of calls that are on their way
   are dropped. It is a plain attribute, so setting it waits for nothing.
4. The backend is closed once, and never while a call is inside it: the last call to leave closes it (F27). A native
   client that is used after its close ends the process.
5. Exceptions are named by type; their text may hold secrets (F94).

``_call`` is the one place through which every call to the backend goes.
"""

import inspect
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from hicache_hooks.backends.base import Backend, Got
from hicache_hooks.counts import CallCounts
from hicache_proto.errors import HicacheError, PrepareFailed
from hicache_proto.model import OpUsage

log = logging.getLogger(__name__)

T = TypeVar("T")
_LOG_EVERY_S = 10.0  # a broken store must not fill the log


def describe_exception(exc: BaseException) -> str:
    """An exception in words that cannot hold a secret: its type, and the system's text for an errno (F94)."""
    if isinstance(exc, HicacheError):
        return exc.message
    number = exc.errno if isinstance(exc, OSError) else None
    return f"{type(exc).__name__}: {os.strerror(number)}" if number else type(exc).__name__


class Guard:
    """See the module's text. Methods may be called from any thread."""

    def __init__(
        self, backend: Backend, *, name: str = "", inner: str = "", clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``backend`` is open and canaried; the guard owns it from now on. ``inner``: the vendor's connector (F75)."""
        self.name = name
        self.inner = inner
        self._backend = backend
        self._clock = clock
        self._takes_prefix = frozenset(
            method
            for method in ("batch_put", "batch_get", "batch_exists")
            if "prefix_keys" in inspect.signature(getattr(backend, method)).parameters
        )
        self._lock = threading.Lock()
        self._counts = {kind: CallCounts() for kind in ("put", "get", "exists", "set_aside", "clear")}
        self._inside: dict[int, tuple[str, float]] = {}
        self._serial = 0
        self._bypass = False
        self._closing = False
        self._closed = False
        self._close_error = ""
        self._last_error = ""
        self._logged_at = float("-inf")

    # -------------------------------------------------------------- traffic

    # ``prefix_keys`` (the keys that precede the batch in its chain) reach a backend whose method takes them.

    def batch_put(
        self, keys: Sequence[str], pages: Sequence[memoryview], *, prefix_keys: Sequence[str] | None = None
    ) -> list[bool]:
        """True per key that is stored now. Never raises."""
        extra = self._extra("batch_put", prefix_keys)
        done = self._call("put", len(keys), lambda: self._backend.batch_put(keys, pages, **extra), _is_bool)
        if done is None:
            return [False] * len(keys)
        stored = [bool(item) for item in done]
        self._count("put", hit=stored.count(True), miss=stored.count(False), nbytes=_bytes(pages, stored))
        return stored

    def batch_get(
        self, keys: Sequence[str], pages: Sequence[memoryview], *, prefix_keys: Sequence[str] | None = None
    ) -> list[Got]:
        """What was read into ``pages``; a page whose result is not HIT holds garbage. Never raises."""
        extra = self._extra("batch_get", prefix_keys)
        done = self._call("get", len(keys), lambda: self._backend.batch_get(keys, pages, **extra), _is_got)
        if done is None:
            return [Got.MISS] * len(keys)
        got = [Got(item) for item in done]
        hits = [item is Got.HIT for item in got]
        self._count(
            "get",
            hit=got.count(Got.HIT),
            miss=got.count(Got.MISS),
            error=got.count(Got.ERROR),
            nbytes=_bytes(pages, hits),
        )
        return got

    def batch_exists(self, keys: Sequence[str], *, prefix_keys: Sequence[str] | None = None) -> list[bool]:
        """Which keys are stored. Never raises."""
        extra = self._extra("batch_exists", prefix_keys)
        done = self._call("exists", len(keys), lambda: self._backend.batch_exists(keys, **extra), _is_bool)
        if done is None:
            return [False] * len(keys)
        there = [bool(item) for item in done]
        self._count("exists", hit=there.count(True), miss=there.count(False))
        return there

    def set_aside(self, key: str, reason: str) -> None:
        """A page failed its check. Goes through in bypass too: it keeps the page from being read. Never raises."""

        def call() -> list[bool]:
            self._backend.set_aside(key, reason)
            return [True]

        if self._call("set_aside", 1, call, _is_bool, always=True) is not None:
            self._count("set_aside", hit=1)

    def _extra(self, method: str, prefix_keys: Sequence[str] | None) -> dict[str, Any]:
        return {"prefix_keys": prefix_keys} if prefix_keys is not None and method in self._takes_prefix else {}

    def _call(
        self,
        kind: str,
        keys: int,
        call: Callable[[], list[T]],
        valid: Callable[[object], bool],
        *,
        always: bool = False,
    ) -> list[T] | None:
        """One backend call; None when its result must not be used, which is then counted."""
        token = self._enter(kind, keys, always)
        if token is None:
            return None
        started = self._clock()
        failed: BaseException | None = None
        out: list[T] = []
        try:
            out = call()
            _check_shape(out, keys, valid)
        except BaseException as exc:  # rule 1: the thread is the engine's, the exception is not
            failed = exc
        finally:
            self._leave(token, kind, self._clock() - started)
        if failed is not None:
            self._failed(kind, keys, failed)
            return None
        if self._bypass and not always:
            self._count(kind, skipped=keys)
            return None
        return out

    def _enter(self, kind: str, keys: int, always: bool) -> int | None:
        with self._lock:
            if self._closing or (self._bypass and not always):
                self._counts[kind].skipped += keys
                return None
            self._serial += 1
            self._inside[self._serial] = (kind, self._clock())
            return self._serial

    def _leave(self, token: int, kind: str, took_s: float) -> None:
        with self._lock:
            self._inside.pop(token, None)
            self._counts[kind].took(took_s)
            last = self._closing and not self._inside
        if last:
            self._close_now()

    def _failed(self, kind: str, keys: int, exc: BaseException) -> None:
        if isinstance(exc, TimeoutError):
            self._count(kind, timeout=keys)
        else:
            self._count(kind, error=keys)
        self._last_error = f"{kind}: {describe_exception(exc)}"
        now = self._clock()
        if now - self._logged_at >= _LOG_EVERY_S:
            self._logged_at = now
            log.warning("backend %s failed: %s", self.name, self._last_error)

    def _count(
        self,
        kind: str,
        *,
        hit: int = 0,
        miss: int = 0,
        error: int = 0,
        timeout: int = 0,
        skipped: int = 0,
        nbytes: int = 0,
    ) -> None:
        with self._lock:
            counts = self._counts[kind]
            counts.hit += hit
            counts.miss += miss
            counts.error += error
            counts.timeout += timeout
            counts.skipped += skipped
            counts.bytes += nbytes

    # -------------------------------------------------------------- control

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
        return len(self._inside)

    def oldest_call_s(self) -> float:
        """Age of the oldest call inside the backend, in seconds; 0 when there is none."""
        with self._lock:
            started = min((at for _, at in self._inside.values()), default=None)
        return 0.0 if started is None else self._clock() - started

    def usage(self) -> dict[str, OpUsage]:
        """Counters by call kind (rule 2)."""
        with self._lock:
            return {kind: counts.usage() for kind, counts in self._counts.items()}

    def health(self) -> dict[str, Any]:
        """The backend's facts, and ``ok``, ``last_error``. Never raises."""
        facts: dict[str, Any] = {}
        failed = ""
        try:
            facts = dict(self._backend.health()) if not self._closing else {}
        except BaseException as exc:  # rule 1
            failed = describe_exception(exc)
        ok = not failed and not self._closing
        return {**facts, "ok": ok, "error": failed, "last_error": self._last_error, "bypass": self._bypass}

    def clear(self) -> int:
        """Delete this namespace's pages; an admin call, so failure is said, not hidden (F68).

        Raises:
            PrepareFailed: the store failed; reason ``clear_failed``.
        """
        token = self._enter("clear", 0, always=True)
        if token is None:
            raise PrepareFailed("the store is being closed", details={"reason": "clear_failed"})
        failed = ""
        deleted = 0
        started = self._clock()
        try:
            deleted = self._backend.clear()
        except BaseException as exc:  # rule 1
            failed = describe_exception(exc)
        finally:
            self._leave(token, "clear", self._clock() - started)
        self._count("clear", hit=deleted, error=bool(failed))
        if failed:
            raise PrepareFailed(f"the store could not be cleared: {failed}", details={"reason": "clear_failed"})
        return deleted

    def close(self) -> None:
        """Close the backend, at once or when the last call has left it (rule 4). Idempotent, never raises."""
        with self._lock:
            self._closing = True
            wait = bool(self._inside)
        if not wait:
            self._close_now()

    @property
    def closed(self) -> bool:
        """True when the backend's own close has returned."""
        return self._closed

    @property
    def close_error(self) -> str:
        """Why the backend's close failed; empty when it did not."""
        return self._close_error

    def _close_now(self) -> None:
        with self._lock:
            if self._closed or self._close_error == "closing":
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


def _check_shape(out: object, keys: int, valid: Callable[[object], bool]) -> None:
    if not isinstance(out, list) or len(out) != keys or not all(valid(item) for item in out):
        raise TypeError("a backend answered with another shape than one result per key")


def _is_bool(item: object) -> bool:
    return isinstance(item, bool) or type(item).__name__ in ("bool", "bool_")  # numpy's


def _is_got(item: object) -> bool:
    return item in (Got.HIT, Got.MISS, Got.ERROR)


def _bytes(pages: Sequence[memoryview], counted: Sequence[bool]) -> int:
    return sum(page.nbytes for page, yes in zip(pages, counted, strict=True) if yes)
