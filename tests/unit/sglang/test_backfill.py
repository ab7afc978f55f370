"""Hashing SGLang's tree in slices: parents first, within the budget, and never wrong when the tree moves meanwhile."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from hicache_hooks.sglang.backfill import TreeBackfill


class Node:
    """The engine's tree node, as far as hashes go."""

    def __init__(self, parent: "Node | None", key: str) -> None:
        self.parent, self.key = parent, key
        self.children: dict[str, Node] = {}
        self.hash_value: list[str] | None = None
        if parent is not None:
            parent.children[key] = self


@pytest.fixture
def hashes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The engine's hash function; lists the keys in the order in which they were hashed."""
    done: list[str] = []

    def compute(node: Any, page_size: int) -> list[str]:
        assert node.parent.hash_value is not None, "a child before its parent"
        done.append(node.key)
        return [f"{node.parent.hash_value[-1:]}{node.key}"]

    utils = ModuleType("utils")
    utils.compute_node_hash_values = compute  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sglang.srt.mem_cache.utils", utils)
    for name in ("sglang", "sglang.srt", "sglang.srt.mem_cache"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    return done


def tree(root: Any) -> Any:
    return SimpleNamespace(tree_core=SimpleNamespace(root_node=root), page_size=64)


def grown() -> Node:
    root = Node(None, "")
    root.hash_value = []
    for a in "abc":
        child = Node(root, a)
        for b in "xyz":
            Node(Node(child, a + b), a + b + "1")
    return root


def everything(root: Node) -> list[Node]:
    return [root, *(node for child in root.children.values() for node in everything(child))]


def test_a_walk_hashes_everything_once(hashes: list[str]) -> None:
    root = grown()
    walk = TreeBackfill(tree(root))
    assert walk.slice(10.0)
    assert all(node.hash_value is not None for node in everything(root))
    assert len(hashes) == walk.hashed == 21
    assert walk.slice(10.0)
    walk.restart()
    assert walk.slice(10.0)
    assert len(hashes) == 21


def test_a_budget_that_is_spent_ends_the_slice(hashes: list[str]) -> None:
    """F4: the scheduler is not kept; the walk goes on where it was."""
    walk = TreeBackfill(tree(grown()))
    slices = 1
    while not walk.slice(0.0):
        assert len(hashes) == slices
        slices += 1
    assert len(hashes) == 21


def test_the_tree_moves_between_slices(hashes: list[str]) -> None:
    """Nodes that come, go, and get a new parent: what is hashed is hashed right, the rest is left to the engine."""
    root = grown()
    walk = TreeBackfill(tree(root))
    assert not walk.slice(0.0)
    for branch in list(root.children.values()):
        if branch.hash_value is None:  # split above the branch: a new, unhashed node takes its place
            middle = Node(root, "m" + branch.key)
            root.children[branch.key] = middle
            middle.children[branch.key], branch.parent = branch, middle
            break
    Node(root, "late")
    while not walk.slice(0.0):
        pass
    for node in everything(root):
        if node.hash_value is not None and node is not root:
            assert node.parent is not None
            assert node.parent.hash_value is not None


def test_a_tree_without_nodes_is_left_to_the_engine() -> None:
    assert TreeBackfill(SimpleNamespace(page_size=64)).slice(1.0)
    assert TreeBackfill(tree(None)).slice(1.0)


def test_the_rust_tree_says_that_it_has_no_nodes() -> None:
    class Core:
        @property
        def root_node(self) -> Any:
            raise NotImplementedError("root_node: not yet ported to the Rust tree core")

    assert TreeBackfill(SimpleNamespace(tree_core=Core(), page_size=64)).slice(1.0)


@pytest.mark.parametrize(
    ("module", "result", "hashed"),
    [
        ("sglang.srt.mem_cache.rust_tree_core.adapter", 7, 7),
        ("sglang.srt.mem_cache.rust_tree_core.adapter", None, 0),  # it fails: the engine's attach does it
        ("sglang.srt.mem_cache.unified_cache.unified_tree_core", 7, 0),  # not safe off the scheduler's thread
    ],
)
def test_the_rust_trees_own_pass_runs_on_the_builder(module: str, result: int | None, hashed: int) -> None:
    class Core:
        def backfill_missing_hash_values(self) -> int:
            if result is None:
                raise RuntimeError("mutex poisoned")
            return result

    Core.__module__ = module
    assert TreeBackfill(SimpleNamespace(tree_core=Core(), page_size=64)).native() == hashed
