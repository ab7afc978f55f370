"""One storage set: guard/backend, queues, worker threads, GPU transfer threads and knobs (design.md, rule 10).

Life: built parked in PREPARE (``start_parked``), ``activate`` by COMMIT, ``park`` when it is swapped out,
``stop`` and ``close`` by FINALIZE or UNDO, off the scheduler thread. A set without a store is the *detached* set:
it has GPU transfer threads only (L1 <-> L2 must go on), so that nothing of L3 is paid.

A parked set refuses what is new and finishes what it accepted: in ``hot`` mode that is how the old one drains.
"""

import itertools
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from hicache_hooks.cache.knobs import Knobs
from hicache_hooks.cache.operations import Batch, Copy, CopyItem, LookUp
from hicache_hooks.cache.page_io import PageIo, Store
from hicache_hooks.cache.pages import PageFormat
from hicache_hooks.cache.pools import DevicePool, HostPool
from hicache_hooks.cache.transfer import Copier
from hicache_hooks.cache.workers import Run, Workers, current_run
from hicache_hooks.guard import Guard
from hicache_proto.model import ThreadReport

__all__ = ["SetLimits", "StorageSet", "Store"]

_ids = itertools.count(1)


@dataclass(frozen=True, slots=True)
class SetLimits:
    """Bounds of a set; fractions are of the host pool's pages (F44)."""

    threads_per_direction: int = 3
    batch_pages: int = 32  # most pages per backend call; one fetch is split into such batches among the threads
    batch_bytes: int = 8 << 20  # and most bytes, where the backend's manifest says no other number
    prefetch_fraction: float = 0.5  # pages that prefetches may own together: the rest stays for serving
    backup_fraction: float = 0.5  # pages that backups may pin together; above it writes are dropped and counted
    stall_after_s: float = 10.0  # no completion for this long while there is work: reported as stalled (F39)
    wait_complete_max_s: float = 60.0  # the ``wait_complete`` policy gives up then: no wait without an end


