"""The guard in front of a storage object of SGLang's own: whatever a store does, the engine sees hits and misses.

Rules (numbers of ``hicache_hooks.guard`` where they are the same):

1. Traffic calls never raise. An exception, or an answer of the wrong shape, counts as errors of all keys and reads as
   misses, so that serving recomputes and the engine's threads live on (F38, F80).
2. A miss is no error (F91). A write that the store answers with False is a miss too: stores say so when they are
   full, and swallow their own exceptions, so the two cannot be told apart here.
3. Bypass works at once and under load (F77): calls that start are skipped, those that wait on the copy path are let
   go. Writes then answer False, "skipped": True would make the engine believe that the page is stored.
4. The object is closed once, never while a call is inside it; the last call to leave closes it (F27).
5. A deadline stands only where an abandoned call touches no memory of the engine: lookups, and the copy path
   (``deadline``). On a zero-copy path a call is never given up; there are the breaker, which sees a call that hangs,
   and ``in_flight``, for which a COMMIT waits.
6. Host pools are registered once. The engine registers them again at every attach; stores that pin memory, or that
   cannot amend what they said, must not see that.
7. Every method of the base class is forwarded by name: its defaults would hide ``__getattr__``.

The engine takes names and paths from the class: a guard's class is called like its store's and says that it is one.
"""

import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from hicache_hooks.guard import describe_exception
from hicache_hooks.guard_settings import GuardSettings as GuardKnobs
from hicache_hooks.sglang.guard_core import GuardCore, GuardSettings, Judge
from hicache_hooks.sglang.pool_memory import PoolMemory
from hicache_proto.model import GuardReport, OpUsage

ABSENT = hashlib.sha256(b"hicache guard: a key that nobody stores").hexdigest()
STATS_CALL_S = 1.0  # a call that is inside for longer may hold a lock that the statistics need

T = TypeVar("T")


