"""Host pages <-> a store: seals before a put, checks after a get, one batch at a time. Runs on worker threads.

A page that fails its check is a miss and is set aside, so that it is not read again (F80, F81).

A store that says when each page has arrived gets it checked there and then, while its bytes are in the processor's
cache: a look at 1 MiB costs half of one after a batch of 32. Where calls wait for turns, pages are checked after the
turn instead, beside the next call.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from hicache_hooks.backends.base import Got
from hicache_hooks.cache.pages import PageFormat
from hicache_hooks.cache.pools import HostPool
from hicache_hooks.cache.turns import Turns
from hicache_hooks.guard import Guard
from hicache_hooks.signatures import takes

STAGING_WAIT_S = 30.0  # layer_first: other batches hold the staging buffers at most for their backend call


class Store(Protocol):
    """What a set needs of the guard in front of a backend: results per key, never an exception.

    A store whose ``batch_*`` methods take the keyword ``prefix_keys`` gets the keys that precede the batch in its
    chain when ``hicache_storage_pass_prefix_keys`` is on.
    """

    def batch_put(self, keys: Sequence[str], pages: Sequence[memoryview]) -> list[bool]: ...
    def batch_get(self, keys: Sequence[str], pages: Sequence[memoryview]) -> list[Got]: ...
    def batch_exists(self, keys: Sequence[str]) -> list[bool]: ...
    def set_aside(self, key: str, reason: str) -> None: ...
    def set_bypass(self, enabled: bool) -> bool: ...
    def close(self) -> None: ...


class PageIo:
    """One store, one host pool, one page format."""

    def __init__(self, store: Store, host: HostPool, pages: PageFormat) -> None:
        """
        Raises:
            ValueError: pool and format disagree about the length of a page buffer.
        """
        if host.page_bytes != pages.page_bytes:
            raise ValueError(f"page buffers of {host.page_bytes} and {pages.page_bytes} bytes")
        self._store = store
        self._host = host
        self._pages = pages
        self._guard = store if isinstance(store, Guard) else None
        manifest = self._guard.manifest if self._guard is not None else None
        calls = manifest.calls if manifest is not None else 0
        self._gets, self._puts = Turns(calls), Turns(calls)  # sums are made and checked outside: beside another call
        self._early = self._guard is not None and calls != 1
        self._takes_prefix = {
            name: takes(getattr(store, name), "prefix_keys") for name in ("batch_put", "batch_get", "batch_exists")
        }

    def _extra(self, method: str, prefix_keys: Sequence[str] | None) -> dict[str, Any]:
        return {"prefix_keys": prefix_keys} if prefix_keys is not None and self._takes_prefix[method] else {}

    def exists(self, keys: Sequence[str], prefix_keys: Sequence[str] | None = None) -> int:
        """How many of the first ``keys`` are stored without a gap. What lies behind one is counted (F57)."""
        found = self._store.batch_exists(keys, **self._extra("batch_exists", prefix_keys))
        first = next((i for i, there in enumerate(found) if not there), len(found))
        if self._guard is not None and (behind := sum(found[first:])):
            self._guard.found(gap_pages=behind)
        return first

    def read(self, keys: Sequence[str], pages: Sequence[int], prefix_keys: Sequence[str] | None = None) -> list[bool]:
        """Fill host pages; True per page that holds its key's sealed content now."""
        if self._guard is not None and self._guard.refuses("get", len(keys)):
            return [False] * len(keys)
        buffers = self._host.buffers(pages, STAGING_WAIT_S)
        try:
            early = _Early(self._pages, keys, buffers.views) if self._early else None
            extra = self._extra("batch_get", prefix_keys)
            if early is not None:
                extra["arrived"] = early.arrived
            with self._gets.one():
                results = self._store.batch_get(keys, buffers.views, **extra)
            good = [
                got == Got.HIT and self._sound(key, view, early)
                for key, view, got in zip(keys, buffers.views, results, strict=True)
            ]
            buffers.push(good)
        finally:
            buffers.release()
        return good

    def _sound(self, key: str, view: memoryview, early: "_Early | None") -> bool:
        known = early is not None and early.checked(key, view)
        reason = early.reasons[key] if early is not None and known else self._pages.check(view, key)
        if reason is not None:
            self._store.set_aside(key, reason)
        return reason is None

    def write(self, keys: Sequence[str], pages: Sequence[int], prefix_keys: Sequence[str] | None = None) -> list[bool]:
        """Store host pages; True per key that is stored now."""
        if self._guard is not None and self._guard.refuses("put", len(keys)):  # before sums and copies are made
            return [False] * len(keys)
        buffers = self._host.buffers(pages, STAGING_WAIT_S)
        try:
            buffers.pull()
            for key, view in zip(keys, buffers.views, strict=True):
                self._pages.seal(view, key)
            with self._puts.one():
                return self._store.batch_put(keys, buffers.views, **self._extra("batch_put", prefix_keys))
        finally:
            buffers.release()


class _Early:
    """Checks of the pages of one read, made when the store says that they are there."""

    def __init__(self, pages: PageFormat, keys: Sequence[str], views: Sequence[memoryview]) -> None:
        self._pages = pages
        self._views = dict(zip(keys, views, strict=True))
        self.reasons: dict[str, str | None] = {}

    def arrived(self, key: str) -> None:
        """The page of ``key`` is in its buffer. May raise for a key that nobody asked for."""
        self.reasons[key] = self._pages.check(self._views[key], key)

    def checked(self, key: str, view: memoryview) -> bool:
        """True when this very buffer was looked at; a key that is asked for twice has two."""
        return key in self.reasons and self._views[key] is view