class StorageSet:
    """See the module's text. Methods are callable from any thread unless they say otherwise."""

    def __init__(
        self,
        *,
        store: Store | None,
        device: DevicePool,
        host: HostPool,
        pages: PageFormat,
        knobs: Knobs,
        name: str = "detached",
        limits: SetLimits = SetLimits(),
    ) -> None:
        """``pages`` carries the namespace fingerprint; ``name`` (backend name) goes into thread names.

        Raises:
            ValueError: pool and page format disagree.
        """
        self.id = next(_ids)
        self.name = name
        self.store = store
        self.guard = store if isinstance(store, Guard) else None
        self.knobs = knobs
        self.limits = limits
        self.namespace = pages.namespace
        manifest = self.guard.manifest if self.guard is not None else None
        batch_bytes = manifest.batch_bytes if manifest is not None else limits.batch_bytes
        self.batch_pages = max(1, min(limits.batch_pages, batch_bytes // pages.page_bytes))
        self.io = PageIo(store, host, pages) if store is not None else None
        self.active = False
        self.bypassed = False
        self.cancelled_total = 0  # queued entries that ``stop`` ended as cancelled
        self._closed = False
        self._close_lock = threading.Lock()
        self.to_host = Copier(device, host)
        self.to_device = Copier(device, host)
        label = f"hicache-{name}-{self.id}"

        def workers(kind: str, count: int) -> Workers[Batch | CopyItem | LookUp]:
            return Workers(f"{label}-{kind}", count, stall_after_s=limits.stall_after_s)

        count = limits.threads_per_direction if store is not None else 0
        self._reads = workers("prefetch", count)
        self._writes = workers("backup", count)
        self._copies_out = workers("d2h", 1)
        self._copies_in = workers("h2d", 1)
        self._all = (self._reads, self._writes, self._copies_out, self._copies_in)
        if self.guard is not None:
            self.guard.on_late(current_run, _give_up)
            self.guard.on_lost(self.forget)

    # -- life ------------------------------------------------------------------------------------------------

    def start_parked(self) -> None:
        """Start every thread; they wait. *builder* thread.

        Raises:
            RuntimeError: a thread could not be started; those that were are stopped again.
        """
        try:
            for workers in self._all:
                workers.start()
        except RuntimeError:
            self.stop(timeout_s=5.0)
            raise

    def activate(self) -> None:
        """Take work from now on. Constant time, *scheduler* thread."""
        self.active = True

    def park(self) -> None:
        """Take no new work; what was accepted is still finished. Constant time, *scheduler* thread."""
        self.active = False

    def stop(self, timeout_s: float, *, drain_s: float = 0.0) -> list[str]:
        """Stop all threads against one deadline (F23). *closer* thread; may be called again.

        Storage entries still queued after ``drain_s`` end as cancelled, which frees their pages (F119). Copies
        between L1 and L2 are always let through: they are local and short.

        Returns:
            Names of threads that did not stop, whose stacks are logged.
        """
        deadline = time.monotonic() + timeout_s
        self.active = False
        until = min(deadline, time.monotonic() + drain_s)
        for workers in (self._reads, self._writes):
            if drain_s > 0:
                workers.wait_idle(until)
            self.cancelled_total += workers.signal_stop()
        for workers in (self._copies_out, self._copies_in):
            workers.wait_idle(deadline)
            self.cancelled_total += workers.signal_stop()
        return [name for workers in self._all for name in workers.join(deadline)]

    def close(self) -> bool:
        """Close the store. False, and the store stays open, while a thread may still use it (F117). Idempotent."""
        with self._close_lock:
            if any(workers.alive for workers in self._all):
                return False
            if not self._closed and self.store is not None:
                self.store.close()
            self._closed = True
            # A probe of the guard's own may still be inside: then the last call to leave closes the backend.
            return self.guard is None or self.guard.closed

    def forget(self) -> None:
        """The store lost all that it held (F70): a new identity, so that no node counts as stored in it any more."""
        self.id = next(_ids)

    # -- settings --------------------------------------------------------------------------------------------

    def set_knobs(self, knobs: Knobs) -> Knobs:
        """Replace the live keys; returns the former ones."""
        self.knobs, former = knobs, self.knobs
        if self.guard is not None and knobs.guard != former.guard:
            self.guard.configure(knobs.guard)
        return former

    def set_bypass(self, enabled: bool) -> bool:
        """Reads miss, writes are skipped, nothing is queued (F77, F116). Returns what it was."""
        was, self.bypassed = self.bypassed, enabled
        if self.store is not None:
            self.store.set_bypass(enabled)
        return was

    # -- work (scheduler thread) -----------------------------------------------------------------------------

    @property
    def stores(self) -> bool:
        """True when new L3 work is taken."""
        return self.io is not None and self.active and not self.bypassed

    def refuses(self, kind: str, pages: int) -> bool:
        """True when the guard would skip a call of this kind (breaker); counted as skipped then."""
        return self.guard is not None and self.guard.refuses(kind, pages)

    def looked_up(self, *, below_threshold: bool = False) -> None:
        """See ``Guard.looked_up``."""
        if self.guard is not None:
            self.guard.looked_up(below_threshold=below_threshold)

    def hit_too_short(self) -> None:
        """A look-up found less than the threshold."""
        if self.guard is not None:
            self.guard.found(too_short=True)

    def read(self, items: Sequence[Batch | LookUp]) -> bool:
        """Queue prefetch work; False when stopped. Also for an operation that began before a swap."""
        return self._reads.submit(items)

    def write(self, items: Sequence[Batch]) -> bool:
        """Queue backup work; False when stopped."""
        return self._writes.submit(items)

    def copy_out(self, copy: Copy) -> bool:
        """Queue an L1 -> L2 copy; False when stopped."""
        return self._copies_out.submit([CopyItem(copy)])

    def copy_in(self, copy: Copy) -> bool:
        """Queue an L2 -> L1 copy; False when stopped."""
        return self._copies_in.submit([CopyItem(copy)])

    # -- views -----------------------------------------------------------------------------------------------

    @property
    def queued(self) -> int:
        """Entries of the storage queues."""
        return self._reads.queued + self._writes.queued

    @property
    def calls(self) -> int:
        """Worker threads inside a backend call."""
        return self._reads.calls + self._writes.calls

    @property
    def working(self) -> bool:
        """True while any thread of the set has something to do."""
        return any(workers.working for workers in self._all)

    def threads(self) -> list[ThreadReport]:
        """Liveness, restarts and stalls of every thread of this set, those in calls that were given up too."""
        return [report for workers in self._all for report in workers.reports()]

    def still_inside(self) -> list[str]:
        """Threads because of which ``close`` said False, by name."""
        alive = [report.name for report in self.threads() if report.alive]
        return alive or (self.guard.inside() if self.guard is not None else []) or ["closing"]


def _give_up(run: Run | None) -> None:
    """The guard says that the call of this run is late (rule 6 of workers.py)."""
    if run is not None:
        run.workers.give_up(run)
