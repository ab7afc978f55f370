"""Write policies, prefetch policies and the five knobs."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from tests.unit.cache.support import PAGE, WAIT_S, MemoryStore, Rig, prompt

from hicache_hooks.cache.knobs import Knobs
from hicache_hooks.cache.storage_set import SetLimits
from hicache_hooks.guard import Guard

# -- writing ---------------------------------------------------------------------------------------------------


def test_write_through_stores_what_was_computed() -> None:
    store = MemoryStore()
    rig = Rig(store=store, write_policy="write_through")
    rig.serve(prompt(5))
    assert len(store.data) == 5
    assert rig.ctl.host_ledger.in_tree == 5
    rig.close()


def test_selective_stores_at_the_second_use() -> None:
    """F61: the first request stores nothing; of the second, what it shares with the first."""
    store = MemoryStore()
    rig = Rig(store=store, write_policy="write_through_selective")
    tokens = prompt(6)
    rig.serve(tokens)
    assert (len(store.data), rig.ctl.host_ledger.in_tree) == (0, 0)
    rig.serve(tokens[: 4 * PAGE] + prompt(2, start=2))
    assert (len(store.data), rig.ctl.host_ledger.in_tree) == (4, 4)
    rig.close()


def test_write_back_stores_at_eviction() -> None:
    store = MemoryStore()
    rig = Rig(store=store, write_policy="write_back", device_pages=8)
    first = prompt(5)
    rig.serve(first)
    assert (len(store.data), rig.ctl.host_ledger.in_tree) == (0, 0)
    rig.serve(prompt(6, start=2))  # has no room beside the first
    assert len(store.data) == 5
    assert rig.serve(first) == (0, 5 * PAGE, 0)
    rig.close()


def test_write_back_drops_what_has_no_room_on_the_host() -> None:
    """F44: no waiting for room; the eviction goes on without the write."""
    rig = Rig(write_policy="write_back", device_pages=8, host_pages=2)
    for i in range(1, 6):
        rig.serve(prompt(6, start=i))
    assert rig.ctl.stats()["dropped_writes"] > 0
    rig.close()


def test_what_was_cached_before_the_attach_is_stored_at_its_next_use() -> None:
    """F13: nodes from the time without a store have no hashes; they are backfilled, children after parents."""
    rig = Rig()
    tokens = prompt(6)
    rig.serve(tokens)
    assert rig.ctl.tree.unhashed > 0
    store = MemoryStore()
    attached = rig.make_set(store)
    while not rig.ctl.backfill_slice(0.0):
        pass
    assert rig.ctl.tree.unhashed == 0
    rig.ctl.install(attached)
    rig.serve(tokens)
    assert len(store.data) == 6
    rig.flush()
    assert rig.serve(tokens) == (0, 0, 6 * PAGE)
    rig.close()


def test_a_failed_write_is_tried_again_at_the_next_use() -> None:
    store = MemoryStore()
    broken = [True]

    def on_put(keys: Sequence[str]) -> None:
        if broken[0]:
            raise OSError("injected")

    store.on_put = on_put
    rig = Rig(store=store)
    tokens = prompt(4)
    rig.serve(tokens)
    assert (len(store.data), rig.ctl.stats()["backup_failed"]) == (0, 1)
    broken[0] = False
    rig.serve(tokens)
    assert len(store.data) == 4
    rig.close()


# -- prefetching -----------------------------------------------------------------------------------------------


@pytest.fixture
def stored() -> MemoryStore:
    """A store that holds a prompt of six pages."""
    store = MemoryStore()
    rig = Rig(store=store)
    rig.serve(prompt(6))
    rig.close()
    return store


class Tap:
    """Lets a number of ``batch_get`` calls through, then holds the next ones."""

    def __init__(self, store: MemoryStore, through: int) -> None:
        self.permits = threading.Semaphore(through)
        store.on_get = self._on_get

    def _on_get(self, keys: Sequence[str]) -> None:
        if not self.permits.acquire(timeout=WAIT_S):
            raise TimeoutError

    def open(self) -> None:
        self.permits.release(100)


def _got(rig: Rig, pages: int) -> Callable[[], bool]:
    return lambda: any(op.prefix == pages for op in rig.ctl._prefetcher.running.values())


ONE_THREAD = SetLimits(threads_per_direction=1, batch_pages=2)


def test_best_effort_takes_what_is_there(stored: MemoryStore) -> None:
    tap = Tap(stored, 2)
    rig = Rig(store=stored, prefetch_policy="best_effort", limits=ONE_THREAD)
    tokens = prompt(6)
    rid = rig.start(tokens)
    rig.until(_got(rig, 4))
    assert rig.ctl.ready(rid)
    assert rig.ctl.match_prefix(tokens).pages == 4
    assert rig.ctl.counters()["ongoing_prefetch"] == 1  # a thread still writes to pages of the rest
    assert rig.ctl.host_ledger.reserved == 2
    tap.open()
    rig.settle()
    assert rig.ctl.host_ledger.reserved == 0
    assert rig.serve(tokens, rid) == (0, 0, 4 * PAGE)
    assert rig.ctl.stats()["prefetch_partial"] == 1
    rig.close()


def test_wait_complete_waits(stored: MemoryStore) -> None:
    tap = Tap(stored, 2)
    rig = Rig(store=stored, prefetch_policy="wait_complete", limits=ONE_THREAD)
    tokens = prompt(6)
    rid = rig.start(tokens)
    rig.until(_got(rig, 4))
    assert not rig.ctl.ready(rid)
    tap.open()
    assert rig.serve(tokens, rid) == (0, 0, 6 * PAGE)
    assert rig.ctl.stats()["prefetch_done"] == 1
    rig.close()


def test_timeout_waits_for_its_budget(stored: MemoryStore) -> None:
    now = [0.0]
    tap = Tap(stored, 1)
    rig = Rig(store=stored, prefetch_policy="timeout", limits=ONE_THREAD, clock=lambda: now[0])
    tokens = prompt(6)
    rid = rig.start(tokens)
    rig.until(_got(rig, 2))
    budget_s = rig.knobs.prefetch_budget_s(6 * PAGE)
    now[0] = budget_s - 0.001
    assert not rig.ctl.ready(rid)
    now[0] = budget_s
    assert rig.ctl.ready(rid)
    tap.open()
    assert rig.serve(tokens, rid) == (0, 0, 2 * PAGE)
    assert rig.ctl.stats()["prefetch_timed_out"] == 1
    rig.close()


def test_wait_complete_has_an_end(stored: MemoryStore) -> None:
    """A store that never answers costs one bounded wait."""
    now = [0.0]
    tap = Tap(stored, 0)
    rig = Rig(store=stored, prefetch_policy="wait_complete", limits=ONE_THREAD, clock=lambda: now[0])
    rid = rig.start(prompt(6))
    rig.until(lambda: rig.ctl.storage.calls)
    assert not rig.ctl.ready(rid)
    now[0] = ONE_THREAD.wait_complete_max_s
    assert rig.ctl.ready(rid)
    tap.open()
    rig.settle()
    rig.close()


def test_the_timeout_budget() -> None:
    knobs = Knobs(prefetch_timeout_base=2.0, prefetch_timeout_per_ki_token=0.5)
    assert knobs.prefetch_budget_s(2048) == 3.0
    assert replace(knobs, prefetch_timeout_max=2.5).prefetch_budget_s(2048) == 2.5
    assert Knobs() == Knobs(256, 1.0, 0.25, None, False, "best_effort", "write_through")


def test_knobs_take_effect_while_the_set_lives(stored: MemoryStore) -> None:
    """F20: a live key changes what happens, at once and without a new set."""
    rig = Rig(store=stored)
    set_ = rig.ctl.storage
    stored.exists_calls = 0
    former = set_.set_knobs(Knobs(prefetch_threshold=7 * PAGE))
    assert former.prefetch_threshold == PAGE
    rid = rig.start(prompt(6))
    assert (rig.ctl.counters()["ongoing_prefetch"], stored.exists_calls) == (0, 0)
    rig.ctl.abort(rid)
    set_.set_knobs(former)
    assert rig.serve(prompt(6)) == (0, 0, 6 * PAGE)
    rig.close()


def test_a_hit_shorter_than_the_threshold_is_not_fetched(stored: MemoryStore) -> None:
    """F57: and it is counted."""
    rig = Rig(store=stored, prefetch_threshold=5 * PAGE)
    stored.gets.clear()
    assert rig.serve(prompt(6)[: 4 * PAGE] + prompt(4, start=9)) == (0, 0, 0)
    assert stored.gets == []
    assert rig.ctl.stats()["prefetch_skipped_threshold"] == 1
    assert rig.serve(prompt(6)) == (4 * PAGE, 0, 0)  # 2 pages are missing: below the threshold, not even asked
    assert rig.ctl.stats()["prefetch_skipped_threshold"] == 2
    rig.close()


def test_what_lies_behind_a_gap_is_counted(stored: MemoryStore) -> None:
    """F57: pages that are stored behind one that is not can never be read; a whole chain, or an end, is no gap."""
    guard = Guard(stored, threads=False)
    rig = Rig(store=guard)
    asked: list[str] = []
    stored.on_exists = asked.extend
    assert rig.serve(prompt(6)) == (0, 0, 6 * PAGE)
    assert rig.serve(prompt(6, start=9)) == (0, 0, 0)
    assert (guard.store_usage().gaps, guard.store_usage().gap_pages) == (0, 0)
    rig.close()
    rig = Rig(store=Guard(stored, threads=False))
    guard = rig.ctl.storage.guard
    del stored.data[asked[1]]
    assert rig.serve(prompt(6)) == (0, 0, PAGE)
    assert (guard.store_usage().gaps, guard.store_usage().gap_pages) == (1, 4)
    rig.close()


def test_hits_below_the_threshold_are_told_to_the_guard(stored: MemoryStore) -> None:
    """F57: found and too short, or too little missing to ask: both are the threshold's."""
    guard = Guard(stored, threads=False)
    rig = Rig(store=guard, prefetch_threshold=5 * PAGE)
    rig.serve(prompt(6)[: 4 * PAGE] + prompt(4, start=9))
    assert (guard.store_usage().lookups, guard.store_usage().skipped) == (1, {"threshold": 1})
    rig.serve(prompt(6))
    assert (guard.store_usage().lookups, guard.store_usage().skipped) == (2, {"threshold": 2})
    rig.close()


