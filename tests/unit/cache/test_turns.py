"""Few calls at a time at a store that wants it so, and none kept out by one that hangs."""

import threading
import time
from collections.abc import Callable

import pytest
from tests.unit.cache.support import MemoryStore, Rig, prompt

from hicache_hooks.backends.base import Got, Manifest
from hicache_hooks.cache.storage_set import SetLimits
from hicache_hooks.cache.turns import Turns
from hicache_hooks.guard import Guard

WAIT_S = 10.0


class Caller:
    """A thread in a turn until it is let go."""

    def __init__(self, turns: Turns) -> None:
        self.inside, self.go = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._main, args=(turns,), daemon=True)
        self.thread.start()

    def _main(self, turns: Turns) -> None:
        with turns.one():
            self.inside.set()
            self.go.wait(WAIT_S)

    def end(self) -> None:
        self.go.set()
        self.thread.join(WAIT_S)


def test_one_at_a_time_and_any_number() -> None:
    turns = Turns(1)
    first = Caller(turns)
    assert first.inside.wait(WAIT_S)
    second = Caller(turns)
    assert not second.inside.is_set()
    first.end()
    assert second.inside.wait(WAIT_S)
    second.end()
    unbounded = [Caller(Turns(0)) for _ in range(3)]
    assert all(caller.inside.wait(WAIT_S) for caller in unbounded)
    for caller in unbounded:
        caller.end()


def test_the_turn_of_a_call_that_hangs_is_taken_once_and_not_given_back_twice() -> None:
    """F46: else each later call would wait for the limit, or two would go at a time for ever after."""
    turns = Turns(1, wait_s=0.02)
    hung = Caller(turns)
    assert hung.inside.wait(WAIT_S)
    second = Caller(turns)
    assert second.inside.wait(WAIT_S), "it has waited"
    second.end()
    turns._wait_s = WAIT_S
    began = time.monotonic()
    third = Caller(turns)
    assert third.inside.wait(WAIT_S)
    assert time.monotonic() - began < WAIT_S / 2, "the second gave its turn back"
    hung.end()
    assert turns._free == 0, "the one that hung had lost its turn"
    third.end()
    assert turns._free == 1


class Counting(MemoryStore):
    """Counts the calls that are inside at once. Each waits for a second one, which must come where any may."""

    def __init__(self, calls: int, batch_bytes: int) -> None:
        super().__init__()
        self.manifest = Manifest(name="counting", layouts=("page_first",), calls=calls, batch_bytes=batch_bytes)
        self.most, self.batches = 0, 0
        self._wait_s = 0.02 if calls == 1 else WAIT_S
        self._inside = 0
        self._changed = threading.Condition()

    def _call(self, work: Callable[[], list[Got]]) -> list[Got]:
        with self._changed:
            self._inside += 1
            self.batches += 1
            self.most = max(self.most, self._inside)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.most > 1, self._wait_s)
        try:
            return work()
        finally:
            with self._changed:
                self._inside -= 1

    def batch_get(self, keys, pages):  # type: ignore[no-untyped-def]
        return self._call(lambda: super(Counting, self).batch_get(keys, pages))

    open = register = delete = clear = lambda self, *args: 0

    def health(self) -> dict[str, object]:
        return {}


@pytest.mark.parametrize(("calls", "most"), [(1, 1), (0, 2)])
def test_a_set_keeps_to_what_the_manifest_wants(calls: int, most: int) -> None:
    store = Counting(calls, batch_bytes=1 << 30)
    guard = Guard(store, name="counting")  # type: ignore[arg-type]
    rig = Rig(store=guard, limits=SetLimits(threads_per_direction=2, batch_pages=4))  # type: ignore[arg-type]
    rig.serve(prompt(16))
    rig.flush()
    assert rig.serve(prompt(16))[2] > 0
    assert (store.most, store.batches) == (most, 4)
    rig.settle()
    rig.close()


@pytest.mark.parametrize(("pages", "batch"), [(2, 2), (100, 32), (0, 1)])
def test_the_batch_is_cut_by_the_manifests_bytes(pages: int, batch: int) -> None:
    rig = Rig()
    store = Counting(0, batch_bytes=pages * rig.host.page_bytes)
    guard = Guard(store, name="counting")  # type: ignore[arg-type]
    rig.limits = SetLimits()
    made = rig.make_set(guard)  # type: ignore[arg-type]
    assert made.batch_pages == batch
    made.stop(WAIT_S)
    made.close()
    rig.close()


def test_what_the_options_make_of_a_backend_counts_before_its_class() -> None:
    """AIBrix alone in memory takes any number of calls, with a connector one."""
    store = Counting(1, batch_bytes=1)
    assert Guard(store).manifest is store.manifest  # type: ignore[arg-type]
    other = Manifest(name="counting", layouts=("page_first",))
    assert Guard(store, manifest=other).manifest is other  # type: ignore[arg-type]
