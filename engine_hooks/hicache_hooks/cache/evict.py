"""Making room in L1 and L2. Never waits: a caller that gets no room tries again in a later pass (F44)."""

from collections.abc import Callable

from hicache_hooks.cache.radix import Node
from hicache_hooks.cache.state import CacheState


class Evictor:
    """Eviction at both tiers, least recently used first, leaves before their parents."""

    def __init__(self, state: CacheState) -> None:
        self._s = state
        self.leaving = 0  # device pages whose write_back is under way: room that is about to come

    def host_room(self, n: int, may: Callable[[Node], bool] = lambda node: True) -> int:
        """Try to have ``n`` free host pages; returns how many are free then.

        First nodes that live on the host only, then host copies of nodes that are on the device as well; only nodes
        that ``may`` go.
        """
        s = self._s
        if s.host_ledger.free >= n:
            return s.host_ledger.free
        leaves = s.tree.host_leaves()
        while s.host_ledger.free < n and (node := leaves.pop()) is not None:
            parent = node.parent
            if not may(node):
                continue
            self._drop_host(node)
            s.tree.remove(node)
            leaves.evicted(parent)
        if s.host_ledger.free < n:
            copies = [x for x in s.tree.nodes() if x.device is not None and x.host is not None and x.host_lock == 0]
            for node in sorted(copies, key=lambda x: x.last_use):
                if s.host_ledger.free >= n:
                    break
                if may(node):
                    self._drop_host(node)
        return s.host_ledger.free

    def _drop_host(self, node: Node) -> None:
        if node.host is not None:
            self._s.stats["evicted_host_pages"] += len(node.host)
            self._s.host_ledger.free_tree(node.host)
            node.host = None

    def drop_device(self, node: Node) -> None:
        """Free the device pages of a node that stays on the host."""
        if node.device is not None:
            self._s.stats["evicted_device_pages"] += len(node.device)
            self._s.device_ledger.free_tree(node.device)
            node.device = None

    def device_victims(self, n: int) -> "DeviceVictims":
        """Victims until ``n`` device pages are free or about to be."""
        return DeviceVictims(self, self._s, n)

    def drop_branch(self, node: Node) -> bool:
        """Remove a device leaf that has no host copy, with the host-only nodes below it: without it they cannot be
        reached. False, and nothing dropped, when one of them is locked."""
        branch = [node]
        for below in branch:
            if below.host_lock or below.device_lock:
                return False
            branch.extend(below.children.values())
        for below in reversed(branch):
            self.drop_device(below)
            self._drop_host(below)
            self._s.tree.remove(below)
        return True


class DeviceVictims:
    """Iterates over evictable device nodes while room is missing."""

    def __init__(self, evictor: Evictor, state: CacheState, n: int) -> None:
        self._evictor = evictor
        self._s = state
        self._n = n
        self._leaves = state.tree.device_leaves()

    def next(self) -> Node | None:
        """The next victim; None when there is room or nobody is left."""
        if self._s.device_ledger.free + self._evictor.leaving >= self._n:
            return None
        return self._leaves.pop()

    def gone(self, parent: Node | None) -> None:
        """Tell that a child of ``parent`` left the device."""
        self._leaves.evicted(parent)
