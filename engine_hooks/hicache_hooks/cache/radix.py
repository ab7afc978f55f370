"""Radix tree of token prefixes at page granularity, with device and host residency.

Theory of operation. A node holds a run of whole pages; its children start with different pages. Each node is
resident on the device, on the host, or both; a node that is on neither does not exist. Rules:

1. Device residency is closed towards the root: the parent of a device-resident node is device-resident.
2. A lock counts on a node and all its ancestors, so splitting a node (the new node is the *upper* part, and takes
   the same counts) keeps every holder right: it still holds the lower node and unlocks upwards.
3. A holder of a node thinks in *pages counted backwards from the node's end*: ``segments`` finds them again
   after any number of splits.
4. Eviction takes leaves only, least recently used first; a locked node is never evicted.
5. Hashes of a node, where computed, belong to its pages; a node's first hash chains on its parent's last.

The tree owns no pages itself: callers move them in the ledgers. Scheduler thread only.
"""

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hicache_hooks.cache.hashing import ROOT, chain_hashes

Key = tuple[int, ...]


class Node:
    """A run of pages. ``stored_in`` is the id of the storage set that is known to hold all of them, 0 = none; so is
    ``stored_next`` of the set that a checkpoint filled before it was installed (F58)."""

    __slots__ = (
        "backing",
        "children",
        "device",
        "device_lock",
        "hashes",
        "hits",
        "host",
        "host_lock",
        "last_use",
        "parent",
        "stored_in",
        "stored_next",
        "tokens",
        "writing",
    )

    def __init__(self, tokens: Key, parent: "Node | None") -> None:
        self.tokens = tokens
        self.parent = parent
        self.children: dict[Key, Node] = {}
        self.device: list[int] | None = None
        self.host: list[int] | None = None
        self.hashes: list[bytes] | None = None
        self.device_lock = 0
        self.host_lock = 0
        self.hits = 0
        self.last_use = 0
        self.stored_in = self.stored_next = 0
        self.writing = False  # L1 -> L2 under way
        self.backing = False  # L2 -> L3 under way


@dataclass(slots=True)
class Match:
    """Longest known prefix: ``device`` pages first, then ``host`` pages; ``node`` is where it ends.

    ``within`` is how many of the node's pages belong to it: all of them unless matched without splitting.
    """

    node: Node
    within: int
    device_node: Node
    device: list[int]
    host: list[int]

    @property
    def pages(self) -> int:
        """Length in pages."""
        return len(self.device) + len(self.host)


