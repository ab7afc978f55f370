"""F58: before a store is let go the whole tree goes to the one that stays, parents first, or nothing is let go."""

import threading
import time
from collections.abc import Iterator, Sequence

import pytest
from tests.unit.cache.support import PAGE, WAIT_S, MemoryStore, Rig, prompt

from hicache_hooks.cache import checkpoint as checkpoint_module
from hicache_hooks.cache.radix import Node
from hicache_hooks.cache.storage_set import StorageSet
from hicache_proto.errors import PrepareFailed


class Ordered(MemoryStore):
    """Remembers the order in which keys were stored; refuses those in ``no``."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[str] = []
        self.no: set[str] = set()

    def batch_put(self, keys: Sequence[str], pages: Sequence[memoryview]) -> list[bool]:
        self.put_calls += 1
        self.on_put(keys)
        with self.lock:
            taken = [key not in self.no for key in keys]
            for key, page, yes in zip(keys, pages, taken, strict=True):
                if yes:
                    self.order += [key] * (key not in self.data)
                    self.data[key] = bytes(page)
        return taken


def tree_of_20(rig: Rig) -> list[list[int]]:
    """Five stems of one page, and three leaves below each: 20 nodes of one page."""
    texts = []
    for stem in range(5):
        texts += [[*prompt(1, stem + 1)[:PAGE], *prompt(1, 100 + 10 * stem + leaf)] for leaf in range(3)]
    for text in texts:
        rig.serve(text)
    nodes = list(rig.ctl.tree.nodes())
    assert [rig.ctl.tree.length(node) for node in nodes] == [1] * 20
    return texts


def forget(rig: Rig, store: MemoryStore, nodes: Sequence[Node]) -> None:
    """As if these had never been stored."""
    for node in nodes:
        node.stored_in = 0
        for key in keys(rig, node):
            store.data.pop(key, None)


def keys(rig: Rig, node: Node) -> list[str]:
    return [f"{rig.namespace}.{digest.hex()}" for digest in node.hashes or []]


def checkpoint(rig: Rig, target: StorageSet) -> None:
    """To its end. Raises as it does."""
    rig.until(lambda: rig.ctl.checkpoint_slice(target, 1.0))


def parents_first(rig: Rig, store: Ordered) -> bool:
    place = {key: i for i, key in enumerate(store.order)}
    tree = rig.ctl.tree
    return all(
        max(place[key] for key in keys(rig, node.parent)) < min(place[key] for key in keys(rig, node))
        for node in tree.nodes()
        if node.parent is not None and node.parent is not tree.root
    )


@pytest.fixture
def store() -> Ordered:
    return Ordered()


@pytest.fixture
def rig(store: Ordered) -> Iterator[Rig]:
    made = Rig(store=store, host_pages=64, device_pages=32)
    yield made
    made.close()


def test_eight_of_twenty_nodes_are_missing_and_all_are_stored(rig: Rig, store: Ordered) -> None:
    """F58's check: only what is missing is written."""
    tree_of_20(rig)
    assert len(store.data) == 20
    missing = list(rig.ctl.tree.nodes())[::5] + list(rig.ctl.tree.nodes())[3::5]
    forget(rig, store, missing)
    assert len(store.data) == 12
    puts = store.put_calls
    checkpoint(rig, rig.ctl.storage)
    assert len(store.data) == 20
    assert store.put_calls == puts + 8
    made = rig.ctl.checkpoint
    assert made is not None
    assert (made.nodes, made.pages) == (8, 8)
    rig.settle()


def test_parents_are_stored_before_their_children(rig: Rig, store: Ordered) -> None:
    tree_of_20(rig)
    store.data.clear()
    store.order.clear()
    for node in rig.ctl.tree.nodes():
        node.stored_in = 0
    store.on_put = lambda keys: time.sleep(0.001)  # so that threads overlap
    checkpoint(rig, rig.ctl.storage)
    assert len(store.order) == 20
    assert parents_first(rig, store)


def test_a_page_that_is_not_stored_ends_it_and_the_tree_stays(rig: Rig, store: Ordered) -> None:
    """F58's check: the store fails on node 5."""
    texts = tree_of_20(rig)
    nodes = list(rig.ctl.tree.nodes())
    forget(rig, store, nodes[:8])
    store.no = set(keys(rig, nodes[5]))
    before = [(node.device, node.host) for node in nodes]
    with pytest.raises(PrepareFailed) as caught:
        checkpoint(rig, rig.ctl.storage)
    assert caught.value.details["reason"] == "checkpoint_failed"
    assert "did not take 1 of 1 pages" in caught.value.message
    with pytest.raises(PrepareFailed):  # it stays so
        rig.ctl.checkpoint_slice(rig.ctl.storage, 1.0)
    rig.ctl.end_checkpoint()
    rig.settle()
    assert list(rig.ctl.tree.nodes()) == nodes
    assert [(node.device, node.host) for node in nodes] == before
    assert rig.ctl.tree.locks() == 0
    for node in nodes[5].children.values():
        assert not set(keys(rig, node)) & store.data.keys()
    assert rig.serve(texts[0])[0] == 2 * PAGE
    store.no = set()
    checkpoint(rig, rig.ctl.storage)  # another try
    assert len(store.data) == 20


