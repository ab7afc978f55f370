"""What stores do wrong, and what that may cost: a recompute, never a page, a lock or a request."""

import threading
import time
from collections.abc import Sequence

import pytest
from tests.unit.cache.support import PAGE, WAIT_S, MemoryStore, Rig, prompt

from hicache_hooks.backends.base import Got
from hicache_hooks.cache.hashing import chain_hashes, page_key
from hicache_hooks.cache.storage_set import SetLimits


def _preload(pages: int = 10, start: int = 1) -> tuple[MemoryStore, list[str]]:
    store = MemoryStore()
    rig = Rig(store=store)
    rig.serve(prompt(pages, start))
    rig.close()
    keys = [page_key(rig.namespace, h) for h in chain_hashes(prompt(pages, start), PAGE)]
    assert set(keys) == set(store.data)
    return store, keys


def _explode(error: BaseException) -> object:
    def act(keys: Sequence[str]) -> None:
        raise error

    return act


@pytest.mark.parametrize("policy", ["best_effort", "wait_complete", "timeout"])
@pytest.mark.parametrize("error", [OSError("gone"), SystemExit(3)])
def test_a_failed_read_ends_the_operation_and_the_request_goes_on(policy: str, error: BaseException) -> None:
    """F41: ``wait_complete`` does not wait for ever; exactly one outcome."""
    store, _ = _preload()
    store.on_get = _explode(error)  # type: ignore[assignment]
    rig = Rig(store=store, prefetch_policy=policy)
    began = time.monotonic()
    assert rig.serve(prompt(10)) == (0, 0, 0)
    assert time.monotonic() - began < 5.0
    ledger = rig.ctl.host_ledger
    assert ledger.started["prefetch"] == sum(n for (kind, _), n in ledger.ended.items() if kind == "prefetch") == 1
    rig.close()


@pytest.mark.parametrize("how", ["miss", "error", "corrupt", "raise"])
def test_a_bad_page_in_the_middle_keeps_what_is_before_it(how: str) -> None:
    """F80: page 4 of 10 fails: 4 pages are used, the rest is recomputed; a corrupt page is set aside."""
    store, keys = _preload()
    if how == "corrupt":
        store.data[keys[4]] = b"\0" + store.data[keys[4]][1:]

    class Failing(MemoryStore):
        def batch_get(self, asked: Sequence[str], pages: Sequence[memoryview]) -> list[Got]:
            results = super().batch_get(asked, pages)
            if keys[4] in asked and how == "raise":
                raise OSError("injected")
            if keys[4] in asked and how in ("miss", "error"):
                results[list(asked).index(keys[4])] = Got(how)
            return results

    failing = Failing()
    failing.data = store.data
    rig = Rig(store=failing, limits=SetLimits(threads_per_direction=1, batch_pages=2))
    assert rig.serve(prompt(10)) == (0, 0, 4 * PAGE)
    assert failing.gets == keys[:6]  # behind the gap nothing is read
    assert failing.aside == ([(keys[4], "checksum")] if how == "corrupt" else [])
    assert rig.ctl.stats()["prefetch_partial"] == 1
    rig.close()


def test_one_attempt_per_request_and_block() -> None:
    """F81: the store says that it has everything and never delivers; nobody asks twice."""
    store, keys = _preload()
    store.on_get = _explode(OSError("never"))  # type: ignore[assignment]
    store.gets.clear()
    rig = Rig(store=store, write_policy="write_back", device_pages=12)
    for i in range(100):
        rid = rig.start(prompt(10))
        rig.ctl.begin(rid, prompt(10))  # put back into the queue and begun again
        before = len(store.gets)
        rig.serve(prompt(10), rid)
        asked = store.gets[before:]
        assert len(asked) == len(set(asked)) or i == 0
        rig.flush()
    assert store.gets.count(keys[0]) == 100
    assert max(store.gets.count(key) for key in keys) <= 100
    rig.close()


