"""Operations of the cache: what a worker thread is given, and what it reports back.

An operation is made by the scheduler thread, cut into batches that worker threads run, and reported once, when
its last batch ended (ran, failed or was cancelled). Only the scheduler thread then touches tree and ledgers.
Until that report the operation keeps every page that a worker might still write to (F27, F42).
"""

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hicache_hooks.cache.hashing import chain_hashes, page_key
from hicache_hooks.cache.ledger import Ended

if TYPE_CHECKING:
    from hicache_hooks.cache.page_io import PageIo
    from hicache_hooks.cache.radix import Node
    from hicache_hooks.cache.storage_set import StorageSet
    from hicache_hooks.cache.transfer import Copier

EXISTS_BATCH = 128  # keys per existence query: SGLang's batch; one call covers 2048 tokens of 16-token pages


Report = Callable[["Operation | Overdue"], None]


class Operation:
    """Base: counts batches down and reports once. ``number`` is the ledger's."""

    def __init__(self, number: int, started: float, report: "Report") -> None:
        self.number = number
        self.started = started
        self.error: BaseException | None = None
        self.cancelled = 0  # batches that never ran
        self._report = report
        self._lock = threading.Lock()
        self._left = 0

    def expect(self, batches: int) -> None:
        """How many batches will be acknowledged before the next report."""
        self._left = batches

    def acknowledge(self, *, error: BaseException | None = None, cancelled: bool = False) -> None:
        """A batch ended. *worker* or *closer* thread."""
        with self._lock:
            self._left -= 1
            self.cancelled += cancelled
            self.error = self.error or error
            last = self._left == 0
        if last:
            self._report(self)

    def outcome(self, good: int, total: int) -> Ended:
        """The one outcome of five, for ``good`` of ``total`` pages."""
        if good == total and self.error is None and not self.cancelled:
            return Ended.DONE
        if good:
            return Ended.PARTIAL
        return Ended.CANCELLED if self.cancelled and self.error is None else Ended.FAILED


class Overdue:
    """Reported while an operation runs: the store has had its deadline, so do not wait for it any more.

    The operation itself is reported later, when its last thread is back; until then its pages stay its own.
    """

    def __init__(self, operation: "PagedOperation") -> None:
        self.operation = operation


class Copy(Operation):
    """L1 -> L2 or L2 -> L1, one batch. ``node`` is the tree node where the pages end."""

    def __init__(
        self,
        number: int,
        started: float,
        report: "Report",
        *,
        copier: "Copier",
        node: "Node",
        device_pages: list[int],
        host_pages: list[int],
        to_host: bool,
        evict: bool = False,
        store: bool = True,
    ) -> None:
        super().__init__(number, started, report)
        self.node = node
        self.device_pages = device_pages
        self.host_pages = host_pages
        self.to_host = to_host
        self.evict = evict  # write_back: the device pages go once they are on the host
        self.store = store  # what arrives on the host goes on to the installed store
        self._copier = copier
        self._after = copier.mark()  # recorded on the scheduler's stream: the copy starts after what is queued there
        self.expect(1)

    @property
    def succeeded(self) -> bool:
        """After the report: the bytes are there."""
        return self.error is None and not self.cancelled

    def copy(self) -> None:
        """*worker*: move the bytes; returns when they are there."""
        move = self._copier.to_host if self.to_host else self._copier.to_device
        move(self.device_pages, self.host_pages, self._after)


class Batch:
    """A run of pages of a paged operation: the unit of one backend call."""

    def __init__(self, operation: "PagedOperation", first: int, last: int) -> None:
        self._operation = operation
        self.first = first
        self.last = last

    def run(self) -> None:
        self._operation.run_batch(self.first, self.last)
        self._operation.acknowledge()

    def failed(self, error: BaseException) -> None:
        self._operation.spoil(self.first)
        self._operation.acknowledge(error=error)

    def cancelled(self) -> None:
        self._operation.spoil(self.first)
        self._operation.acknowledge(cancelled=True)

    def late(self) -> None:
        self._operation.spoil(self.first)
        self._operation.give_up()


