"""Calls past their deadline: nobody waits for them, nobody touches their pages, and no thread is lost to them."""

import threading
import time
from collections.abc import Callable, Sequence

import pytest
from tests.unit.cache.support import PAGE, WAIT_S, MemoryStore, Rig, prompt

from hicache_hooks.backends.base import Got, Manifest
from hicache_hooks.cache.storage_set import SetLimits
from hicache_hooks.cache.workers import LATE_PER_THREAD, Run, Workers, current_run
from hicache_hooks.guard import Guard
from hicache_hooks.guard_settings import GuardSettings

DEADLINE_S = 0.15


class Late(MemoryStore):
    """A backend behind a real guard that holds a call until it is let go, then touches what it was given."""

    manifest = Manifest(name="late", layouts=("page_first",))

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.inside = threading.Event()
        self.hold: set[str] = set()
        self.scribbled = 0

    def wait(self, method: str) -> bool:
        if method not in self.hold:
            return False
        self.inside.set()
        self.go.wait(WAIT_S)
        return True

    def batch_put(self, keys: Sequence[str], pages: Sequence[memoryview]) -> list[bool]:
        self.wait("put")
        return super().batch_put(keys, pages)

    def batch_get(self, keys: Sequence[str], pages: Sequence[memoryview]) -> list[Got]:
        if self.wait("get"):
            for page in pages:
                page[:] = b"\xee" * page.nbytes
                self.scribbled += 1
            return [Got.HIT] * len(keys)
        return super().batch_get(keys, pages)

    def batch_exists(self, keys: Sequence[str]) -> list[bool]:
        self.wait("exists")
        return super().batch_exists(keys)

    def health(self) -> dict[str, object]:
        return {}

    # Not used here, but part of the contract.
    open = register = delete = clear = lambda self, *args: 0  # type: ignore[assignment]


def guarded(store: Late, **settings: float) -> Guard:
    values = {"deadline_s": DEADLINE_S, "probe_idle_s": 0.0, "hold_s": 60.0, **settings}
    return Guard(store, name="late", settings=GuardSettings(**values))  # type: ignore[arg-type]


def rig_of(store: Late, **kwargs: object) -> tuple[Rig, Guard]:
    guard = guarded(store)
    rig = Rig(store=guard, limits=SetLimits(threads_per_direction=2, batch_pages=4), **kwargs)  # type: ignore[arg-type]
    return rig, guard


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
@pytest.mark.parametrize("where", ["exists", "get"])
def test_a_request_goes_on_after_the_deadline(where: str, layout: str) -> None:
    """F41: ``wait_complete`` waits one deadline, not for ever; later requests do not wait at all."""
    store = Late()
    rig, guard = rig_of(store, layout=layout)
    rig.serve(prompt(8))
    assert len(store.data) == 8
    rig.flush()
    store.hold.add(where)
    began = time.monotonic()
    assert rig.serve(prompt(8)) == (0, 0, 0)
    assert time.monotonic() - began >= DEADLINE_S
    assert guard.report().timeouts >= 1
    stats = dict(rig.ctl.host_ledger.started)
    for i in range(2, 12):
        assert rig.serve(prompt(8, start=i)) == (0, 0, 0)
    assert rig.ctl.host_ledger.started["prefetch"] == stats["prefetch"]  # the breaker is open: nothing is begun
    store.go.set()
    rig.until(lambda: guard.report().late == 0 and rig.ctl.host_ledger.reserved == 0)
    rig.settle()
    rig.close()


def test_pages_of_a_late_read_are_nobody_elses_until_it_is_back() -> None:
    """F27: a store that fills its pages long after the deadline fills pages that nobody uses."""
    store = Late()
    rig, _ = rig_of(store, device_pages=64, host_pages=40)
    rig.serve(prompt(8))
    rig.flush()
    store.hold.add("get")
    rig.serve(prompt(8))
    assert rig.ctl.host_ledger.reserved == 8
    store.hold.clear()
    for i in range(2, 30):  # many times the host pool: every page but the pinned ones is used again
        rig.serve(prompt(8, start=i))
    assert rig.ctl.host_ledger.reserved == 8
    store.go.set()
    rig.until(lambda: rig.ctl.host_ledger.reserved == 0)
    assert store.scribbled
    for node in rig.ctl.tree.nodes():  # what L2 holds is what was put there
        assert node.host is None or node.hashes
    for i in range(20, 30):
        rig.serve(prompt(8, start=i))  # compares what came from the host with what must be in it
    assert rig.ctl.stats()["evicted_host_pages"] > 100
    rig.close()


@pytest.mark.parametrize("flushed", [False, True])
def test_a_late_write_stores_the_bytes_of_its_own_pages(flushed: bool) -> None:
    """The pages of a put that was given up are not reused: what arrives in the store later is still right."""
    store = Late()
    rig, guard = rig_of(store, device_pages=64, host_pages=40)
    store.hold.add("put")
    rid = rig.start(prompt(4))
    rig.until(lambda: rig.ctl.admit(rid) is not None)
    rig.ctl.alloc(rid, 5)
    for i in range(4):
        rig.device.page(rig.ctl._requests[rid].pages[i]).copy_(rig.content(prompt(4), i))
    rig.ctl.finish(rid, prompt(4))
    rig.until(lambda: guard.report().late == 1)
    store.hold.clear()
    rig.settle()  # nobody waits for it any more
    for i in range(2, 30):
        rig.serve(prompt(8, start=i))
    assert rig.ctl.host_ledger.reserved == 0  # its pages are the tree's, locked
    if flushed:  # the tree is emptied: now they are the operation's
        rig.flush()
        assert (rig.ctl.host_ledger.reserved, rig.ctl.tree.locks()) == (4, 0)
        for i in range(2, 30):
            rig.serve(prompt(8, start=i))
    store.go.set()
    rig.until(lambda: not rig.ctl._writer.backups)
    rig.check()
    rig.flush()
    assert (rig.ctl.host_ledger.free, rig.ctl.tree.locks()) == (40, 0)
    assert len(store.data) == 4
    fresh = Rig(store=store)
    assert fresh.serve(prompt(4)) == (0, 0, 4 * PAGE)  # with right content, or serve raises
    fresh.close()
    rig.close()


