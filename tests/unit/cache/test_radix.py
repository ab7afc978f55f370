"""The radix tree against a plain model (a set of page prefixes), locks over splits, hashes, eviction order."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_hooks.cache.hashing import chain_hashes
from hicache_hooks.cache.radix import Node, RadixTree

SIZE = 2
_PROMPTS = st.lists(st.integers(0, 2), min_size=0, max_size=14).map(tuple)


def _insert(tree: RadixTree, tokens: tuple[int, ...], page: int) -> Node:
    """Give every page of ``tokens`` that has none a device page; pages are numbered by their prefix."""
    node, key, at = tree.root, tokens[: len(tokens) // SIZE * SIZE], 0
    while key:
        child, same = tree.descend(node, key)
        if child is None:
            child, same = tree.grow(node, key), len(key) // SIZE
            child.device = list(range(page + at, page + at + same))
        node, key, at = child, key[same * SIZE :], at + same
    return node


def _prefixes(tokens: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [tokens[: (i + 1) * SIZE] for i in range(len(tokens) // SIZE)]


@settings(max_examples=150, deadline=None)
@given(st.lists(_PROMPTS, max_size=12), st.lists(_PROMPTS, max_size=6))
def test_matches_what_was_inserted(inserted: list[tuple[int, ...]], asked: list[tuple[int, ...]]) -> None:
    tree = RadixTree(SIZE)
    model: dict[tuple[int, ...], int] = {}
    for number, tokens in enumerate(inserted):
        _insert(tree, tokens, number * 100)
        for i, prefix in enumerate(_prefixes(tokens)):
            model.setdefault(prefix, number * 100 + i)
    for tokens in [*asked, *inserted]:
        expected = []
        for prefix in _prefixes(tokens):
            if prefix not in model:
                break
            expected.append(model[prefix])
        assert tree.match(tokens, split=False, use=False).device == expected
        found = tree.match(tokens)
        assert found.device == expected
        assert sum(tree.length(n) for n in tree.path(found.node)) == len(expected)
        assert tree.last_hash(found.node) == (chain_hashes(tokens, SIZE) or [b""])[len(expected) - 1] or not expected
    assert sum(tree.length(n) for n in tree.nodes()) == len(model)


@settings(max_examples=100, deadline=None)
@given(st.lists(_PROMPTS, min_size=1, max_size=8), st.data())
def test_locks_survive_splits(prompts: list[tuple[int, ...]], data: st.DataObject) -> None:
    """Rule 2: whoever locked a node unlocks it after any number of splits, and nothing stays locked."""
    tree = RadixTree(SIZE)
    held = []
    for tokens in prompts:
        node = _insert(tree, tokens, 0)
        if data.draw(st.booleans()):
            tree.lock_device(node)
            tree.lock_host(node)
            held.append((node, len(tokens) // SIZE))
        tree.match(data.draw(_PROMPTS))  # splits
        for locked, pages in held:
            assert all(n.device_lock > 0 and n.host_lock > 0 for n in tree.path(locked))
            assert sum(tree.length(n) for n, _ in tree.segments(locked, pages)) == pages
    for node, _ in held:
        tree.lock_device(node, -1)
        tree.lock_host(node, -1)
    assert all(n.device_lock == n.host_lock == 0 for n in tree.nodes())
    assert tree.locks() == 0


def test_a_lock_released_twice_raises() -> None:
    tree = RadixTree(SIZE)
    node = _insert(tree, (1, 1), 0)
    with pytest.raises(ValueError, match="twice"):
        tree.lock_device(node, -1)


def test_backfill_gives_what_a_computation_from_scratch_gives() -> None:
    """F13: 50 nodes without hashes; in slices; a second backfill finds nothing to do."""
    tree = RadixTree(SIZE)
    prompts = [(i, i, i, 1) + ((7, 7) * (i % 5)) for i in range(25)] + [(i, i, 5, 5) for i in range(25)]
    for tokens in prompts:
        _insert(tree, tokens, 0)
    assert tree.unhashed >= 50
    now = iter(range(10**6))
    slices = 1
    while not tree.backfill(0.0, lambda: float(next(now))):
        slices += 1
    assert slices > 10
    assert tree.unhashed == 0
    for tokens in prompts:
        assert [h for n in tree.path(tree.match(tokens).node) for h in n.hashes or []] == chain_hashes(tokens, SIZE)
    assert tree.backfill(0.0, lambda: 0.0)


def test_leaves_go_first_and_least_recently_used_first() -> None:
    tree = RadixTree(SIZE)
    stem = _insert(tree, (1, 1), 0)
    old, new = _insert(tree, (1, 1, 2, 2), 10), _insert(tree, (1, 1, 3, 3), 20)
    tree.match((1, 1, 2, 2))  # old is the newer one now
    leaves = tree.device_leaves()
    order = []
    while (node := leaves.pop()) is not None:
        order.append(node)
        node.device, parent = None, node.parent
        tree.remove(node)
        leaves.evicted(parent)
    assert order == [new, old, stem]


def test_locked_nodes_are_never_offered() -> None:
    tree = RadixTree(SIZE)
    node = _insert(tree, (1, 1, 2, 2), 0)
    tree.lock_device(node)
    assert tree.device_leaves().pop() is None
    node.device, node.host = None, [1, 2]
    tree.lock_host(node)
    assert tree.host_leaves().pop() is None
