"""Page hashes of the tree's nodes, in slices, so that COMMIT finds few missing (scheduler thread).

SGLang hashes nothing while storage is off; its attach then hashes the whole tree in one go, which stands in COMMIT's
way. So PREPARE walks the tree before, parents first as the engine does, a fraction of a millisecond per loop
iteration. One walk is enough: the tree goes on changing meanwhile, and the engine's own pass does what came later.
A hash is a function of the tokens alone; an operation that is given up leaves true hashes behind, which nobody reads.

The Rust tree (the default where it is built) has no nodes to walk, and its own pass knows no slices. It runs without
the interpreter lock, under the tree's own, so the builder thread calls it at the end of PREPARE: a scheduler that is in
a forward pass meanwhile does not notice, one that wants the tree waits for the rest. Measured on two slow cores: 0.6 ms
for an L2 of 53,000 tokens, so 10 ms for a million; COMMIT's own pass then finds only what came later.
"""

import importlib
import logging
import time
from typing import Any

from hicache_hooks.sglang.versions import SRT

log = logging.getLogger(__name__)

RUST = f"{SRT}.mem_cache.rust_tree_core"
LOOK_EVERY = 16  # nodes between two looks at the clock: most are hashed already


class TreeBackfill:
    """One walk over one scheduler's tree. ``restart`` from any thread, ``native`` on the builder's, the rest on the
    scheduler's."""

    def __init__(self, tree: Any) -> None:
        self._tree = tree
        self._page_size = int(tree.page_size)
        self._stack: list[Any] | None = None
        self._over = False
        self.hashed = 0

    def restart(self) -> None:
        """A new PREPARE: walk again."""
        self._over = False

    @property
    def _root(self) -> Any:
        """None where there is nothing to walk. It is looked up each time: a flush makes a new one."""
        try:
            root = self._tree.tree_core.root_node
        except (AttributeError, NotImplementedError):  # the Rust tree's adapter raises the second
            return None
        return root if hasattr(root, "children") else None

    def slice(self, budget_s: float) -> bool:
        """Go on for about ``budget_s``; True when the walk is over."""
        root = self._root
        if self._over or root is None:
            return True
        compute = importlib.import_module(f"{SRT}.mem_cache.utils").compute_node_hash_values
        if self._stack is None:
            self._stack = list(root.children.values())
        until, seen = time.perf_counter() + budget_s, 0
        while self._stack:
            node = self._stack.pop()
            if node.hash_value is None:
                parent = node.parent
                if parent is None or (parent is not root and parent.hash_value is None):
                    continue  # cut off, or moved below a new node, since it was put here
                node.hash_value = compute(node, self._page_size)
                self.hashed += 1
                seen = 0
            self._stack.extend(node.children.values())
            seen += 1
            if (seen == 1 or seen >= LOOK_EVERY) and time.perf_counter() >= until:
                return False
        self._stack, self._over = None, True
        return True

    def native(self) -> int:
        """*builder* thread: the Rust tree's own pass; nodes hashed. 0 for every other tree, and when it fails."""
        core: Any = getattr(self._tree, "tree_core", None)
        if not type(core).__module__.startswith(RUST):
            return 0
        try:
            return int(core.backfill_missing_hash_values())
        except Exception:  # COMMIT's own pass will do it, or say why it cannot
            log.exception("the tree's page hashes could not be made before COMMIT")
            return 0