def test_what_was_given_up_does_not_keep_the_engine_busy() -> None:
    """F77: a store that hangs can be detached; it is closed when its call is back (F27, F117)."""
    store = Late()
    rig, guard = rig_of(store)
    rig.serve(prompt(8))
    rig.flush()
    store.hold.add("get")
    rig.serve(prompt(8))
    until(lambda: not any(rig.ctl.counters().values()))  # a worker leaves its call a moment after its result
    rig.ctl.install(rig.make_set(None))
    old = rig.sets[0]
    assert old.stop(0.2) != []
    assert not old.close()
    assert old.still_inside() != []
    assert any(report.stalled_s > 0 for report in old.threads() if "late" in report.name)
    store.go.set()
    until(lambda: not old.stop(WAIT_S))
    assert old.close()
    assert (store.closed, guard.closed) == (1, True)
    rig.sets.remove(old)
    rig.close()


# ------------------------------------------------------------------ the threads


class Held:
    """An item that waits to be let go."""

    def __init__(self) -> None:
        self.go, self.inside = threading.Event(), threading.Event()
        self.how: list[str] = []
        self.run_: Run | None = None

    def run(self) -> None:
        self.run_ = current_run()
        self.inside.set()
        self.go.wait(WAIT_S)
        self.how.append("ran")

    def failed(self, error: BaseException) -> None:
        self.how.append("failed")

    def cancelled(self) -> None:
        self.how.append("cancelled")

    def late(self) -> None:
        self.how.append("late")


def give_up(workers: Workers[Held], item: Held) -> None:
    assert item.inside.wait(WAIT_S)
    assert item.run_ is not None
    workers.give_up(item.run_)


def test_a_thread_that_was_given_up_is_replaced_and_leaves_when_it_is_back() -> None:
    workers: Workers[Held] = Workers("w", 1)
    workers.start()
    first, second = Held(), Held()
    workers.submit([first, second])
    give_up(workers, first)
    assert second.inside.wait(WAIT_S)
    second.go.set()
    assert workers.wait_idle(time.monotonic() + WAIT_S)
    assert (first.how, second.how) == (["late"], ["ran"])
    assert [report.name for report in workers.reports()] == ["w-0", "w-0-late-1"]
    assert workers.alive == 2
    first.go.set()
    until(lambda: workers.alive == 1)
    assert first.how == ["late", "ran"]
    assert [report.name for report in workers.reports()] == ["w-0"]
    workers.signal_stop()
    assert workers.join(time.monotonic() + WAIT_S) == []


def test_an_item_that_ended_meanwhile_is_not_given_up() -> None:
    """The deadline and the answer may come together: the next item of that thread is not the one that is late."""
    workers: Workers[Held] = Workers("w", 1)
    workers.start()
    first, second = Held(), Held()
    first.go.set()
    workers.submit([first, second])
    assert second.inside.wait(WAIT_S)
    assert first.run_ is not None
    workers.give_up(first.run_)
    assert (first.how, second.how, workers.alive) == (["ran"], [], 1)
    second.go.set()
    workers.signal_stop()
    assert workers.join(time.monotonic() + WAIT_S) == []


def test_threads_that_hang_are_capped_and_queued_work_ends() -> None:
    """F46, F44: above the cap nobody waits for a thread that does not come."""
    workers: Workers[Held] = Workers("w", 1)
    workers.start()
    hanging = [Held() for _ in range(LATE_PER_THREAD + 1)]
    queued = Held()
    for item in hanging:
        assert workers.submit([item])
        if item is hanging[-1]:
            assert item.inside.wait(WAIT_S)
            workers.submit([queued])
        give_up(workers, item)
    assert queued.how == ["cancelled"]
    assert not workers.usable
    assert not workers.submit([Held()])
    assert workers.alive == LATE_PER_THREAD + 1
    hanging[0].go.set()  # one is back: it takes the empty place
    until(lambda: workers.usable)
    fine = Held()
    fine.go.set()
    assert workers.submit([fine])
    assert workers.wait_idle(time.monotonic() + WAIT_S)
    assert fine.how == ["ran"]
    for item in hanging:
        item.go.set()
    workers.signal_stop()
    assert workers.join(time.monotonic() + WAIT_S) == []


class Deadly(Held):
    """Ends its thread, as a vendor's ``sys.exit`` does."""

    def run(self) -> None:
        super().run()
        raise SystemExit


def test_work_behind_the_last_thread_ends_when_no_other_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """F38, F44: the thread died, the system gives no other; nobody waits for ever for what was queued."""
    workers: Workers[Held] = Workers("w", 1)
    workers.start()
    deadly, queued = Deadly(), Held()
    workers.submit([deadly])
    assert deadly.inside.wait(WAIT_S)
    workers.submit([queued])

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        deadly.go.set()
        assert workers.wait_idle(time.monotonic() + WAIT_S)
        until(lambda: queued.how == ["cancelled"])
        assert not workers.usable
    fine = Held()
    fine.go.set()
    assert workers.submit([fine])  # a thread can be had again
    assert workers.wait_idle(time.monotonic() + WAIT_S)
    assert fine.how == ["ran"]
    workers.signal_stop()
    assert workers.join(time.monotonic() + WAIT_S) == []
