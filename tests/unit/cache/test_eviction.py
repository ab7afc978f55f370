"""Eviction of both tiers while transfers hold nodes; splits under way. The test runs the queued work itself."""

from tests.unit.cache.support import PAGE, MemoryStore, Rig, prompt


def _compute(rig: Rig, tokens: list[int]) -> None:
    """A request from start to end, without running any transfer."""
    rid = rig.start(tokens)
    assert rig.ctl.ready(rid)
    assert rig.ctl.admit(rid) is not None
    admission = rig.ctl.loaded(rid)
    assert admission is not None
    assert rig.ctl.alloc(rid, -(-len(tokens) // PAGE) - len(admission.pages)) is not None
    rig.ctl.finish(rid, tokens)
    rig.check()


def test_a_node_that_splits_while_it_is_written_is_written_once() -> None:
    """Tree rule 3: both halves get their pages from the one write."""
    rig = Rig(manual=True)
    _compute(rig, prompt(6))
    assert rig.ctl.counters()["ongoing_write_through"] == 1
    _compute(rig, prompt(6)[: 3 * PAGE] + prompt(2, start=2))  # splits, and uses the upper half again
    assert rig.ctl.counters()["ongoing_write_through"] == 2  # the second one is the new branch
    rig.run_queued()
    rig.ctl.pump()
    rig.check()
    assert rig.ctl.host_ledger.in_tree == 8
    assert rig.ctl.host_ledger.started["write"] == 2
    rig.close()


def test_a_node_that_splits_while_it_is_stored_is_stored_once() -> None:
    store = MemoryStore()
    rig = Rig(manual=True, store=store, prefetch_threshold=10_000)
    _compute(rig, prompt(6))
    rig.run_queued()
    rig.ctl.pump()
    assert rig.ctl.counters()["ongoing_backup"] == 1
    _compute(rig, prompt(6)[: 3 * PAGE] + prompt(2, start=2))
    assert rig.ctl.counters()["ongoing_backup"] == 1
    while any(rig.ctl.counters().values()):
        rig.run_queued()
        rig.ctl.pump()
    assert rig.ctl.host_ledger.started["backup"] == 2
    assert len(store.data) == 8
    assert all(node.stored_in == rig.ctl.storage.id and not node.backing for node in rig.ctl.tree.nodes())
    rig.close()


def test_a_branch_under_backup_outlives_the_eviction_of_its_parent() -> None:
    """A device leaf without a host copy takes its host-only children with it, except while one is in a transfer."""
    store = MemoryStore()
    rig = Rig(manual=True, store=store, prefetch_threshold=10_000)
    stem = prompt(2)[:-1]
    _compute(rig, [*stem, 1])
    _compute(rig, stem + prompt(2, start=2))
    rig.run_queued(2)  # both copies to the host; then both backups are queued
    rig.ctl.pump()
    tree = rig.ctl.tree
    parent = next(iter(tree.root.children.values()))
    child = next(iter(parent.children.values()))
    rig.run_queued(1)  # the parent's backup is done, the child's goes on
    rig.ctl.pump()
    assert (parent.backing, child.backing) == (False, True)
    rig.ctl._evictor.drop_device(child)
    rig.ctl.host_ledger.free_tree(parent.host or [])
    parent.host = None
    assert not rig.ctl._writer.device_room(rig.device.num_pages)
    rig.check()
    assert child.host is not None
    rig.run_queued()
    rig.ctl.pump()
    assert rig.ctl._writer.device_room(rig.device.num_pages)
    rig.check()
    assert not list(tree.nodes())
    assert rig.ctl.host_ledger.free == rig.host.num_pages
    rig.close()


def test_a_small_host_pool_gives_up_copies_of_what_the_device_has() -> None:
    """A full L2 that only doubles L1 must not keep new pages out."""
    rig = Rig(device_pages=32, host_pages=8)
    for start in range(1, 5):
        rig.serve(prompt(6, start=start))
    assert rig.ctl.host_ledger.in_tree <= 8
    assert rig.ctl.stats()["evicted_host_pages"] == 18
    assert rig.serve(prompt(6, start=4))[0] == 6 * PAGE
    rig.close()


def test_more_prompts_than_both_tiers_hold() -> None:
    """Contents stay right while everything is evicted all the time and comes back from the store."""
    store = MemoryStore()
    rig = Rig(store=store, device_pages=14, host_pages=20)
    totals = [0, 0, 0]
    for round_ in range(4):
        for start in range(1, 7):
            counts = rig.serve(prompt(6, start=start))
            totals = [a + b for a, b in zip(totals, counts, strict=True)]
            assert round_ == 0 or sum(counts) == 6 * PAGE
    assert totals[2] > 0
    rig.close()


def test_a_fetch_whose_beginning_was_evicted_meanwhile_is_thrown_away() -> None:
    """Pages that cannot be reached from the root are of no use, and none of them is lost."""
    store = MemoryStore()
    first = Rig(store=store)
    first.serve(prompt(6))
    first.close()
    rig = Rig(manual=True, store=store, prefetch_threshold=3 * PAGE)
    _compute(rig, prompt(6)[: 2 * PAGE + 1])
    rid = rig.start(prompt(6))
    rig.run_queued()  # the look-up, and the copy of the two pages to the host
    rig.ctl.pump()
    rig.run_queued(1)  # the first batch of the fetch
    reads, writes = rig.ctl.storage._reads._queue._items, rig.ctl.storage._writes._queue._items
    assert (len(reads), len(writes)) == (1, 1)
    writes.popleft().run()  # the backup of the two pages: nothing holds them any more
    rig.ctl.pump()
    assert rig.ctl._writer.device_room(rig.device.num_pages)
    assert rig.ctl._evictor.host_room(rig.host.num_pages - 4) == rig.host.num_pages - 4
    assert rig.ctl.match_prefix(prompt(6)).pages == 0
    rig.run_queued()
    rig.ctl.pump()
    rig.check()
    assert rig.ctl.stats()["orphaned_pages"] == 4
    assert rig.ctl.host_ledger.free == rig.host.num_pages
    admission = rig.ctl.admit(rid)
    assert admission is not None
    assert admission.pages == []
    rig.ctl.abort(rid)
    rig.close()