class PagedOperation(Operation):
    """Pages with keys that go to or come from a store, in batches shared out among the threads."""

    def __init__(self, number: int, started: float, report: "Report", *, set_: "StorageSet", io: "PageIo") -> None:
        super().__init__(number, started, report)
        self._overdue = report
        self.set = set_  # the set it started in: it ends there, also after a swap
        self.stored_in = set_.id  # what its pages' nodes are marked with; out of date once the store lost all (F70)
        self.io = io
        self.keys: list[str] = []
        self.pages: list[int] = []
        self.prefix_keys: list[str] | None = None  # None: the knob is off
        self.late = False  # a thread of it is in a call that was given up
        self._good = bytearray()
        self._prefix = 0  # pages good without a gap from the start
        self._limit = 0  # first page known to be bad

    def cut(self, batch_pages: int) -> list[Batch]:
        """Batches over all pages; call once ``keys`` and ``pages`` are known."""
        n = len(self.pages)
        self._good = bytearray(n)
        self._limit = n
        cuts = [Batch(self, first, min(first + batch_pages, n)) for first in range(0, n, batch_pages)]
        self.expect(len(cuts))
        return cuts

    def _before(self, first: int) -> list[str] | None:
        return None if self.prefix_keys is None else self.prefix_keys + self.keys[:first]

    def run_batch(self, first: int, last: int) -> None:
        raise NotImplementedError

    def give_up(self) -> None:
        """One of its calls is past its deadline: batches that have not begun are skipped. *guard's* thread."""
        self.late = True
        self._overdue(Overdue(self))

    def spoil(self, page: int) -> None:
        """No page from ``page`` on can extend the prefix any more."""
        with self._lock:
            self._limit = min(self._limit, page)

    def record(self, first: int, good: Sequence[bool]) -> None:
        """Results of the batch that starts at ``first``."""
        with self._lock:
            for i, ok in enumerate(good, first):
                self._good[i] = ok
                if not ok:
                    self._limit = min(self._limit, i)
            while self._prefix < len(self._good) and self._good[self._prefix]:
                self._prefix += 1

    @property
    def prefix(self) -> int:
        """Pages that are good without a gap, so far."""
        with self._lock:
            return self._prefix

    @property
    def good(self) -> int:
        """Pages that are good, so far."""
        return sum(self._good)


class Backup(PagedOperation):
    """L2 -> L3. A page that fails leaves the others alone: a later write may fill the gap."""

    def __init__(self, *args: Any, node: "Node", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.node = node
        self.left_tree = False  # its pages are its own: the tree was emptied meanwhile
        self.ahead = False  # a checkpoint's: its set is not installed yet

    def run_batch(self, first: int, last: int) -> None:
        if self.late:
            return
        self.record(first, self.io.write(self.keys[first:last], self.pages[first:last], self._before(first)))


class Prefetch(PagedOperation):
    """L3 -> L2 for one request: first a look-up (which owns no pages), then the fetch of what exists.

    ``end_now`` is how the scheduler ends it early: pages that are good are claimed at once, batches that have not
    begun are skipped, and the operation reports when the running ones are through.
    """

    def __init__(
        self,
        *args: Any,
        rid: str,
        tokens: tuple[int, ...],
        start: int,
        parent: bytes,
        namespace: str,
        page_size: int,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.rid = rid
        self.tokens = tokens  # from the prompt's start to the end of the range
        self.start = start  # pages in L1 and L2 already
        self.page_size = page_size
        self.fetching = False
        self.asked = 0  # pages of the fetch
        self.hits = 0  # pages that the store has
        self.hashes: list[bytes] = []
        self.claimed: int | None = None
        self.verdict: Ended | None = None  # set when it was ended early
        self._parent = parent
        self._namespace = namespace
        self._stop = False
        self.expect(1)

    @property
    def wanted_tokens(self) -> int:
        """Tokens of the range that L1 and L2 do not have."""
        return len(self.tokens) - self.start * self.page_size

    def end_now(self) -> int:
        """Stop as soon as possible; pages that may be claimed now. *scheduler*."""
        self._stop = True
        return self.prefix if self.fetching else 0

    def look_up(self) -> None:
        """*worker*: hash the range and ask the store for it."""
        self.hashes = chain_hashes(self.tokens[self.start * self.page_size :], self.page_size, self._parent)
        self.keys = [page_key(self._namespace, h) for h in self.hashes]
        for first in range(0, len(self.keys), EXISTS_BATCH):
            batch = self.keys[first : first + EXISTS_BATCH]
            if self._stop or self.late:
                return
            found = self.io.exists(batch, self._before(first))
            self.hits = first + found
            if found < len(batch):
                return

    def run_batch(self, first: int, last: int) -> None:
        # Behind a bad page nothing can be used: the chain is broken there (F80).
        if self._stop or self.late or first >= self._limit:
            return
        self.record(first, self.io.read(self.keys[first:last], self.pages[first:last], self._before(first)))


class LookUp:
    """The first item of a prefetch."""

    def __init__(self, prefetch: Prefetch) -> None:
        self._prefetch = prefetch

    def run(self) -> None:
        self._prefetch.look_up()
        self._prefetch.acknowledge()

    def failed(self, error: BaseException) -> None:
        self._prefetch.acknowledge(error=error)

    def cancelled(self) -> None:
        self._prefetch.acknowledge(cancelled=True)

    def late(self) -> None:
        self._prefetch.give_up()


class CopyItem:
    """The one item of a copy."""

    def __init__(self, copy: Copy) -> None:
        self._copy = copy

    def run(self) -> None:
        self._copy.copy()
        self._copy.acknowledge()

    def failed(self, error: BaseException) -> None:
        self._copy.acknowledge(error=error)

    def cancelled(self) -> None:
        self._copy.acknowledge(cancelled=True)

    def late(self) -> None:
        """No store is in it: it is never given up."""