def test_a_store_that_is_not_installed_gets_everything_and_then_has_it(rig: Rig, store: Ordered) -> None:
    """A swap: B is filled while A serves; after it nothing is written again, and all can be read from B."""
    texts = tree_of_20(rig)
    b = Ordered()
    target = rig.make_set(b)
    checkpoint(rig, target)
    assert b.data.keys() == store.data.keys()
    assert parents_first(rig, b)
    rig.settle()
    puts = store.put_calls
    rig.serve(texts[3])
    assert store.put_calls == puts  # A has not been forgotten meanwhile
    rig.ctl.install(target)
    rig.ctl.end_checkpoint()
    puts = b.put_calls
    rig.serve(texts[3])
    rig.serve(texts[7])
    assert b.put_calls == puts
    rig.settle()
    rig.flush()
    assert rig.serve(texts[4]) == (0, 0, 2 * PAGE)


def test_an_operation_that_is_given_up_leaves_the_old_store_known(rig: Rig, store: Ordered) -> None:
    texts = tree_of_20(rig)
    target = rig.make_set(Ordered())
    checkpoint(rig, target)
    rig.ctl.end_checkpoint()
    puts = store.put_calls
    for text in texts:
        rig.serve(text)
    assert store.put_calls == puts


@pytest.mark.parametrize("policy", ["write_back", "write_through_selective"])
def test_nodes_that_live_on_the_device_alone_go_through_l2(store: Ordered, policy: str) -> None:
    """The hot root is what F58 is about: these policies have put nothing into L2 yet."""
    rig = Rig(store=store, host_pages=64, device_pages=32, write_policy=policy)
    texts = tree_of_20(rig)
    device_only = sum(node.host is None for node in rig.ctl.tree.nodes())
    assert device_only > 0
    b = Ordered()
    target = rig.make_set(b)
    known = len(store.data)
    checkpoint(rig, target)
    rig.settle()
    assert len(b.data) == 20
    assert parents_first(rig, b)
    assert len(store.data) == known  # what went to L2 for B's sake did not go on to A
    rig.ctl.install(target)
    rig.flush()
    assert rig.serve(texts[9]) == (0, 0, 2 * PAGE)
    rig.close()


def test_room_in_l2_is_made_only_of_what_the_target_has(store: Ordered) -> None:
    """A full L2: nodes that the target lacks must not be evicted for others on their way there."""
    rig = Rig(store=store, host_pages=12, device_pages=32, write_policy="write_back")
    texts = tree_of_20(rig)
    for stem in range(5, 9):  # L1 evicts the oldest to L2 until that is full
        rig.serve([*prompt(1, stem + 1)[:PAGE], *prompt(3, 300 + 10 * stem)])
    nodes = {key for node in rig.ctl.tree.nodes() for key in keys(rig, node)}
    tokens = [text for text in texts if rig.ctl.match_prefix(text).pages == 2]
    assert rig.ctl.host_ledger.free < 12
    b = Ordered()
    target = rig.make_set(b)
    checkpoint(rig, target)
    rig.settle()
    assert nodes
    for node in rig.ctl.tree.nodes():
        rig.ctl.tree.last_hash(node)
    nodes |= {key for node in rig.ctl.tree.nodes() for key in keys(rig, node)}
    assert nodes <= b.data.keys()
    rig.ctl.install(target)
    rig.flush()
    assert rig.serve(tokens[0]) == (0, 0, 2 * PAGE)
    rig.close()


def test_without_any_room_in_l2_it_says_so(store: Ordered) -> None:
    """All of L2 is pinned by something else: fail closed, do not wait for ever."""
    rig = Rig(store=store, host_pages=8, device_pages=32, write_policy="write_back")
    rig.serve(prompt(2))
    number = rig.ctl.host_ledger.begin("prefetch")
    assert rig.ctl.host_ledger.take(number, 8)
    with pytest.raises(PrepareFailed, match="no room in L2 for 2 pages"):
        checkpoint(rig, rig.ctl.storage)
    rig.ctl.end_checkpoint()
    rig.close()


