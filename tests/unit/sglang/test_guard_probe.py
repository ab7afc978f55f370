"""The guard's own probes: how a bypassed store comes back, and how an idle one's death is known."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.unit.sglang.test_storage_guard import WAIT_S, Clock, Store, background, page, until

from hicache_hooks.breaker import BreakerSettings
from hicache_hooks.guard_settings import GuardSettings as Told
from hicache_hooks.sglang.guard_core import GuardCore, GuardSettings
from hicache_hooks.sglang.pool_memory import PoolMemory
from hicache_hooks.sglang.storage_guard import StorageGuard

BREAKER = BreakerSettings(hold_s=2.0, jitter=0.0, probes_to_close=2, probe_gap_s=0.2, min_calls=2)
_made: list[StorageGuard] = []


@pytest.fixture
def store() -> Iterator[Store]:
    made = Store()
    yield made
    made.gate.set()
    while _made:
        _made.pop().close()


def probed(store: Store, clock: Any, **settings: Any) -> StorageGuard:
    guard: Any = StorageGuard()
    _made.append(guard)
    guard._inner, guard._pools, guard._empty_result = store, PoolMemory(), lambda: "empty"
    look = lambda: store.batch_exists(["absent"])  # noqa: E731
    guard._core = GuardCore("store", GuardSettings(**settings), clock, store.close, look)
    made: StorageGuard = guard
    return made


def by_hand(guard: StorageGuard) -> Any:
    """Its probes, on the test's clock and thread."""
    probes = guard._core._probes
    assert probes is not None
    probes.stop()
    return probes


def failing(store: Store, guard: StorageGuard) -> None:
    store.trouble = OSError(5, "gone")
    for _ in range(3):
        guard.batch_get(["a"], [page()])
        guard.batch_set(["a"], [page()])
    assert {side: report.state for side, report in guard.guard_report().sides.items()} == {
        "read": "open",
        "write": "open",
    }


def test_a_bypassed_store_that_is_well_again_closes_its_breakers(store: Store) -> None:
    """F79: failover's bypass ends when the breaker is closed, and under bypass no call of traffic can close it."""
    guard = probed(
        store, time.monotonic, breaker=BreakerSettings(hold_s=0.05, probe_gap_s=0.01, min_calls=2, probes_to_close=2)
    )
    failing(store, guard)
    guard.set_bypass(True)
    usage = guard.usage()
    store.trouble = None
    traffic = threading.Event()

    def serve() -> None:
        while not traffic.wait(0.005):
            guard.batch_get(["a"], [page()])

    thread, _ = background(serve)
    until(lambda: guard.guard_report().breaker == "closed")
    traffic.set()
    thread.join(WAIT_S)
    assert guard.bypass
    assert guard.usage()["exists"] == usage["exists"]  # probes are no traffic
    guard.set_bypass(False)
    assert guard.batch_set(["a"], [page()])


def test_a_bypassed_store_that_is_still_ill_stays_open(store: Store) -> None:
    clock = Clock()
    guard = probed(store, clock, breaker=BREAKER)
    probes = by_hand(guard)
    failing(store, guard)
    guard.set_bypass(True)
    store.log.clear()
    assert probes.tick() == pytest.approx(2.0)
    assert store.log == []  # not before the hold is over
    clock.now += 2.1
    assert probes.tick() == pytest.approx(4.0)  # the hold doubles (F84)
    assert store.log == ["batch_exists"] * 2  # one for each side
    assert guard.guard_report().breaker == "open"


def test_a_probe_that_hangs_costs_its_deadline_and_no_more(store: Store) -> None:
    """F46: its thread stays inside the store; the guard closes when it is out."""
    clock = Clock()
    guard = probed(store, clock, breaker=BREAKER, deadline_s=0.02)
    probes = by_hand(guard)
    failing(store, guard)
    guard.set_bypass(True)
    store.trouble, store.hang = None, True
    clock.now += 2.1
    probes.tick()
    assert guard.guard_report().breaker == "open"
    assert guard.in_flight() == 0  # no engine thread is in it: a COMMIT need not wait
    guard.close()
    assert not guard.closed
    store.gate.set()
    until(lambda: guard.closed)


