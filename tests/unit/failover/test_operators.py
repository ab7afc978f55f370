"""The failover machine and what an operator says beside it, and what of this outlives the sidecar."""

import msgspec
import pytest
from tests.unit.failover.test_machine import policy, world
from tests.unit.failover.world import SPARE_B, World

from hicache_sidecar.core.failover import Failover
from hicache_sidecar.core.failover_types import Move, Record


def kept(world_: World) -> World:
    """The sidecar ends and starts again with what the journal can hold."""
    record = msgspec.convert(msgspec.to_builtins(world_.machine.record()), Record)
    world_.machine = Failover(record, lambda: world_.dice())
    return world_


def test_a_bypass_that_is_to_be_lifted_is_lifted_after_a_restart() -> None:
    """It was taken for an operator's, for ever."""
    w = world("bypass")
    w.fail("A")
    w.run(3)
    w.machine.operator_acted("policy")
    assert w.machine.record().lift
    kept(w)
    w.heal("A")
    w.run(1)
    assert (w.did, w.bypass) == (["bypass", "unbypass"], [False, False])
    assert not w.machine.record().lift


def test_an_operators_bypass_is_left_alone_after_a_restart() -> None:
    w = world("bypass")
    w.fail("A")
    w.run(3)
    w.machine.operator_acted("bypass", bypass=True)
    kept(w)
    w.heal("A")
    assert w.run(1000).did == ["bypass"]


@pytest.mark.parametrize("action", ["bypass", "detach"])
def test_the_minimum_stay_outlives_the_sidecar(action: str) -> None:
    """F84: a restart was a way round min_stay_s."""
    w = world(action)
    w.fail("A")
    w.run(10)
    w.heal("A")
    kept(w)
    before = len(w.log)
    w.run(19)
    assert len(w.log) == before
    w.run(10)
    assert w.log[-1] == (1032.0, "unbypass" if action == "bypass" else "return A")


def test_a_wall_clock_that_was_set_back_costs_one_pause_at_most() -> None:
    w = World({"A": policy("detach", backoff_max_s=40.0)})
    w.fail("A")
    w.run(10)
    w.heal("A")
    record = msgspec.structs.replace(w.machine.record(), return_at=w.now + 1e6)
    w.machine = Failover(record, lambda: w.dice())
    w.run(41)
    assert w.log[-1] == (1050.0, "return A")


def test_a_cancelled_operation_holds_until_it_is_released() -> None:
    """It is no failure of the place: nothing rests, and nothing is tried again."""
    w = world("spares", spares=[SPARE_B])
    w.fail("A")
    w.now += 2
    assert w.step() is None  # the bypass
    move = w.machine.next(w.now, w.facts())
    assert isinstance(move, Move)
    w.machine.moved(w.now, move, None, "cancelled: every rank is on the old state", cancelled=True)
    assert w.run(10_000).did == ["bypass"]
    assert (w.machine.state, w.bypass, w.notes) == ("held", [True, True], ["bypass", "hold"])
    kept(w)
    assert w.run(10_000).did == ["bypass"]
    w.machine.release(w.now)
    assert w.run(1).did == ["bypass", "spare B"]


def test_an_operators_change_ends_the_hold_of_a_cancelled_operation() -> None:
    w = world("detach")
    w.fail("A")
    w.now += 2
    assert w.step() is None
    move = w.machine.next(w.now, w.facts())
    assert isinstance(move, Move)
    w.machine.moved(w.now, move, None, "cancelled", cancelled=True)
    w.machine.operator_acted("attach")
    assert (w.machine.held, w.machine.episode) == ("", None)
