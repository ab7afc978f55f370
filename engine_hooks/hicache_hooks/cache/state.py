"""What the parts of the cache controller share: pools, ledgers, tree, inbox and the one reference to the set."""

import time
from collections import Counter, deque
from collections.abc import Callable

from hicache_hooks.cache.ledger import PageLedger
from hicache_hooks.cache.operations import Operation, Overdue
from hicache_hooks.cache.pools import DevicePool, HostPool
from hicache_hooks.cache.radix import RadixTree
from hicache_hooks.cache.storage_set import StorageSet


class CacheState:
    """Written by the scheduler thread only; the inbox takes reports from any thread."""

    def __init__(
        self,
        device: DevicePool,
        host: HostPool,
        storage: StorageSet,
        namespace: str,
        clock: Callable[[], float] = time.monotonic,
        wake: Callable[[], None] | None = None,
    ) -> None:
        """
        Raises:
            ValueError: the two pools were made for different shapes.
        """
        if device.geometry != host.geometry:
            raise ValueError("device and host pool differ in geometry")
        self.device = device
        self.host = host
        self.storage = storage
        self.namespace = namespace
        self.clock = clock
        self.page_size = device.geometry.page_size
        self.tree = RadixTree(self.page_size)
        self.device_ledger = PageLedger(device.num_pages)
        self.host_ledger = PageLedger(host.num_pages)
        self.stats: Counter[str] = Counter()
        self.hashing = False  # new nodes are hashed at once; only while a store is (about to be) attached
        self.inbox: deque[Operation | Overdue] = deque()
        self._wake = wake

    def report(self, operation: Operation | Overdue) -> None:
        """*any*: an operation is through, or not to be waited for; the next ``pump`` takes it."""
        self.inbox.append(operation)
        if self._wake is not None:
            self._wake()
