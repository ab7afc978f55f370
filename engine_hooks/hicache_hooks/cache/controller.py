"""Cache controller of the embedded engine: L1 device pool, L2 host pool, radix tree, L3 through a storage set.

Owned by the scheduler thread; only methods marked *any* may be called elsewhere. A request's life::

    begin(rid, tokens)          on arrival: starts an L3 prefetch when it pays
    ready(rid) -> bool          each pass while waiting: prefetch policy says that it may run now
    admit(rid) -> Admission     match L1/L2, lock the path, start load-back of L2 pages; None: no room, try later
    loaded(rid) -> Admission    each pass: the final one once the load-back ended; None: not yet
    alloc(rid, n)               device pages for new tokens; None: no room, try later (eviction may be under way)
    commit(rid, tokens)         full pages computed so far enter the tree; returns the page table to use from now on
    finish(rid, tokens)         commit, then release what the request holds
    abort(rid)                  release everything, at any point, once (F22, F42)

``pump()`` must be called in every loop pass, also when idle (F1). Nothing here waits for a store or a copy.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from hicache_hooks.cache.checkpoint import Checkpoint
from hicache_hooks.cache.evict import Evictor
from hicache_hooks.cache.ledger import Ended, PageLedger
from hicache_hooks.cache.operations import Backup, Copy, Operation, Overdue, PagedOperation, Prefetch
from hicache_hooks.cache.pools import DevicePool, HostPool
from hicache_hooks.cache.prefetch import Prefetcher
from hicache_hooks.cache.radix import Match, RadixTree
from hicache_hooks.cache.requests import Admission, Loader, Request
from hicache_hooks.cache.state import CacheState
from hicache_hooks.cache.storage_set import StorageSet
from hicache_hooks.cache.writer import Writer

log = logging.getLogger(__name__)


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
        """``storage`` is the started first set, usually detached; ``wake`` is called when a completion arrives.

        Raises:
            ValueError: the pools were made for different shapes.
        """
        self._s = CacheState(device, host, storage, namespace, clock, wake)
        self._evictor = Evictor(self._s)
        self._writer = Writer(self._s, self._evictor)
        self._prefetcher = Prefetcher(self._s, self._evictor)
        self._loader = Loader(self._s)
        self._requests: dict[str, Request] = {}
        self.checkpoint: Checkpoint | None = None
        self._s.hashing = storage.io is not None
        storage.activate()

    # -- storage set -----------------------------------------------------------------------------------------

    @property
    def storage(self) -> StorageSet:
        """*any*: the installed set."""
        return self._s.storage

    def install(self, new: StorageSet) -> StorageSet:
        """Swap the one reference: ``new`` activated, the old one parked and returned. Constant time."""
        old = self._s.storage
        if new is not old:
            old.park()
            new.activate()
            self._s.storage = new
            self._s.hashing = new.io is not None
        return old

    def backfill_slice(self, budget_s: float) -> bool:
        """Hash tree nodes that have no page hashes, for at most ``budget_s``; True when none is missing (F13).

        From the first slice on new nodes are hashed as they enter the tree, until a detached set is installed.
        """
        self._s.hashing = True
        return self._s.tree.backfill(budget_s, time.monotonic)

    def stop_hashing(self) -> None:
        """An attach was given up: with no store installed, new nodes are not hashed any more."""
        self._s.hashing = self._s.storage.io is not None

    def checkpoint_slice(self, target: StorageSet, budget_s: float) -> bool:
        """Store what ``target`` lacks of the tree, for at most ``budget_s``; True when it has all of it (F58).

        Raises:
            PrepareFailed: see ``Checkpoint.advance``.
        """
        if self.checkpoint is None or self.checkpoint.target is not target:
            self.checkpoint = Checkpoint(self._s, self._evictor, self._writer, target)
        return self.checkpoint.advance(budget_s, time.monotonic)

    def end_checkpoint(self) -> None:
        """Begin nothing more of it. What is in flight ends as any other backup."""
        self.checkpoint = None

    # -- a request's life ------------------------------------------------------------------------------------

    def begin(self, rid: str, tokens: Sequence[int]) -> None:
        """A request arrived. Starts a prefetch when a store is installed and the miss is long enough.

        A request that is known already is left alone: one external attempt per request (F81).
        """
        if rid in self._requests:
            return
        request = Request(tuple(tokens), self._s.tree.root)
        self._requests[rid] = request
        request.prefetch = self._prefetcher.start(rid, self._cacheable(request))

    def _cacheable(self, request: Request) -> tuple[int, ...]:
        """Whole pages of the prompt; at least one token is left to compute."""
        size = self._s.page_size
        return request.tokens[: (len(request.tokens) - 1) // size * size]

    def ready(self, rid: str) -> bool:
        """True when the request may be admitted: no prefetch, or the policy says so. Ends the prefetch then."""
        request = self._requests.get(rid)
        return request is None or request.prefetch is None or self._prefetcher.ready(request.prefetch)

    def fetching(self, rid: str) -> bool:
        """True while a prefetch for the request is under way, whatever its policy says about waiting."""
        request = self._requests.get(rid)
        op = request.prefetch if request is not None else None
        return op is not None and op.verdict is None and op.number in self._prefetcher.running

    def match_prefix(self, tokens: Sequence[int]) -> Match:
        """What L1 and L2 hold of ``tokens``; changes nothing."""
        return self._s.tree.match(tokens, split=False, use=False)

    def admit(self, rid: str) -> Admission | None:
        """Match, lock, load back. At least one token of the prompt is left to compute.

        Raises:
            KeyError: the request was not begun.
        """
        s, request = self._s, self._requests[rid]
        if request.admission is not None:
            return request.admission
        match = s.tree.match(self._cacheable(request))
        s.tree.lock_device(match.device_node)
        s.tree.lock_host(match.node)
        if not self._writer.device_room(len(match.host)):
            s.tree.lock_device(match.device_node, -1)
            s.tree.lock_host(match.node, -1)
            return None
        number = s.device_ledger.begin("request")
        pages = s.device_ledger.take(number, len(match.host)) or []
        request.number, request.node = number, match.device_node
        request.pages, request.committed = match.device + pages, len(match.device)
        path = s.tree.path(match.node)
        for node in path:
            node.hits += 1
        request.admitted(match, s.page_size)
        if pages:
            self._loader.start(request, match, pages)
        else:
            s.tree.lock_host(match.node, -1)
        self._writer.used(path)
        return request.admission

    def loaded(self, rid: str) -> Admission | None:
        """The final admission once the load-back ended; None: not yet.

        After a failed load its pages are fewer: the rest of the prompt is recomputed.

        Raises:
            KeyError: the request was not begun.
        """
        request = self._requests[rid]
        return None if request.load is not None else request.admission

    def alloc(self, rid: str, n: int) -> list[int] | None:
        """``n`` device pages for the request, in the order in which its tokens fill them.

        Raises:
            KeyError: the request was not begun.
        """
        request = self._requests[rid]
        if not self._writer.device_room(n):
            return None
        pages = self._s.device_ledger.take(request.number, n)
        if pages is not None:
            request.pages.extend(pages)
        return pages

    def commit(self, rid: str, tokens: Sequence[int]) -> list[int]:
        """``tokens`` = all tokens whose KV is computed; full pages enter the tree, the write policy acts.

        Returns:
            The request's device pages from the start; equal pages of the tree replace the request's own.

        Raises:
            KeyError: the request was not begun.
        """
        s, request = self._s, self._requests[rid]
        size = s.page_size
        at, full = request.committed, min(len(tokens) // size, len(request.pages))
        if at >= full:
            return list(request.pages)
        key = tuple(tokens[at * size : full * size])
        node, touched = request.node, []
        while key:
            child, same = s.tree.descend(node, key)
            if child is None:
                same = full - at
                child = s.tree.grow(node, key)
            else:
                child.hits += 1
            mine = request.pages[at : at + same]
            if child.device is None:
                s.device_ledger.to_tree(request.number, mine)
                child.device = mine
            elif child.device != mine:
                s.device_ledger.release(request.number, mine)
                request.pages[at : at + same] = child.device
            if s.hashing:
                s.tree.last_hash(child)
            touched.append(child)
            node, at, key = child, at + same, key[same * size :]
        s.tree.lock_device(node)
        s.tree.lock_device(request.node, -1)
        request.node, request.committed = node, full
        self._writer.used(touched)
        return list(request.pages)

    def finish(self, rid: str, tokens: Sequence[int]) -> None:
        """``commit`` and release everything that the request holds.

        Raises:
            KeyError: the request was not begun.
        """
        self.commit(rid, tokens)
        self._release(self._requests.pop(rid), Ended.DONE)

    def abort(self, rid: str) -> None:
        """Release everything that the request holds; unknown or ended: nothing.

        Pages that a thread may still write to are freed when it reported (F27).
        """
        request = self._requests.pop(rid, None)
        if request is not None:
            self._release(request, Ended.CANCELLED)

    def _release(self, request: Request, outcome: Ended) -> None:
        if request.prefetch is not None:
            self._prefetcher.end_now(request.prefetch, Ended.CANCELLED)
        self._loader.release(request, outcome)

    # -- completions -----------------------------------------------------------------------------------------

    def pump(self) -> int:
        """Process completions of transfers; returns how many. Each loop pass, also when idle (F1)."""
        s = self._s
        done = 0
        while s.inbox:
            operation = s.inbox.popleft()
            done += 1
            try:
                self._reported(operation)
            except Exception:  # a defect of ours must not end the scheduler; tests demand that it stays at 0
                s.stats["internal_errors"] += 1
                log.exception("completion of %s went wrong", type(operation).__name__)
        if done and not (s.device_ledger.balanced and s.host_ledger.balanced):
            s.stats["internal_errors"] += 1
            log.error("page ledgers do not add up (F42)")
        return done

    def _reported(self, operation: Operation | Overdue) -> None:
        match operation:
            case Overdue():
                self._prefetcher.overdue(operation.operation)
                if self.checkpoint is not None:
                    self.checkpoint.overdue(operation.operation)
            case Prefetch():
                self._prefetcher.reported(operation)
            case Backup():
                self._writer.backed_up(operation)
                if self.checkpoint is not None:
                    self.checkpoint.ended(operation)
            case Copy() if operation.to_host:
                self._writer.written(operation)
            case Copy():
                self._loader.back(operation)

    def flush(self) -> bool:
        """Empty L1 and L2. False, and nothing is touched, when a request or a transfer is alive.

        Pages of a backup that was given up go to the backup: a thread may still read them.
        """
        if self._requests or any(self.counters().values()):
            return False
        s = self._s
        self._writer.leave_tree()
        if self.checkpoint is not None:
            self.checkpoint.forget()
        for node in s.tree.nodes():
            s.device_ledger.free_tree(node.device or [])
            s.host_ledger.free_tree(node.host or [])
        s.tree.clear()
        return True

    # -- views -----------------------------------------------------------------------------------------------

    def _ongoing(self) -> dict[str, list[Operation]]:
        return {
            "ongoing_write_through": list(self._writer.writes.values()),
            "ongoing_load_back": [copy for copy, _ in list(self._loader.running.values())],
            "ongoing_prefetch": _awaited(self._prefetcher.running),
            "ongoing_backup": _awaited(self._writer.backups),
        }

    def counters(self) -> dict[str, int]:
        """*any*: the transfer counters of ``MANDATORY_COUNTERS``; all zero = no transfer in flight.

        An operation that was given up is none: nobody waits for it, its result is dropped, its pages and its store
        stay as they are until its thread is back. Else a store that hangs could never be detached (F77).
        """
        ongoing = {name: len(operations) for name, operations in self._ongoing().items()}
        set_ = self._s.storage
        # Queue entries belong to operations that are counted above; one without an operation would show here.
        orphans = 0 if any(ongoing.values()) else set_.queued
        return {**ongoing, "storage_queues": orphans, "storage_calls": set_.calls}

    def ages_ms(self) -> dict[str, int]:
        """*any*: age of the oldest item per non-zero counter."""
        now = self._s.clock()
        return {
            name: int(1000 * (now - min(operation.started for operation in operations)))
            for name, operations in self._ongoing().items()
            if operations
        }

    def stats(self) -> dict[str, int]:
        """*any*: totals (dropped writes, skipped prefetches, pages moved, ended operations by kind and outcome)."""
        ended = {f"{kind}_{outcome}": n for (kind, outcome), n in dict(self._s.host_ledger.ended).items()}
        return {**self._s.stats, **ended}

    @property
    def tree(self) -> RadixTree:
        """The tree, for tests and checks."""
        return self._s.tree

    @property
    def device_ledger(self) -> PageLedger:
        """Owners of the device pages."""
        return self._s.device_ledger

    @property
    def host_ledger(self) -> PageLedger:
        """Owners of the host pages."""
        return self._s.host_ledger

    def check(self) -> None:
        """Check both ledgers, and that the tree holds exactly the pages that they say (F42).

        Raises:
            LedgerError: an invariant does not hold.
        """
        s = self._s
        s.device_ledger.check()
        s.host_ledger.check()
        s.device_ledger.check_tree(page for node in s.tree.nodes() for page in node.device or [])
        s.host_ledger.check_tree(page for node in s.tree.nodes() for page in node.host or [])


def _awaited(operations: Mapping[int, PagedOperation]) -> list[Operation]:
    return [operation for operation in list(operations.values()) if not operation.late]