class RadixTree:
    """See the module's text. ``page_size`` in tokens."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.root = Node((), None)
        self.root.device, self.root.host, self.root.hashes = [], [], []
        self._tick = itertools.count(1)
        self._unhashed: set[Node] = set()

    # -- walking ---------------------------------------------------------------------------------------------

    def nodes(self) -> Iterator[Node]:
        """Every node but the root, parents first."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def length(self, node: Node) -> int:
        """Pages of one node."""
        return len(node.tokens) // self.page_size

    def path(self, node: Node) -> list[Node]:
        """From below the root down to ``node``."""
        out: list[Node] = []
        while node.parent is not None:
            out.append(node)
            node = node.parent
        out.reverse()
        return out

    def segments(self, node: Node, pages: int) -> list[tuple[Node, int]]:
        """The nodes that hold the last ``pages`` pages ending at ``node``, top first, each with the index of its
        first page among them (rule 3)."""
        out: list[tuple[Node, int]] = []
        at: Node | None = node
        while pages > 0 and at is not None and at.parent is not None:
            pages -= self.length(at)
            out.append((at, pages))
            at = at.parent
        if pages != 0:
            raise ValueError("the range does not end at a node's border")
        out.reverse()
        return out

    def match(self, tokens: Sequence[int], *, split: bool = True, use: bool = True) -> Match:
        """The longest prefix that is cached. ``split``: so that it ends at a node's border; ``use``: LRU and so on."""
        key = tuple(tokens)
        node, device_node = self.root, self.root
        device: list[int] = []
        host: list[int] = []
        now = next(self._tick) if use else 0
        at = within = 0
        while (child := node.children.get(key[at : at + self.page_size])) is not None:
            if child.device is None and child.host is None:
                break
            same = self._same_pages(child.tokens, key, at)
            if same < self.length(child) and split:
                child = self.split(child, same)
            if use:
                child.last_use = now
            if child.device is not None:
                device.extend(child.device[:same])
                device_node = child
            elif child.host is not None:
                host.extend(child.host[:same])
            node, within = child, same
            at += same * self.page_size
            if same < self.length(child):
                break
        return Match(node, within, device_node, device, host)

    def _same_pages(self, run: Key, key: Key, at: int) -> int:
        """How many whole pages of ``run`` equal ``key`` from ``at`` on."""
        limit = min(len(run), len(key) - at) // self.page_size
        if run[: limit * self.page_size] == key[at : at + limit * self.page_size]:
            return limit
        step = self.page_size
        return next(
            i for i in range(limit) if run[i * step : (i + 1) * step] != key[at + i * step : at + (i + 1) * step]
        )

    # -- growing ---------------------------------------------------------------------------------------------

    def split(self, node: Node, pages: int) -> Node:
        """Cut ``node`` after ``pages`` pages; returns the new upper part. ``node`` stays the lower one (rule 2)."""
        parent = node.parent
        if parent is None or not 0 < pages < self.length(node):
            raise ValueError("a split leaves pages on both sides")
        cut = pages * self.page_size
        upper = Node(node.tokens[:cut], parent)
        upper.children[node.tokens[cut : cut + self.page_size]] = node
        upper.device_lock, upper.host_lock = node.device_lock, node.host_lock
        upper.hits, upper.last_use = node.hits, node.last_use
        upper.stored_in, upper.stored_next = node.stored_in, node.stored_next
        upper.writing, upper.backing = node.writing, node.backing
        if node.device is not None:
            upper.device, node.device = node.device[:pages], node.device[pages:]
        if node.host is not None:
            upper.host, node.host = node.host[:pages], node.host[pages:]
        if node.hashes is not None:
            upper.hashes, node.hashes = node.hashes[:pages], node.hashes[pages:]
        else:
            self._unhashed.add(upper)
        parent.children[node.tokens[: self.page_size]] = upper
        node.tokens = node.tokens[cut:]
        node.parent = upper
        return upper

    def descend(self, node: Node, tokens: Key) -> tuple[Node | None, int]:
        """The child of ``node`` that shares its first pages with ``tokens``, cut to the shared part, and its pages."""
        child = node.children.get(tokens[: self.page_size])
        if child is None:
            return None, 0
        same = self._same_pages(child.tokens, tokens, 0)
        if same < self.length(child):
            child = self.split(child, same)
        child.last_use = next(self._tick)
        return child, same

    def grow(self, node: Node, tokens: Key) -> Node:
        """A new child of ``node``; the caller gives it pages at once."""
        first = tokens[: self.page_size]
        if first in node.children or len(tokens) % self.page_size or not tokens:
            raise ValueError("a new node needs whole pages and a free place")
        child = Node(tokens, node)
        child.last_use = next(self._tick)
        child.hits = 1
        node.children[first] = child
        self._unhashed.add(child)
        return child

    # -- hashes ----------------------------------------------------------------------------------------------

    def last_hash(self, node: Node, within: int | None = None) -> bytes:
        """Hash of a node's last page, or of its ``within``-th; computes what is missing on the way up (rule 5)."""
        for above in self.path(node):
            if above.hashes is None:
                parent = above.parent
                known = parent.hashes[-1] if parent is not None and parent.hashes else ROOT
                self.set_hashes(above, chain_hashes(above.tokens, self.page_size, known))
        if not node.hashes:
            return ROOT
        return node.hashes[-1 if within is None else within - 1]

    def set_hashes(self, node: Node, hashes: list[bytes]) -> None:
        """Hashes that somebody computed already (a prefetch)."""
        node.hashes = hashes
        self._unhashed.discard(node)

    def backfill(self, budget_s: float, clock: Callable[[], float]) -> bool:
        """Hash nodes that have none for at most ``budget_s``; True when none is left (F13).

        A node of 4096 tokens takes about 0.3 ms: the budget is overrun by one node at most.
        """
        until = clock() + budget_s
        while self._unhashed:
            self.last_hash(next(iter(self._unhashed)))
            if clock() >= until:
                break
        return not self._unhashed

    @property
    def unhashed(self) -> int:
        """Nodes without hashes."""
        return len(self._unhashed)

    # -- locks and eviction ----------------------------------------------------------------------------------

    def lock_device(self, node: Node, by: int = 1) -> None:
        """Lock (or, with -1, unlock) the device pages of a node and its ancestors."""
        at: Node | None = node
        while at is not None:
            at.device_lock += by
            if at.device_lock < 0:
                raise ValueError("device lock released twice")
            at = at.parent

    def lock_host(self, node: Node, by: int = 1) -> None:
        """Lock (or, with -1, unlock) the host pages of a node and its ancestors."""
        at: Node | None = node
        while at is not None:
            at.host_lock += by
            if at.host_lock < 0:
                raise ValueError("host lock released twice")
            at = at.parent

    def device_leaves(self) -> "LeafHeap":
        """Evictable device-resident nodes, least recently used first."""
        return LeafHeap(self, _is_device_leaf)

    def host_leaves(self) -> "LeafHeap":
        """Evictable nodes that live on the host only, least recently used first."""
        return LeafHeap(self, _is_host_leaf)

    def remove(self, node: Node) -> None:
        """Take a childless node out."""
        if node.children or node.parent is None:
            raise ValueError("only a leaf can be removed")
        del node.parent.children[node.tokens[: self.page_size]]
        node.parent = None
        self._unhashed.discard(node)

    def clear(self) -> None:
        """Forget everything; the caller freed the pages."""
        self.root.children.clear()
        self._unhashed.clear()

    def locks(self) -> int:
        """Sum of the root's lock counts: 0 = nobody holds anything."""
        return self.root.device_lock + self.root.host_lock


def _is_device_leaf(node: Node) -> bool:
    return (
        node.device is not None
        and node.device_lock == 0
        and node.parent is not None
        and all(child.device is None for child in node.children.values())
    )


def _is_host_leaf(node: Node) -> bool:
    return (
        node.device is None
        and node.host is not None
        and node.host_lock == 0
        and node.parent is not None
        and not node.children
    )


class LeafHeap:
    """Leaves in LRU order; after a leaf was evicted, its parent joins when it has become one itself."""

    def __init__(self, tree: RadixTree, evictable: Callable[[Node], bool]) -> None:
        self._evictable = evictable
        self._order = itertools.count()
        self._heap = [(node.last_use, next(self._order), node) for node in tree.nodes() if evictable(node)]
        heapq.heapify(self._heap)

    def pop(self) -> Node | None:
        """The next node; None when there is none."""
        while self._heap:
            node = heapq.heappop(self._heap)[2]
            if self._evictable(node):
                return node
        return None

    def evicted(self, parent: Node | None) -> None:
        """Tell that a child of ``parent`` is gone."""
        if parent is not None and self._evictable(parent):
            heapq.heappush(self._heap, (parent.last_use, next(self._order), parent))