class StorageGuard:
    """The methods of ``HiCacheStorage``; ``guard_storage`` makes a class of it that the engine takes for the store's.

    Underscored names are the guard's; everything else that is not defined here is the store's own.
    """

    _inner: Any
    _core: GuardCore
    _pools: PoolMemory
    _empty_result: Callable[[], Any]

    # -- what the engine's adapter uses

    @property
    def bypass(self) -> bool:
        """True while bypassed."""
        return self._core.bypass

    def set_bypass(self, enabled: bool) -> bool:
        """Reads miss, writes are skipped, at once. Returns what it was."""
        return self._core.set_bypass(enabled)

    def tune_guard(self, told: GuardKnobs) -> None:
        """The live keys ``guard_...``."""
        self._core.tune(told)

    def in_time(self, work: Callable[[], T]) -> T:
        """``work`` on the store itself, with the deadline of a call and nothing else of the guard.

        Only for calls that touch no memory of the engine (rule 5). Raises as ``CallThreads.call``.
        """
        done: T = self._core.bounded(work)
        return done

    def in_flight(self) -> int:
        """Engine threads inside the store now: a COMMIT waits for 0."""
        return self._core.in_flight()

    def given_up(self) -> list[str]:
        """Threads inside the store in calls that nobody waits for any more."""
        return self._core.threads.abandoned_in()

    def oldest_call_s(self) -> float:
        """Age in seconds of the oldest call that an engine thread is in."""
        return self._core.oldest_call_s()

    def usage(self) -> dict[str, OpUsage]:
        """Counters: ``put``, ``get``, ``exists``."""
        return self._core.usage()

    def guard_report(self) -> GuardReport:
        """Breakers and failed calls."""
        return self._core.report()

    @property
    def inner(self) -> Any:
        """The store's own object."""
        return self._inner

    @property
    def closed(self) -> bool:
        """True when the store's own close, if it has one, has returned."""
        return self._core.closed

    @property
    def close_error(self) -> str:
        """Why the store's close failed; empty when it did not."""
        return self._core.close_error

    def close(self) -> None:
        """Close the store at once, or when the last call has left it. The engine's own detach calls it too."""
        self._core.close()

    # -- admin calls of the base class: errors are told

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Rule 6."""
        if self._pools.add("", mem_pool_host):
            self._inner.register_mem_pool_host(mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Rule 6."""
        if self._pools.add(str(host_pool_name), host_pool):
            self._inner.register_mem_host_pool_v2(host_pool, host_pool_name)

    def on_host_pools_registered(self) -> None:
        """Rule 6."""
        if self._pools.complete():
            self._inner.on_host_pools_registered()
            self._core.watch()

    def clear(self) -> Any:
        """Deletes the store's pages, of all ranks: the engine's own admin call."""
        try:
            return self._inner.clear()
        finally:
            self.emptied()

    def emptied(self) -> None:
        """It was cleared on purpose: no loss."""
        self._core.epochs.emptied()

    def get_stats(self) -> Any:
        """Called by the scheduler thread with every batch: nothing that could fail or wait in trouble."""
        core = self._core
        if core.bypass or core.closing or core.in_trouble() or core.oldest_call_s() > STATS_CALL_S:
            return None
        try:
            return self._inner.get_stats()
        except BaseException as exc:  # rule 1
            core.last_error = f"get_stats: {describe_exception(exc)}"
            return None

    # -- lookups

    def exists(self, key: str) -> bool:
        """One key."""
        return bool(self._run("exists", 1, lambda: self._inner.exists(key), _truth, lambda: False, True))

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many keys from the start are stored."""
        work = lambda: self._inner.batch_exists(keys, extra_info)  # noqa: E731
        found = int(self._run("exists", len(keys), work, _count(len(keys)), lambda: 0, True))
        self._core.epochs.missed(keys[found : found + 1])  # of what comes after it nothing is said
        return found

    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        """The usable prefix over several pools."""
        work = lambda: self._inner.batch_exists_v2(keys, pool_transfers, extra_info)  # noqa: E731
        judge: Judge = lambda out: _count(len(keys))(out.kv_hit_pages)  # noqa: E731
        result = self._run("exists", len(keys), work, judge, self._empty_result, True)
        found = int(getattr(result, "kv_hit_pages", 0))
        self._core.epochs.missed(keys[found : found + 1])
        return result

    # -- copy path

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """One page, or None."""
        own = self._pools.strangers((target_location,))
        judge: Judge = lambda out: (out is not None, _nbytes((out,)))  # noqa: E731
        return self._run(
            "get", 1, lambda: self._inner.get(key, target_location, target_sizes), judge, lambda: None, own
        )

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> Any:
        """A page or None per key."""
        own = self._pools.strangers(target_locations or ())
        pages = self._run(
            "get",
            len(keys),
            lambda: self._inner.batch_get(keys, target_locations, target_sizes),
            _pages(len(keys)),
            lambda: [None] * len(keys),
            own,
        )
        self._read(keys, [page is not None for page in pages])
        return pages

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """One page."""
        own = self._pools.strangers((value, target_location))
        size = _nbytes((value,))
        return bool(
            self._run(
                "put",
                1,
                lambda: self._inner.set(key, value, target_location, target_sizes),
                lambda out: (bool(out), size if out else 0),
                lambda: False,
                own,
            )
        )

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """True when all are stored."""
        own = self._pools.strangers([*(values or ()), *(target_locations or ())])
        size = _nbytes(values or ())
        taken = bool(
            self._run(
                "put",
                len(keys),
                lambda: self._inner.batch_set(keys, values, target_locations, target_sizes),
                lambda out: (len(keys), size) if out else (0, 0),
                lambda: False,
                own,
            )
        )
        if taken:
            self._core.epochs.holds(keys)
        return taken

    # -- zero-copy path: no deadline (rule 5)

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Straight into host pages; a bool per key."""
        work = lambda: self._inner.batch_get_v1(keys, host_indices, extra_info)  # noqa: E731
        flags: list[bool] = self._run(
            "get", len(keys), work, self._flags(len(keys)), lambda: [False] * len(keys), False
        )
        self._read(keys, flags)
        return flags

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Straight from host pages; a bool per key."""
        work = lambda: self._inner.batch_set_v1(keys, host_indices, extra_info)  # noqa: E731
        flags: list[bool] = self._run(
            "put", len(keys), work, self._flags(len(keys)), lambda: [False] * len(keys), False
        )
        self._core.epochs.holds([key for key, taken in zip(keys, flags, strict=True) if taken])
        return flags

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[Any, list[bool]]:
        """Several pools, into host pages."""
        work = lambda: self._inner.batch_get_v2(transfers, extra_info=extra_info)  # noqa: E731
        return self._run("get", _entries(transfers), work, self._pool_flags, lambda: _nothing(transfers), False)

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[Any, list[bool]]:
        """Several pools, from host pages."""
        work = lambda: self._inner.batch_set_v2(transfers, extra_info=extra_info)  # noqa: E731
        return self._run("put", _entries(transfers), work, self._pool_flags, lambda: _nothing(transfers), False)

    # -- inner

    def _read(self, keys: list[str], hits: Sequence[bool]) -> None:
        self._core.epochs.holds([key for key, hit in zip(keys, hits, strict=True) if hit], read=True)
        self._core.epochs.missed(key for key, hit in zip(keys, hits, strict=True) if not hit)

    def _run(
        self, kind: str, keys: int, work: Callable[[], T], judge: Judge, otherwise: Callable[[], T], own: bool
    ) -> T:
        return self._core.run(kind, keys, work, judge, otherwise, bounded=own)

    def _flags(self, keys: int) -> Judge:
        def judge(out: Any) -> tuple[int, int]:
            if not isinstance(out, list | tuple) or len(out) != keys:
                raise TypeError("a store answered with another shape than one result per key")
            hit = sum(bool(item) for item in out)
            return hit, hit * self._core.settings.page_bytes

        return judge

    def _pool_flags(self, out: Any) -> tuple[int, int]:
        if not isinstance(out, dict):
            raise TypeError("a store answered with another shape than results per pool")
        hit = sum(bool(item) for flags in out.values() for item in flags)
        return hit, hit * self._core.settings.page_bytes

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # the guard's own, before it is set
            raise AttributeError(name)
        return getattr(self._inner, name)


def guard_storage(
    inner: Any,
    *,
    name: str = "",
    settings: GuardSettings | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Any:
    """A guard around ``inner``, of a class that is a ``HiCacheStorage`` and looks like ``inner``'s.

    Raises:
        ImportError: SGLang is not importable. TypeError: ``inner`` is guarded already.
    """
    from sglang.srt.mem_cache.hicache_storage import PoolTransferResult

    if isinstance(inner, StorageGuard):
        raise TypeError("guarded twice: counters and breakers would say everything double")
    made: Any = _class_for(type(inner))
    guard = made.__new__(made)
    guard._inner = inner
    guard._pools = PoolMemory()
    guard._empty_result = PoolTransferResult.empty

    def close() -> None:
        theirs = getattr(inner, "close", None)
        if theirs is not None:  # several stores have none
            theirs()

    guard._core = GuardCore(
        name or type(inner).__name__,
        settings or GuardSettings(),
        clock,
        close,
        lambda: inner.batch_exists([ABSENT]),
        lambda key: bool(inner.batch_exists([key])),
    )
    return guard


_classes: dict[type, Any] = {}  # by the store's class; a plain store under the interpreter lock


def _class_for(inner: type) -> Any:
    if inner in _classes:
        return _classes[inner]
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

    # The name is shown in the engine's cached_tokens_details; isinstance(.., MooncakeStore) opens an endpoint.
    body = {"__module__": inner.__module__, "__doc__": StorageGuard.__doc__, "__class__": property(lambda _: inner)}
    return _classes.setdefault(inner, type(inner.__name__, (StorageGuard, HiCacheStorage), body))


def _truth(out: Any) -> tuple[int, int]:
    return int(bool(out)), 0


def _count(most: int) -> Judge:
    def judge(out: Any) -> tuple[int, int]:
        number = int(out)
        if not 0 <= number <= most:
            raise ValueError("a store found more keys than it was asked for")
        return number, 0

    return judge


def _pages(keys: int) -> Judge:
    def judge(out: Any) -> tuple[int, int]:
        if not isinstance(out, list | tuple) or len(out) != keys:
            raise TypeError("a store answered with another shape than one page per key")
        found = [page for page in out if page is not None]
        return len(found), _nbytes(found)

    return judge


def _nbytes(tensors: Sequence[Any]) -> int:
    return sum(int(getattr(tensor, "nbytes", 0)) for tensor in tensors if tensor is not None)


def _entries_of(transfer: Any) -> int:
    if transfer.keys:
        return len(transfer.keys)
    return 0 if transfer.host_indices is None else int(transfer.host_indices.numel())


def _entries(transfers: Sequence[Any]) -> int:
    return sum(_entries_of(transfer) for transfer in transfers)


def _nothing(transfers: Sequence[Any]) -> dict[Any, list[bool]]:
    return {transfer.name: [False] * _entries_of(transfer) for transfer in transfers}
