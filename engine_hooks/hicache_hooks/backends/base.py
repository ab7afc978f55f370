"""The backend contract: one small class per store.

Pages travel as writable memoryviews of one contiguous *page buffer*: payload plus trailer
(``cache/pages.py``), so that one buffer goes to every store and every store's bytes are checked by us.
Results are per key, always as many as keys were given; a method raises only when the whole call failed. The
guard in front turns any exception into misses.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, ClassVar, Protocol

import msgspec

LARGE_BATCH = 34 << 20  # 32 pages of 1 MiB with their trailers


class Got(StrEnum):
    """Result of reading one key."""

    HIT = "hit"
    MISS = "miss"
    ERROR = "error"


class Manifest(msgspec.Struct, frozen=True):
    """What a backend can be used for; checked before anything is built (F47, F76)."""

    name: str
    layouts: tuple[str, ...]  # host layouts it accepts; layer_first needs a staging copy
    alignment: int = 1  # bytes, of page buffers
    needs_registration: bool = False
    shared: bool = True  # False: node-local store
    parallel_axes: tuple[str, ...] = ()  # of ("tp", "pp"), beside dp
    summary: str = ""
    batch_bytes: int = 8 << 20  # most bytes of one call; where more gain nothing they keep threads waiting at the end
    calls: int = 0  # reads, and writes, at a time that it gains from; 0: as many as there are threads


class StoreContext(msgspec.Struct, frozen=True):
    """What a backend may know about the rank that opens it."""

    namespace: str  # fingerprint; every key of this rank lives under it
    page_bytes: int  # payload + trailer: the length of every page buffer
    layout: str
    tp_rank: int = 0
    tp_size: int = 1
    pp_size: int = 1


class Backend(Protocol):
    """A store of pages. Methods may block; they are called from worker threads, several at a time.

    Optional: ``epoch() -> str``, a short name of what the store holds, which is another one once the content is gone
    (restarted from nothing, emptied, replaced) and the same after a restart that lost nothing; "" when it cannot be
    said now. Asked every few seconds, so it must be cheap. Without it the guard infers (``guard_epoch``, F70).

    Optional, together, where ``batch_exists`` answers from memory: ``confirm(keys) -> list[bool]``, the same asked of
    the store itself, and ``forget()``, which drops that memory: called when the content is gone. What the class removes
    itself (``delete``, ``set_aside``, ``clear``) or cannot read, it must stop promising by itself.
    """

    manifest: ClassVar[Manifest]

    def open(self) -> None:
        """Connect, create directories. Called once, in PREPARE."""

    def register(self, pool: memoryview) -> None:
        """The host pool's memory, before any put or get. May be called for several pools."""

    def batch_put(self, keys: Sequence[str], pages: Sequence[memoryview]) -> Sequence[bool | None]:
        """Store; a list with, per key, True: stored now, False: not taken (no room), None: this key failed.

        A key that exists already may be kept as it is. What was stored before a batch failed counts (``upkeep.py``).
        """

    def batch_get(self, keys: Sequence[str], pages: Sequence[memoryview]) -> list[Got]:
        """Fill ``pages``; a page whose result is not HIT holds garbage.

        It may take the keyword ``arrived``: to be called, on the same thread, with the key of each page that is in
        its buffer for good, so that it is checked while it is in the processor's cache. Most stores cannot say.
        """

    def batch_exists(self, keys: Sequence[str]) -> list[bool]:
        """Which keys are stored."""

    def delete(self, keys: Sequence[str]) -> int:
        """Remove keys; returns how many were there."""

    def set_aside(self, key: str, reason: str) -> None:
        """A page of this key failed its check: make sure that it is not read again, keep it for a look if cheap."""

    def clear(self) -> int:
        """Delete every page of this namespace, nothing else; returns how many."""

    def health(self) -> dict[str, Any]:
        """Cheap facts for status (``inner``, free space, direct I/O, ...). Raises when the store is not usable."""

    def close(self) -> None:
        """Release everything. Idempotent; later calls of other methods raise, never crash."""