def test_splits_under_way_neither_lose_nor_repeat_a_node() -> None:
    """The test runs the queued work: nodes are split while they are copied and stored."""
    store = Ordered()
    rig = Rig(manual=True, store=store, prefetch_threshold=10_000, write_policy="write_back")
    text = prompt(6)

    def compute(tokens: list[int]) -> None:
        rid = rig.start(tokens)
        assert rig.ctl.ready(rid)
        admission = rig.ctl.admit(rid)
        assert admission is not None
        assert rig.ctl.alloc(rid, -(-len(tokens) // PAGE) - len(admission.pages)) is not None
        rig.ctl.finish(rid, tokens)

    compute(text)
    target = rig.ctl.storage
    assert not rig.ctl.checkpoint_slice(target, 1.0)
    compute(text[: 4 * PAGE] + prompt(1, 2))  # splits while it is copied to L2
    rig.run_queued(1)
    rig.ctl.pump()
    assert not rig.ctl.checkpoint_slice(target, 1.0)
    compute(text[: 2 * PAGE] + prompt(1, 3))  # and again while its upper part is being stored
    for _ in range(40):
        if rig.ctl.checkpoint_slice(target, 1.0):
            break
        rig.run_queued()
        rig.ctl.pump()
    rig.check()
    assert len(store.data) == rig.ctl.device_ledger.in_tree == 8
    assert len(store.order) == len(set(store.order)) == 8
    rig.ctl.end_checkpoint()
    rig.close()


def test_a_walk_begins_again_when_the_target_lost_all_meanwhile(rig: Rig, store: Ordered) -> None:
    """F70: what was acknowledged is not there any more."""
    tree_of_20(rig)
    target = rig.ctl.storage
    checkpoint(rig, target)
    for node in list(rig.ctl.tree.nodes())[:3]:
        node.stored_in = 0
    assert not rig.ctl.checkpoint_slice(target, 1.0)
    store.data.clear()
    target.forget()
    checkpoint(rig, target)
    assert len(store.data) == 20


def test_nodes_that_came_after_the_walk_are_found_by_the_next(rig: Rig, store: Ordered) -> None:
    """Rule 6: PREPARE's walk, then FREEZE's."""
    target = rig.make_set(b := Ordered())
    rig.serve(prompt(3))
    checkpoint(rig, target)
    assert len(b.data) == 3
    rig.serve(prompt(2, 5))
    checkpoint(rig, target)
    assert len(b.data) == 5


def test_a_store_that_is_bypassed_or_refuses_is_no_place_for_a_checkpoint(rig: Rig, store: Ordered) -> None:
    rig.serve(prompt(3))
    target = rig.make_set(Ordered())
    target.set_bypass(True)
    with pytest.raises(PrepareFailed, match="takes nothing now"):
        checkpoint(rig, target)


def test_a_call_past_its_deadline_ends_it(rig: Rig, store: Ordered) -> None:
    """The guard gives the call up; the checkpoint does not wait for the thread."""
    rig.serve(prompt(3))
    released = threading.Event()
    b = Ordered()
    b.on_put = lambda keys: released.wait(WAIT_S) and None
    target = rig.make_set(b)
    assert not rig.ctl.checkpoint_slice(target, 1.0)
    (backup,) = rig.ctl._writer.backups.values()
    backup.give_up()
    rig.ctl.pump()
    with pytest.raises(PrepareFailed, match="did not answer in time"):
        rig.ctl.checkpoint_slice(target, 1.0)
    rig.ctl.end_checkpoint()
    released.set()
    rig.settle()


def test_a_flush_meanwhile_leaves_nothing_to_store(rig: Rig, store: Ordered) -> None:
    """Freed pages must not be sealed under the keys of what they held."""
    tree_of_20(rig)
    target = rig.make_set(b := Ordered())
    assert not rig.ctl.checkpoint_slice(target, 0.0)
    rig.settle()
    rig.flush()
    checkpoint(rig, target)
    assert set(b.order) <= store.data.keys()
    assert len(b.order) <= 2


def test_a_walk_is_sliced_and_bounded(rig: Rig, store: Ordered, monkeypatch: pytest.MonkeyPatch) -> None:
    """One node per slice when there is no time for more; never more than so many in flight; then it waits (F4)."""
    monkeypatch.setattr(checkpoint_module, "MAX_IN_FLIGHT", 3)
    tree_of_20(rig)
    target = rig.make_set(b := Ordered())
    released = threading.Event()
    b.on_put = lambda keys: released.wait(WAIT_S) and None
    waits = []
    for _ in range(12):
        assert not rig.ctl.checkpoint_slice(target, 0.0)
        made = rig.ctl.checkpoint
        assert made is not None
        waits.append(made.waits)
    assert rig.ctl.counters()["ongoing_backup"] == 3
    assert not waits[0]
    assert not rig.ctl.checkpoint_slice(target, 1.0)
    assert made.waits
    released.set()
    checkpoint(rig, target)
    assert len(b.data) == 20
    assert not made.waits
