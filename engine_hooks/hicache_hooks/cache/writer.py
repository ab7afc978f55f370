"""Writing: L1 -> L2 by the write policy, L2 -> L3 as backups, and device eviction, which may write first.

========================== =====================================================================
policy                     a node goes to L2
========================== =====================================================================
write_through              when it is first computed
write_through_selective    at its second use
write_back                 when L1 evicts it
========================== =====================================================================

What is on L2 goes to L3 when it arrives there, or at its next use when no store was attached then, or the store
was another one, or the write failed. Nothing here waits: a write that finds no room is dropped and counted (F44).
"""

from hicache_hooks.cache.evict import Evictor
from hicache_hooks.cache.hashing import page_key
from hicache_hooks.cache.ledger import Ended
from hicache_hooks.cache.operations import Backup, Copy
from hicache_hooks.cache.radix import Node
from hicache_hooks.cache.state import CacheState
from hicache_hooks.cache.storage_set import StorageSet

SELECTIVE_HITS = 2


def holds(set_: StorageSet, node: Node) -> bool:
    """True when the set's store acknowledged every page of the node."""
    return set_.id in (node.stored_in, node.stored_next)


class Writer:
    """Owns the write-through and backup operations in flight, by ledger number."""

    def __init__(self, state: CacheState, evictor: Evictor) -> None:
        self._s = state
        self._evictor = evictor
        self.writes: dict[int, Copy] = {}
        self.backups: dict[int, Backup] = {}
        self.pinned = 0  # host pages under backup

    def used(self, nodes: list[Node]) -> None:
        """Nodes (parents first) were computed or hit: the write policy acts."""
        policy = self._s.storage.knobs.write_policy
        for node in nodes:
            if node.host is not None:
                self.back_up(node)
            elif node.device is not None and (
                policy == "write_through" or (policy == "write_through_selective" and node.hits >= SELECTIVE_HITS)
            ):
                self.write(node)

    # -- L1 -> L2 --------------------------------------------------------------------------------------------

    def write(self, node: Node, *, evict: bool = False, store: bool = True) -> bool:
        """Start copying a node to L2; False when it is not needed or there is no room. ``store``: then on to L3."""
        s = self._s
        if node.device is None or node.host is not None or node.writing:
            return False
        n = len(node.device)
        if self._evictor.host_room(n) < n:
            s.stats["dropped_writes"] += 1
            return False
        number = s.host_ledger.begin("write")
        pages = s.host_ledger.take(number, n) or []
        set_ = s.storage
        copy = Copy(
            number, s.clock(), s.report, copier=set_.to_host, node=node,
            device_pages=list(node.device), host_pages=pages, to_host=True, evict=evict,
            store=store,
        )  # fmt: skip
        if not set_.copy_out(copy):
            s.host_ledger.end(number, Ended.CANCELLED)
            s.stats["dropped_writes"] += 1
            return False
        s.tree.lock_device(node)
        node.writing = True
        self.writes[number] = copy
        if evict:
            self._evictor.leaving += n
        return True

    def written(self, copy: Copy) -> None:
        """A copy to L2 ended."""
        s = self._s
        del self.writes[copy.number]
        n = len(copy.host_pages)
        s.tree.lock_device(copy.node, -1)
        segments = s.tree.segments(copy.node, n)
        for node, first in segments:
            node.writing = False
            if copy.succeeded and node.host is None:
                part = copy.host_pages[first : first + s.tree.length(node)]
                s.host_ledger.to_tree(copy.number, part)
                node.host = part
        s.host_ledger.end(copy.number, copy.outcome(n if copy.succeeded else 0, n))
        if copy.evict:
            self._evictor.leaving -= n
            for node, _ in reversed(segments):
                on_device = any(child.device is not None for child in node.children.values())
                if node.host is not None and node.device_lock == 0 and not on_device:
                    self._evictor.drop_device(node)
        if copy.succeeded and copy.store:
            for node, _ in segments:
                self.back_up(node)

    # -- L2 -> L3 --------------------------------------------------------------------------------------------

    def back_up(self, node: Node) -> bool:
        """Start storing a node; False when it is not needed, not possible or over the bound."""
        s = self._s
        set_ = s.storage
        if not set_.stores or node.host is None or node.backing or holds(set_, node):
            return False
        # A node larger than the bound may go when it is alone: else it would never be stored.
        if self.pinned and self.pinned + len(node.host) > self.bound(set_):
            s.stats["dropped_backups"] += 1
            return False
        return self.save(node, set_) is not None

    def bound(self, set_: StorageSet) -> float:
        """Host pages that backups may pin together."""
        return set_.limits.backup_fraction * self._s.host.num_pages

    def save(self, node: Node, set_: StorageSet) -> Backup | None:
        """Start storing a node that is on L2 in ``set_``, installed or not; None when that takes nothing."""
        s, io = self._s, set_.io
        if io is None or set_.bypassed or node.host is None or node.backing:
            return None
        n = len(node.host)
        if set_.refuses("put", n):
            return None
        s.tree.last_hash(node)  # fills in what is missing above it as well
        backup = Backup(s.host_ledger.begin("backup"), s.clock(), s.report, set_=set_, io=io, node=node)
        backup.keys = [page_key(s.namespace, h) for h in node.hashes or []]
        backup.pages = list(node.host)
        backup.ahead = set_ is not s.storage
        if set_.knobs.hicache_storage_pass_prefix_keys and node.parent is not None:
            above = [h for up in s.tree.path(node.parent) for h in up.hashes or []]
            backup.prefix_keys = [page_key(s.namespace, h) for h in above]
        if not set_.write(backup.cut(set_.batch_pages)):
            s.host_ledger.end(backup.number, Ended.CANCELLED)
            return None
        s.tree.lock_host(node)
        node.backing = True
        self.backups[backup.number] = backup
        self.pinned += n
        return backup

    def backed_up(self, backup: Backup) -> None:
        """A backup ended."""
        s = self._s
        del self.backups[backup.number]
        n = len(backup.pages)
        self.pinned -= n
        outcome = backup.outcome(backup.good, n)
        if not backup.left_tree:
            s.tree.lock_host(backup.node, -1)
            for node, _ in s.tree.segments(backup.node, n):
                node.backing = False
                if outcome == Ended.DONE and backup.ahead:
                    node.stored_next = backup.stored_in
                elif outcome == Ended.DONE:
                    node.stored_in = backup.stored_in
        s.stats["stored_pages"] += backup.good
        s.host_ledger.end(backup.number, outcome)

    def leave_tree(self) -> None:
        """The tree is about to be emptied: backups (all of them given up) keep their pages, and forget their nodes."""
        s = self._s
        for backup in self.backups.values():
            if not backup.left_tree:
                backup.left_tree = True
                s.tree.lock_host(backup.node, -1)
                s.host_ledger.from_tree(backup.number, backup.pages)
                for node, _ in s.tree.segments(backup.node, len(backup.pages)):
                    node.host = None

    # -- eviction of L1 --------------------------------------------------------------------------------------

    def device_room(self, n: int) -> bool:
        """Try to have ``n`` free device pages. False: not now; with ``write_back`` they may come in a later pass."""
        s = self._s
        if s.device_ledger.free >= n:
            return True
        victims = self._evictor.device_victims(n)
        while (node := victims.next()) is not None:
            parent = node.parent
            if node.host is not None:
                self._evictor.drop_device(node)
                victims.gone(parent)
            elif s.storage.knobs.write_policy == "write_back" and self.write(node, evict=True):
                continue
            elif self._evictor.drop_branch(node):
                victims.gone(parent)
        return s.device_ledger.free >= n
