"""Cache controller of the embedded engine: L1 device pool, L2 host pool, radix tree, L3 through a storage set.

Owned by the scheduler thread; only methods marked *any* may be called elsewhere. A request's life::

    begin(rid, tokens)          on arrival: starts an L3 prefetch when it pays
    ready(rid) -> bool          each pass while waiting: prefetch policy says that it may run now
    admit(rid) -> Admission     match L1/L2, lock the path, start load-back of L2 pages; None: no room, try later
    loaded(rid) -> bool         each pass: the load-back ended
    alloc(rid, n)               device pages for new tokens; None: no room, try later (eviction may be under way)
    commit(rid, tokens)         full pages computed so far enter the tree; returns the page table to use from now on
    finish(rid, tokens)         commit, then release what the request holds
    abort(rid)                  release everything, at any point, once (F22, F42)

``pump()`` must be called in every loop pass, also when idle (F1).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hicache_hooks.cache.pools import DevicePool, HostPool
from hicache_hooks.cache.storage_set import StorageSet


@dataclass(frozen=True, slots=True)
class Admission:
    """What a request starts with. ``pages`` are device pages in prefix order; they are locked until finish/abort.

    The tokens of the prefix = ``len(pages) * page_size``; they split into the three counts (in tokens).
    ``loading``: L2 pages are still on their way; wait until ``loaded(rid)``.
    """

    pages: list[int]
    device_tokens: int
    host_tokens: int
    storage_tokens: int
    loading: bool


class CacheController:
    """See the module's text."""

    def __init__(
        self,
        device: DevicePool,
        host: HostPool,
        storage: StorageSet,
        *,
        namespace: str,
        clock: Callable[[], float] = time.monotonic,
        wake: Callable[[], None] | None = None,
    ) -> None:
        """``storage`` is the started first set, usually detached; ``wake`` is called when a completion arrives."""
        self.storage = storage  # the one reference (design.md, rule 10)

    def install(self, new: StorageSet) -> StorageSet:
        """Swap the one reference: ``new`` activated, the old one parked and returned. Constant time."""
        raise NotImplementedError

    def backfill_slice(self, budget_s: float) -> bool:
        """Hash tree nodes that have no page hashes, for at most ``budget_s``; True when none is missing (F13)."""
        raise NotImplementedError

    def begin(self, rid: str, tokens: Sequence[int]) -> None:
        """A request arrived. Starts a prefetch when a store is installed and the miss is long enough."""

    def ready(self, rid: str) -> bool:
        """True when the request may be admitted: no prefetch, or the policy says so. Ends the prefetch then."""
        raise NotImplementedError

    def admit(self, rid: str) -> Admission | None:
        """Match, lock, load back. At least one token of the prompt is left to compute."""
        raise NotImplementedError

    def loaded(self, rid: str) -> bool:
        """True when the pages of ``admit`` are all in device memory. A failed load is a recompute: see ``admit``."""
        raise NotImplementedError

    def alloc(self, rid: str, n: int) -> list[int] | None:
        """``n`` device pages for the request, in the order in which its tokens fill them."""
        raise NotImplementedError

    def commit(self, rid: str, tokens: Sequence[int]) -> list[int]:
        """``tokens`` = all tokens whose KV is computed; full pages enter the tree, the write policy acts.

        Returns:
            The request's device pages from the start; equal pages of the tree replace the request's own.
        """
        raise NotImplementedError

    def finish(self, rid: str, tokens: Sequence[int]) -> None:
        """``commit`` and release everything that the request holds."""

    def abort(self, rid: str) -> None:
        """Release everything that the request holds; unknown or ended: nothing."""

    def pump(self) -> int:
        """Process completions of transfers; returns how many. Each loop pass, also when idle (F1)."""
        raise NotImplementedError

    def flush(self) -> bool:
        """Empty L1 and L2. False, and nothing is touched, when a request or a transfer is alive."""
        raise NotImplementedError

    def counters(self) -> dict[str, int]:
        """*any*: the transfer counters of ``MANDATORY_COUNTERS``; all zero = no transfer in flight."""
        raise NotImplementedError

    def ages_ms(self) -> dict[str, int]:
        """*any*: age of the oldest item per non-zero counter."""
        raise NotImplementedError

    def stats(self) -> dict[str, int]:
        """*any*: totals (hits by tier, dropped writes, skipped prefetches, ended operations by outcome)."""
        raise NotImplementedError