class PrefixStore(MemoryStore):
    """Takes the preceding keys."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, list[str], list[str] | None]] = []

    def batch_put(self, keys, pages, prefix_keys=None):  # type: ignore[no-untyped-def]
        self.seen.append(("put", list(keys), prefix_keys))
        return super().batch_put(keys, pages)

    def batch_get(self, keys, pages, prefix_keys=None):  # type: ignore[no-untyped-def]
        self.seen.append(("get", list(keys), prefix_keys))
        return super().batch_get(keys, pages)

    def batch_exists(self, keys, prefix_keys=None):  # type: ignore[no-untyped-def]
        self.seen.append(("exists", list(keys), prefix_keys))
        return super().batch_exists(keys)


@pytest.mark.parametrize("enabled", [True, False])
def test_prefix_keys_are_handed_over_when_asked_for(enabled: bool) -> None:
    store = PrefixStore()
    one = SetLimits(threads_per_direction=1, batch_pages=2)  # pages are stored in order
    rig = Rig(store=store, limits=one, hicache_storage_pass_prefix_keys=enabled)
    rig.serve(prompt(4))
    rig.serve(prompt(4)[:-1] + prompt(4, start=2))
    rig.flush()
    rig.serve(prompt(4)[:-1] + prompt(4, start=2))
    chain = list(store.data)
    for kind, keys, before in store.seen:
        if enabled:
            assert [*(before or []), *keys] == chain[: len(before or []) + len(keys)] or kind == "exists"
        else:
            assert before is None
    assert {kind for kind, _, before in store.seen if before} == ({"put", "get", "exists"} if enabled else set())
    rig.close()


def test_prefetches_leave_room_for_serving(stored: MemoryStore) -> None:
    """F44: together they own at most their share of the host pool."""
    other = Rig(store=stored)
    other.serve(prompt(6, start=2))
    other.close()
    tap = Tap(stored, 0)
    limits = SetLimits(threads_per_direction=1, batch_pages=2, prefetch_fraction=0.5)
    rig = Rig(store=stored, host_pages=16, limits=limits, prefetch_policy="best_effort")
    rids = [rig.start(prompt(6)), rig.start(prompt(6, start=2))]
    rig.until(lambda: rig.ctl.storage.calls and rig.ctl.host_ledger.reserved > 6)
    assert rig.ctl.host_ledger.reserved == 8
    tap.open()
    for rid in rids:
        rig.ctl.abort(rid)
    rig.settle()
    rig.close()