def test_an_abort_during_a_fetch_frees_pages_when_no_thread_can_touch_them() -> None:
    """F42, F27: the page a thread writes to stays reserved until it is through."""
    store, _ = _preload()
    hold, inside = threading.Event(), threading.Event()

    def on_get(keys: Sequence[str]) -> None:
        inside.set()
        hold.wait(WAIT_S)

    store.on_get = on_get
    rig = Rig(store=store)
    rid = rig.start(prompt(10))
    rig.until(inside.is_set)
    rig.ctl.abort(rid)
    rig.ctl.abort(rid)
    rig.ctl.pump()
    rig.check()
    assert rig.ctl.host_ledger.reserved == 10
    assert rig.ctl.counters()["ongoing_prefetch"] == 1
    hold.set()
    rig.settle()
    assert rig.ctl.host_ledger.free == rig.host.num_pages
    rig.close()


def test_an_abort_during_the_look_up_fetches_nothing() -> None:
    """F42: no page is taken, and nobody's page is evicted, for a request that left."""
    store, _ = _preload()
    rig = Rig(store=store, host_pages=12, device_pages=16)
    rig.serve(prompt(9, start=2))
    hold, inside = threading.Event(), threading.Event()

    def on_exists(keys: Sequence[str]) -> None:
        inside.set()
        hold.wait(WAIT_S)

    store.on_exists = on_exists
    rid = rig.start(prompt(10))
    assert inside.wait(WAIT_S)
    rig.ctl.abort(rid)
    hold.set()
    rig.settle()
    assert store.gets == []
    assert "evicted_host_pages" not in rig.ctl.stats()
    assert rig.ctl.stats()["prefetch_cancelled"] == 1
    rig.close()


def test_a_slow_store_costs_dropped_writes_and_never_a_wait() -> None:
    """F44: pool of 100 pages, puts that hang; 300 requests pass, the scheduler never stops, drops are counted."""
    hold = threading.Event()
    store = MemoryStore()
    store.on_put = lambda keys: bool(hold.wait(WAIT_S)) and None
    rig = Rig(store=store, host_pages=100, limits=SetLimits(threads_per_direction=1, batch_pages=2))
    worst = 0.0
    for i in range(1, 301):
        tokens = prompt(3, start=i)
        rid = rig.start(tokens)
        rig.until(lambda rid=rid: rig.ctl.ready(rid))
        rig.until(lambda rid=rid: rig.ctl.admit(rid) is not None)
        rig.until(lambda rid=rid: rig.ctl.alloc(rid, 4) is not None)
        began = time.monotonic()
        rig.ctl.finish(rid, tokens)
        rig.ctl.pump()
        worst = max(worst, time.monotonic() - began)
        rig.until(lambda: rig.ctl.counters()["ongoing_write_through"] == 0)
    assert worst < 1.0
    assert rig.ctl._writer.pinned <= 50
    assert rig.ctl.stats()["dropped_backups"] > 200
    rig.check()
    hold.set()
    rig.settle()
    assert rig.ctl.host_ledger.reserved == 0
    rig.close()


def test_failing_puts_free_everything() -> None:
    """F38: every third call raises; nothing stays reserved, the rest is stored."""
    store = MemoryStore()

    def on_put(keys: Sequence[str]) -> None:
        if store.put_calls % 3 == 0:
            raise RuntimeError("third")

    store.on_put = on_put
    limits = SetLimits(threads_per_direction=1, batch_pages=1)
    rig = Rig(store=store, device_pages=310, host_pages=310, limits=limits)
    for i in range(1, 301):
        rig.serve(prompt(1, start=i))
    stats = rig.ctl.stats()
    assert (store.put_calls, stats["backup_failed"], len(store.data)) == (300, 100, 200)
    assert rig.ctl.host_ledger.reserved == 0
    assert all(report.alive and not report.restarts for report in rig.ctl.storage.threads())
    rig.close()


