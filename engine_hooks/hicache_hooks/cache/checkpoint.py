"""Checkpoint: before a store is let go, every node of the tree goes to the store that stays (F58).

Otherwise only what was evicted, or was hot enough for the write policy, is sure to be in storage; a chain whose root
lives on the device alone cannot be restored. Rules:

1. ``target`` is B in a swap, written through B's own threads while B is still parked, and A before a detach.
2. A node is given to the store after its parent was acknowledged. So at any point, after a failure too, what the store
   holds is closed towards the root: no page there is out of reach for want of the one before it.
3. A node that lives on the device alone is copied to L2 first. Room for it is made only of pages that the target has.
4. The first page that is not stored, a store that refuses, or a call past its deadline ends it (fail closed). The tree
   is as it was, but for what went to L2; nothing is cleared.
5. What is known to be stored is not written again: as in all of the cache, that is what the target acknowledged, not
   what its own eviction took away since.
6. A walk that ended says nothing about nodes that came later: walk again when nothing can come (FREEZE).
7. Nothing here waits. ``advance`` does what can be done now, within its budget; completions come by ``pump``.

Scheduler thread only.
"""

import itertools
from collections.abc import Callable

from hicache_hooks.cache.evict import Evictor
from hicache_hooks.cache.ledger import Ended
from hicache_hooks.cache.operations import Backup, Operation
from hicache_hooks.cache.radix import Node
from hicache_hooks.cache.state import CacheState
from hicache_hooks.cache.storage_set import StorageSet
from hicache_hooks.cache.writer import Writer, holds
from hicache_proto.errors import PrepareFailed

MAX_IN_FLIGHT = 64  # nodes: keeps the store's threads busy, and leaves queue and L2 to the traffic beside it


class Checkpoint:
    """One target, any number of walks. ``pages`` and ``nodes`` are what it has written."""

    def __init__(self, state: CacheState, evictor: Evictor, writer: Writer, target: StorageSet) -> None:
        self._s = state
        self._evictor = evictor
        self._writer = writer
        self.target = target
        self.pages = self.nodes = 0
        self._walking = False
        self._blocked = False  # only a completion can bring it forward
        self._id = 0  # of the target when the walk began: it is another one if it lost all meanwhile (F70)
        self._todo: list[Node] = []
        self._later: dict[Node, None] = {}  # something of theirs is in flight
        self._running: dict[int, Backup] = {}
        self._failed: PrepareFailed | None = None

    def advance(self, budget_s: float, clock: Callable[[], float]) -> bool:
        """Go on for at most ``budget_s``; True when a walk has ended and the target has acknowledged every node.

        Raises:
            PrepareFailed: reason ``checkpoint_failed``; it stays so.
        """
        if self._failed is not None:
            raise self._failed
        if not self._walking or self._id != self.target.id:
            self._walking, self._id = True, self.target.id
            self._todo, self._later = list(self._s.tree.root.children.values()), {}
        until = clock() + budget_s
        over = [node for node in self._later if not (node.backing or node.writing)]
        for node in over:
            del self._later[node]
        self._todo += over
        self._blocked = False
        while self._todo and not self._blocked:
            self._blocked = not self._visit(self._todo.pop())
            if clock() >= until:
                break
        if self._failed is not None:
            raise self._failed
        self._walking = bool(self._todo or self._later or self._running)
        return not self._walking and self.target.id == self._id

    @property
    def waits(self) -> bool:
        """True when only a completion can bring it forward."""
        return self._walking and (self._blocked or not self._todo)

    def _visit(self, node: Node) -> bool:
        """Take one node a step further; False when nothing more can be begun now."""
        s, target, parent = self._s, self.target, node.parent
        if parent is None:
            return True  # evicted meanwhile
        if holds(target, node):
            self._todo += node.children.values()
            return True
        if parent is not s.tree.root and not holds(target, parent):
            if parent not in self._later:  # a split made it; its children come when it is stored (rule 2)
                self._todo.append(parent)
            return True
        if len(self._later) >= MAX_IN_FLIGHT:
            self._todo.append(node)
            return False
        if node.backing or node.writing:
            self._later[node] = None
            return True
        if node.host is None:
            return self._to_host(node)
        if self._writer.pinned and self._writer.pinned + len(node.host) > self._writer.bound(target):
            self._todo.append(node)
            return False
        backup = self._writer.save(node, target)
        if backup is None:
            return self._fail("the store takes nothing now")
        self._running[backup.number] = backup
        self._later[node] = None
        return True

    def _to_host(self, node: Node) -> bool:
        n = len(node.device or ())
        if self._evictor.host_room(n, lambda other: holds(self.target, other)) < n:
            self._todo.append(node)
            # What is in flight may give room: pages that the target has by then.
            return False if self._running or self._later else self._fail(f"no room in L2 for {n} pages")
        if not self._writer.write(node, store=False):
            return self._fail("a node could not be copied to L2")
        self._later[node] = None
        return True

    def ended(self, backup: Backup) -> None:
        """The controller has settled a backup, of ours or not."""
        if self._running.pop(backup.number, None) is None or backup.left_tree:
            return
        n = len(backup.pages)
        if backup.outcome(backup.good, n) != Ended.DONE:
            self._fail(f"the store did not take {n - backup.good} of {n} pages")
            return
        self.pages += n
        self.nodes += 1
        nodes = [node for node, _ in self._s.tree.segments(backup.node, n)]
        for upper, lower in itertools.pairwise(nodes):  # it was split meanwhile; the last one is looked at in its turn
            self._todo += [child for child in upper.children.values() if child is not lower]

    def overdue(self, operation: Operation) -> None:
        """A call of this operation is past its deadline."""
        if operation.number in self._running:
            self._fail("the store did not answer in time")

    def forget(self) -> None:
        """The tree was emptied: nothing is left to store."""
        self._todo, self._later = [], {}

    def _fail(self, why: str) -> bool:
        self._failed = self._failed or PrepareFailed(
            f"checkpoint: {why}; {self.nodes} nodes ({self.pages} pages) are written, nothing was cleared",
            details={"reason": "checkpoint_failed", "nodes": self.nodes, "pages": self.pages},
        )
        return False
