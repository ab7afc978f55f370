"""Installing storage sets: one reference, nothing of L3 while detached, hot swaps, flat resources."""

import os
import threading

import pytest
from tests.unit.cache.support import PAGE, WAIT_S, MemoryStore, Rig, prompt

from hicache_proto.model import MANDATORY_COUNTERS


def _threads() -> set[str]:
    return {t.name for t in threading.enumerate() if t.name.startswith("hicache-")}


def test_a_detached_engine_pays_nothing_of_l3() -> None:
    """No storage thread, no hash, no key; L1 and L2 work."""
    before = _threads()
    rig = Rig()
    assert len(_threads() - before) == 2  # one copy thread per direction
    rig.serve(prompt(6))
    rig.ctl._writer.device_room(rig.device.num_pages)
    assert rig.serve(prompt(6)) == (0, 6 * PAGE, 0)
    assert all(node.hashes is None for node in rig.ctl.tree.nodes())
    rig.close()
    assert _threads() == before


def test_install_returns_the_old_set_and_undo_restores_it() -> None:
    """Rule 10, F13: the policies ride on the set, so undo restores them as well."""
    store = MemoryStore()
    rig = Rig(write_policy="write_back")
    old = rig.ctl.storage
    new = rig.make_set(store, write_policy="write_through")
    assert rig.ctl.install(new) is old
    assert (rig.ctl.storage, old.active, new.active) == (new, False, True)
    assert rig.ctl.install(old) is new
    assert (rig.ctl.storage, old.active, new.active) == (old, True, False)
    assert rig.ctl.storage.knobs.write_policy == "write_back"
    rig.serve(prompt(4))
    assert store.exists_calls == store.put_calls == 0
    rig.close()


def test_installing_the_same_set_changes_nothing() -> None:
    rig = Rig(store=MemoryStore())
    assert rig.ctl.install(rig.ctl.storage) is rig.ctl.storage
    assert rig.ctl.storage.active
    rig.close()


def test_in_a_hot_swap_the_old_set_finishes_what_it_accepted() -> None:
    """New transfers take the new set; the old one's fetch still serves its request."""
    first, second = MemoryStore(), MemoryStore()
    rig = Rig(store=first)
    rig.serve(prompt(6))
    rig.flush()
    hold, inside = threading.Event(), threading.Event()

    def on_exists(keys: object) -> None:
        inside.set()
        hold.wait(WAIT_S)

    first.on_exists = on_exists
    rid = rig.start(prompt(6))
    assert inside.wait(WAIT_S)
    old = rig.ctl.install(rig.make_set(second))
    hold.set()  # the look-up ends after the swap: the fetch goes to the old set as well
    assert rig.serve(prompt(6), rid) == (0, 0, 6 * PAGE)
    assert len(second.data) == 6  # and what the old store had is stored in the new one at its use
    assert old.stop(WAIT_S, drain_s=WAIT_S) == []
    assert old.close()
    rig.close()


def test_draining_stop_lets_queued_work_through() -> None:
    store = MemoryStore()
    rig = Rig(store=store)
    rid = rig.start(prompt(6))
    rig.until(lambda: rig.ctl.ready(rid))
    rig.until(lambda: rig.ctl.admit(rid) is not None)
    rig.until(lambda: rig.ctl.alloc(rid, 7) is not None)
    rig.ctl.finish(rid, prompt(6))
    rig.until(lambda: rig.ctl.counters()["ongoing_write_through"] == 0)
    old = rig.ctl.install(rig.make_set(None))
    assert old.stop(WAIT_S, drain_s=WAIT_S) == []
    assert (len(store.data), old.cancelled_total) == (6, 0)
    rig.settle()
    rig.close()


@pytest.mark.parametrize("with_store", [True, False])
def test_counters_name_every_transfer(with_store: bool) -> None:
    """F1, F2: the names are mandatory ones; zero in idle."""
    rig = Rig(store=MemoryStore() if with_store else None)
    counters = rig.ctl.counters()
    assert set(counters) == set(MANDATORY_COUNTERS[MANDATORY_COUNTERS.index("ongoing_write_through") :])
    assert not any(counters.values())
    assert rig.ctl.ages_ms() == {}
    rig.close()


def test_a_transfer_shows_until_it_was_pumped() -> None:
    """F1: completions are only taken by ``pump``, which runs in idle as well; ages are told."""
    now = [0.0]
    rig = Rig(clock=lambda: now[0])
    rid = rig.start(prompt(2))
    rig.ctl.admit(rid)
    assert rig.ctl.alloc(rid, 3)
    rig.ctl.finish(rid, prompt(2))
    now[0] = 1.5
    with rig.woken:
        assert rig.woken.wait_for(lambda: len(rig.ctl._s.inbox) > 0, WAIT_S)
    assert rig.ctl.counters()["ongoing_write_through"] == 1
    assert rig.ctl.ages_ms() == {"ongoing_write_through": 1500}
    assert not rig.ctl.flush()
    assert rig.ctl.pump() == 1
    assert not any(rig.ctl.counters().values())
    rig.flush()
    rig.close()


def test_flush_refuses_while_a_request_lives() -> None:
    rig = Rig()
    rid = rig.start(prompt(2))
    assert not rig.ctl.flush()
    rig.ctl.abort(rid)
    rig.flush()
    rig.close()


def test_cycles_leave_threads_and_descriptors_as_they_were() -> None:
    """F43: 200 attach/serve/detach cycles; threads and descriptors end where they started, every store closed once."""
    rig = Rig(write_policy="write_back")
    detached = rig.ctl.storage
    threads, descriptors = _threads(), len(os.listdir("/proc/self/fd"))
    stores = []
    for i in range(200):
        store = MemoryStore()
        stores.append(store)
        rig.ctl.install(rig.make_set(store))
        rig.serve(prompt(3, start=1 + i % 7))
        attached = rig.ctl.install(detached)
        assert attached.stop(WAIT_S) == []
        assert attached.close()
        rig.sets.remove(attached)
        rig.check()
    assert _threads() == threads
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert all(store.closed == 1 for store in stores)
    rig.close()


def test_a_set_that_gets_too_few_threads_stops_those_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """F14: the start fails as a whole, and the set can be closed."""
    before = _threads()
    rig = Rig(manual=True)
    store = MemoryStore()
    half = rig.make_set(store)
    start, started = threading.Thread.start, []

    def scarce(thread: threading.Thread) -> None:
        if len(started) == 3:
            raise RuntimeError("can't start new thread")
        started.append(thread.name)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", scarce)
    with pytest.raises(RuntimeError, match="new thread"):
        half.start_parked()
    assert len(started) == 3
    assert _threads() == before
    assert half.close()
    assert store.closed == 1
    rig.close()