def test_forced_stop_ends_queued_backups_as_cancelled() -> None:
    """F119: 50 queued backups; all cancelled, nothing reserved, started = ended."""
    hold, inside = threading.Event(), threading.Event()
    store = MemoryStore()

    def on_put(keys: Sequence[str]) -> None:
        inside.set()
        hold.wait(WAIT_S)

    store.on_put = on_put
    limits = SetLimits(threads_per_direction=1, batch_pages=1, backup_fraction=1.0)
    rig = Rig(store=store, device_pages=64, host_pages=64, limits=limits)
    for i in range(1, 52):
        rid = rig.start(prompt(1, start=i))
        rig.until(lambda rid=rid: rig.ctl.ready(rid))
        rig.until(lambda rid=rid: rig.ctl.admit(rid) is not None)
        rig.until(lambda rid=rid: rig.ctl.alloc(rid, 2) is not None)
        rig.ctl.finish(rid, prompt(1, start=i))
    rig.until(lambda: rig.ctl.counters()["ongoing_backup"] == 51 and inside.is_set())
    old = rig.ctl.install(rig.make_set(None))
    assert len(old.stop(0.2)) == 1  # the thread inside the put
    assert not old.close()
    assert store.closed == 0  # F117: not under a live thread
    assert old.cancelled_total == 50
    rig.ctl.pump()
    rig.check()
    assert rig.ctl.stats()["backup_cancelled"] == 50
    assert rig.ctl.counters()["ongoing_backup"] == 1
    hold.set()
    rig.settle()
    ledger = rig.ctl.host_ledger
    assert (ledger.reserved, ledger.open) == (0, 0)
    assert ledger.started["backup"] == 51
    assert old.stop(WAIT_S) == []
    assert old.close()
    assert old.close()
    assert store.closed == 1
    rig.close()


def test_detach_releases_what_running_operations_hold_once() -> None:
    """F22: 5 prefetches and 5 backups under way; after the detach no map, page or lock is left."""
    store, _ = _preload(pages=2)
    for start in range(2, 6):
        more, _ = _preload(pages=2, start=start)
        store.data.update(more.data)
    hold = threading.Event()
    store.on_put = store.on_get = lambda keys: bool(hold.wait(WAIT_S)) and None
    limits = SetLimits(threads_per_direction=1, batch_pages=2, backup_fraction=1.0)
    rig = Rig(store=store, limits=limits)
    for start in range(11, 16):
        tokens = prompt(2, start=start)
        rid = rig.start(tokens)
        rig.until(lambda rid=rid: rig.ctl.ready(rid))
        rig.until(lambda rid=rid: rig.ctl.admit(rid) is not None)
        rig.until(lambda rid=rid: rig.ctl.alloc(rid, 3) is not None)
        rig.ctl.finish(rid, tokens)
    rig.until(lambda: rig.ctl.counters()["ongoing_backup"] == 5)
    rids = [rig.start(prompt(2, start=start)) for start in range(1, 6)]
    # One look-up at a time: the first fetch holds the only thread, the others wait as look-ups.
    rig.until(lambda: rig.ctl.storage.calls == 2)
    assert rig.ctl.counters()["ongoing_prefetch"] == 5
    old = rig.ctl.install(rig.make_set(None))
    assert len(old.stop(0.2)) == 2
    for rid in rids:
        rig.ctl.pump()
        rig.ctl.abort(rid)
    hold.set()
    assert old.stop(WAIT_S) == []
    assert old.close()
    rig.settle()
    assert not any(rig.ctl.counters().values())
    assert rig.ctl.tree.locks() == 0
    assert rig.ctl.host_ledger.reserved == 0
    rig.flush()
    rig.close()


def test_a_bypassed_set_queues_nothing() -> None:
    """F116, F77: under bypass 100 requests queue no item and reserve no page; switching it off works at once."""
    store, _ = _preload()
    rig = Rig(store=store)
    exists, puts = store.exists_calls, store.put_calls
    assert rig.ctl.storage.set_bypass(True) is False
    for i in range(100):
        rig.serve(prompt(2, start=20 + i))
    assert (store.exists_calls, store.put_calls, store.bypass) == (exists, puts, True)
    assert rig.ctl.storage.set_bypass(False) is True
    assert rig.serve(prompt(10)) == (0, 0, 10 * PAGE)
    rig.close()


def test_bypass_lets_waiting_requests_run() -> None:
    """F77: a request that waits for a hanging store under ``wait_complete`` runs as soon as bypass is on."""
    store, _ = _preload()
    hold = threading.Event()
    store.on_get = lambda keys: bool(hold.wait(WAIT_S)) and None
    rig = Rig(store=store, prefetch_policy="wait_complete")
    rid = rig.start(prompt(10))
    rig.until(lambda: rig.ctl.host_ledger.reserved == 10)
    assert not rig.ctl.ready(rid)
    rig.ctl.storage.set_bypass(True)
    assert rig.ctl.ready(rid)
    hold.set()
    assert rig.serve(prompt(10), rid)[2] == 0
    rig.close()
