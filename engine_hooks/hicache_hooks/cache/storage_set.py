"""One storage set: guard/backend, queues, worker threads, GPU transfer threads and knobs (design.md, rule 10).

Life: built parked in PREPARE (``start_parked``), ``activate`` by COMMIT, ``park`` when it is swapped out,
``stop`` and ``close`` by FINALIZE or UNDO, off the scheduler thread. A set without a store is the *detached* set:
it has GPU transfer threads only (L1 <-> L2 must go on), so that nothing of L3 is paid.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hicache_hooks.backends.base import Got
from hicache_hooks.cache.knobs import Knobs
from hicache_hooks.cache.pages import PageFormat
from hicache_hooks.cache.pools import DevicePool, HostPool
from hicache_proto.model import ThreadReport


class Store(Protocol):
    """What a set needs of the guard in front of a backend: results per key, never an exception."""

    def batch_put(self, keys: Sequence[str], pages: Sequence[memoryview]) -> list[bool]: ...
    def batch_get(self, keys: Sequence[str], pages: Sequence[memoryview]) -> list[Got]: ...
    def batch_exists(self, keys: Sequence[str]) -> list[bool]: ...
    def set_aside(self, key: str, reason: str) -> None: ...
    def set_bypass(self, enabled: bool) -> bool: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class SetLimits:
    """Bounds of a set; fractions are of the host pool's pages (F44)."""

    threads_per_direction: int = 3
    batch_pages: int = 16  # pages per backend call; one fetch is split into such batches among the threads
    prefetch_fraction: float = 0.5  # pages that prefetches may own together: the rest stays for serving
    backup_fraction: float = 0.5  # pages that backups may pin together; above it writes are dropped and counted
    stall_after_s: float = 10.0  # no completion for this long while there is work: reported as stalled (F39)


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
        limits: SetLimits = SetLimits(),  # noqa: B008 - frozen
    ) -> None:
        """``pages`` carries the namespace fingerprint; ``name`` (backend name) goes into thread names."""

    def start_parked(self) -> None:
        """Start every thread; they wait. *builder* thread.

        Raises:
            RuntimeError: a thread could not be started; those that were are stopped again.
        """

    def activate(self) -> None:
        """Take work from now on. Constant time, *scheduler* thread."""

    def park(self) -> None:
        """Take no new work; what was accepted is still finished. Constant time, *scheduler* thread."""

    def set_knobs(self, knobs: Knobs) -> Knobs:
        """Replace the live keys; returns the former ones."""
        raise NotImplementedError

    def set_bypass(self, enabled: bool) -> bool:
        """Reads miss, writes are skipped, nothing is queued (F77, F116). Returns what it was."""
        raise NotImplementedError

    def stop(self, timeout_s: float, *, drain_s: float = 0.0) -> list[str]:
        """Stop all threads against one deadline (F23). *closer* thread; may be called again.

        Entries still queued after ``drain_s`` end as cancelled, which frees their pages (F119).

        Returns:
            Names of threads that did not stop, their stacks are logged and in ``stuck_stacks()``.
        """
        raise NotImplementedError

    def close(self) -> bool:
        """Close the store. False, and the store stays open, while a thread may still use it (F117). Idempotent."""
        raise NotImplementedError

    def threads(self) -> list[ThreadReport]:
        """Liveness, restarts and stalls of every thread of this set."""
        raise NotImplementedError

    def stuck_stacks(self) -> dict[str, str]:
        """Stacks of the threads that the last ``stop`` found stuck."""
        raise NotImplementedError
