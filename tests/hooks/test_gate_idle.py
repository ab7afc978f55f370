"""Gate, leases and the strict idle check."""

import math

import pytest
from tests.hooks.driver import FakeClock
from tests.rigs.light_adapter import LightAdapter

from hicache_hooks.gate import MAX_HOLDS, Gate
from hicache_hooks.idle import IdleGate
from hicache_hooks.leases import MAX_LEASE_S, Lease
from hicache_proto.model import MANDATORY_COUNTERS


def test_the_gate_is_open_exactly_when_nobody_holds_it() -> None:
    clock = FakeClock()
    gate = Gate(clock)
    assert gate.is_open
    gate.hold("operation-1", 5)
    gate.hold("drain", 60)
    assert gate.holds() == ["drain", "operation-1"]
    assert gate.release("operation-1")
    assert not gate.is_open
    assert not gate.release("operation-1")
    assert gate.release("drain")
    assert gate.is_open


def test_each_hold_ends_by_its_own_lease_and_renewing_moves_it() -> None:
    clock = FakeClock()
    gate = Gate(clock)
    gate.hold("a", 5)
    gate.hold("b", 10)
    assert gate.deadline == clock.now + 5
    clock.forward(4)
    gate.hold("a", 5)
    clock.forward(4)
    assert gate.expire() == []
    clock.forward(1)
    assert gate.expire() == ["a"]
    assert not gate.is_open
    clock.forward(1)
    assert gate.expire() == ["b"]
    assert gate.is_open
    assert gate.deadline is None


@pytest.mark.parametrize("seconds", [0, -1, math.nan, math.inf, MAX_LEASE_S + 1])
def test_a_lease_of_nonsense_closes_nothing(seconds: float) -> None:
    gate = Gate(FakeClock())
    with pytest.raises(ValueError, match="lease"):
        gate.hold("a", seconds)
    assert gate.is_open


def test_holds_are_bounded() -> None:
    gate = Gate(FakeClock())
    for number in range(MAX_HOLDS):
        gate.hold(str(number), 1)
    with pytest.raises(ValueError, match="holds"):
        gate.hold("one more", 1)
    gate.hold("0", 2)  # renewing is not one more


def test_a_lease_that_was_never_armed_vouches_for_nothing() -> None:
    clock = FakeClock()
    lease = Lease(clock)
    assert not lease.alive
    assert not lease.over
    lease.arm(2)
    assert lease.alive
    clock.forward(2)
    assert lease.over
    assert lease.left_s == 0
    lease.disarm()
    assert not lease.over


@pytest.mark.parametrize("name", [*MANDATORY_COUNTERS, "future_thing"])
def test_every_counter_blocks_known_or_not(name: str) -> None:
    """F1, F2: transfers in any direction, storage queues, and names from the future."""
    adapter = LightAdapter()
    gate = IdleGate(adapter)
    assert gate.refusal() is None
    adapter.counters[name] = 1
    refusal = gate.refusal()
    assert refusal is not None
    assert refusal.code == "not_idle"
    assert refusal.details["blocked_by"] == [{"rank": 0, "name": name, "count": 1}]
    assert f"{name}=1" in refusal.message
    adapter.counters[name] = -1  # a counter that went wrong is no idle engine either
    assert gate.refusal() is not None


@pytest.mark.parametrize("name", MANDATORY_COUNTERS)
def test_a_missing_mandatory_counter_is_an_error_not_idle(name: str) -> None:
    """F2: the refusal says "incomplete idle report" and what is missing, and is no invitation to retry."""
    adapter = LightAdapter()
    del adapter.counters[name]
    refusal = IdleGate(adapter).refusal()
    assert refusal is not None
    assert "incomplete idle report" in refusal.message
    assert refusal.details["missing"] == [name]
    assert refusal.code == "unsupported_by_engine"
    assert not refusal.retryable


def test_the_refusal_uses_the_words_of_the_specification() -> None:
    adapter = LightAdapter()
    adapter.counters.update(waiting_queue=2, grammar_queue=1, running_batch=3, ongoing_backup=4)
    refusal = IdleGate(adapter).refusal()
    assert refusal is not None
    assert refusal.message.startswith("scheduler is not idle. #queue-req=3 #running-req=3")


def test_an_engine_whose_counters_cannot_be_read_is_not_idle() -> None:
    adapter = LightAdapter()
    adapter.counters = None  # type: ignore[assignment]
    refusal = IdleGate(adapter).refusal()
    assert refusal is not None
    assert refusal.code == "unsupported_by_engine"
