"""Closing a parked backend: it is closed when its store's own close has returned, not before."""

import threading
import time
from typing import Any

from tests.unit.sglang.test_storage_guard import WAIT_S, Store, background, guarded, page, until

from hicache_hooks.sglang.build import wait_and_close


def test_a_call_that_was_given_up_keeps_the_store_open_and_is_named() -> None:
    """F117: the engine's threads are out, the store's own call is not: it is stuck, with the thread's name."""
    store = Store()
    guard = guarded(store, deadline_s=0.02)
    store.hang = True
    assert guard.batch_get(["a"], [page()]) == [None]
    assert guard.in_flight() == 0
    stuck = wait_and_close(guard, 0.1)
    assert stuck == guard.given_up()
    assert [name.startswith("hicache-call-") for name in stuck] == [True]
    assert "close" not in store.log
    store.gate.set()
    assert wait_and_close(guard, WAIT_S) == []
    assert store.log.count("close") == 1


def test_a_close_that_hangs_is_named_and_costs_its_time_alone() -> None:
    """F117: tried again by the closer; the store is closed once, however often it is asked for."""
    store, gate = Store(), threading.Event()
    guard: Any = guarded(store)
    closes = guard._core._close
    guard._core._close = lambda: (gate.wait(WAIT_S), closes())
    for _ in range(2):
        started = time.monotonic()
        assert wait_and_close(guard, 0.05) == ["the store's own close"]
        assert time.monotonic() - started < WAIT_S / 2
    gate.set()
    assert wait_and_close(guard, WAIT_S) == []
    assert store.log.count("close") == 1


def test_a_close_that_runs_elsewhere_is_waited_for() -> None:
    store = Store()
    gate = threading.Event()
    guard: Any = guarded(store)
    closes = guard._core._close
    guard._core._close = lambda: (gate.wait(WAIT_S), closes())
    thread, _ = background(guard.close)
    until(lambda: guard._core.close_error == "closing")
    assert wait_and_close(guard, 0.05) == ["the store's own close"]
    gate.set()
    assert wait_and_close(guard, WAIT_S) == []
    thread.join(WAIT_S)