def test_traffic_is_the_probe_where_there_is_traffic(store: Store) -> None:
    """A lookup that works says little about transfers: it must not close the breaker while requests could tell."""
    clock = Clock()
    guard = probed(store, clock, breaker=BREAKER)
    probes = by_hand(guard)
    failing(store, guard)
    clock.now += 1.9
    guard.batch_get(["a"], [page()])  # refused
    clock.now += 0.2
    store.log.clear()
    assert probes.tick() == pytest.approx(0.8)
    assert store.log == []
    clock.now += 0.9
    probes.tick()
    assert store.log == ["batch_exists"] * 2


def test_an_idle_stores_death_is_known(store: Store) -> None:
    """F79: two probes without an answer; one alone is no outage."""
    clock = Clock()
    guard = probed(store, clock, breaker=BREAKER, probe_idle_s=10.0)
    probes = by_hand(guard)
    assert probes.tick() == pytest.approx(10.0)
    assert store.log == []
    for trouble in (OSError(5, "gone"), None, OSError(5, "gone")):
        store.trouble = trouble
        clock.now += 10.0
        assert probes.tick() == pytest.approx(10.0)
        assert guard.guard_report().breaker == "closed"
    clock.now += 10.0
    probes.tick()
    assert (guard.guard_report().breaker, guard.guard_report().reason) == ("open", "no_answer")
    store.trouble = None
    for _ in range(2):
        clock.now += 2.1
        probes.tick()
    assert guard.guard_report().breaker == "closed"


@pytest.mark.parametrize("settings", [{"probe_idle_s": 0.0}, {}])
def test_a_store_that_cannot_be_asked_is_not_called_dead(store: Store, settings: dict[str, float]) -> None:
    clock = Clock()
    guard = probed(store, clock, breaker=BREAKER, **settings)
    probes = by_hand(guard)
    store.trouble = NotImplementedError()
    for _ in range(3):
        clock.now += 10.0
        probes.tick()
    assert guard.guard_report().breaker == "closed"
    assert len(store.log) == (0 if settings else 3)


def test_a_closed_guard_asks_no_more(store: Store) -> None:
    guard = probed(store, time.monotonic, probe_idle_s=0.01)
    guard._core.watch()
    until(lambda: "batch_exists" in store.log)
    guard.close()
    until(lambda: guard.closed)
    until(lambda: not [each for each in threading.enumerate() if each.name.startswith("hicache-guard-store")])
    assert store.log[-1] == "close"


def test_calls_that_are_refused_wake_nobody(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands come in a second: a thread switch for each would cost more than what is refused."""
    guard = probed(store, Clock(), breaker=BREAKER)
    probes = by_hand(guard)
    failing(store, guard)
    guard.set_bypass(True)
    woken: list[float] = []
    monkeypatch.setattr(probes, "wake", lambda in_s=0.0: woken.append(in_s))
    for _ in range(10):
        guard.batch_get(["a"], [page()])
    assert set(woken) == {10.0}  # the idle probe's turn, which is planned already


def test_live_keys_change_a_guard_that_works(store: Store) -> None:
    clock = Clock()
    guard = probed(store, clock)
    probes = by_hand(guard)
    guard.tune_guard(Told(probe_idle_s=3.0, min_calls=1, hold_s=7.0))
    assert probes.tick() == pytest.approx(3.0)
    store.trouble = OSError(5, "gone")
    assert guard.batch_get(["a"], [page()]) == [None]
    report = guard.guard_report()
    assert report.breaker == "open"
    assert 5.0 < (report.sides["read"].probe_in_s or 0.0) < 9.0
