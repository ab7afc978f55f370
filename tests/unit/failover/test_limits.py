"""The failover machine in virtual time: flapping, operators, restarts, what blocks it, and random histories."""

import itertools
import random

import msgspec
import pytest
from tests.unit.failover.test_machine import policy, world
from tests.unit.failover.world import NONE, SPARE_B, SPARE_C, A, B, World

from hicache_proto.model import TargetState
from hicache_sidecar.core.failover_types import Record
from hicache_sidecar.core.redaction import REDACTED

QUICK = {"confirm_s": 0.0, "min_stay_s": 0.0, "backoff_s": 0.1, "steady_s": 60.0}


@pytest.mark.parametrize("action", ["bypass", "detach", "spares"])
def test_a_store_that_flaps_is_held_on_the_safe_side(action: str) -> None:
    """F84: good and bad each second for 60 s: at most N transitions, then hold, with an event; release works."""
    spares = [SPARE_B] if action == "spares" else []
    w = world(action, spares=spares, reconnect=True, flap_limit=5, **QUICK)
    for _ in range(30):
        w.fail("A")
        w.run(1)
        w.heal("A")
        w.run(1)
    transitions = [what for what in w.did if what in ("bypass", "unbypass", "return A")]
    assert len(transitions) <= 5
    assert w.machine.state == "held"
    assert "hold" in w.notes
    assert (w.state, w.bypass[0]) == (NONE if action == "detach" else A, action != "detach")
    before = len(w.log)
    w.run(10_000)  # no time ends a hold
    assert len(w.log) == before
    w.machine.release(w.now)
    w.run(100)
    assert (w.state.backend, w.bypass[0]) == ("A", False)
    assert w.machine.episode is None


def test_pauses_grow_over_relapses_and_begin_anew_after_a_steady_time() -> None:
    w = world("bypass", flap_limit=1000, **(QUICK | {"backoff_s": 8.0}))
    stays = []
    for _ in range(4):
        w.fail("A")
        w.run(0.01)
        began = w.now
        w.heal("A")
        while w.bypass[0]:
            w.run(0.5)
        stays.append(w.now - began)
    assert all(later > 1.6 * earlier for earlier, later in itertools.pairwise(stays))
    w.run(100)
    assert w.machine.pace.attempts == 0


def test_an_operators_change_ends_the_failover() -> None:
    """Never across an operator's explicit later change, also one that changed nothing (detach while detached)."""
    w = world("detach")
    w.fail("A")
    w.run(3)
    w.machine.operator_acted("detach")
    w.heal("A")
    assert w.run(10_000).did == ["bypass", "detach None"]
    assert w.machine.episode is None


def test_a_desired_state_of_somebody_else_ends_it_and_lifts_our_bypass() -> None:
    w = world("bypass")
    w.fail("A")
    w.run(3)
    w.state = msgspec.structs.replace(A, prefetch_policy="best_effort")  # a policy update; the bypass is still on
    w.heal("A")
    w.run(1)
    assert w.did == ["bypass", "unbypass"]
    assert w.machine.episode is None


def test_an_operator_who_lifts_our_bypass_is_left_alone_until_it_was_well() -> None:
    w = world("bypass")
    w.fail("A")
    w.run(3)
    w.bypass = [False, False]
    w.machine.operator_acted("bypass", bypass=False)
    assert w.run(1000).did == ["bypass"]
    w.heal("A")
    w.run(10)
    w.fail("A")
    assert w.run(10).did == ["bypass", "bypass"]


def test_an_operators_own_bypass_is_never_touched() -> None:
    w = world("detach")
    w.bypass = [True, True]
    w.machine.operator_acted("bypass", bypass=True)
    w.fail("A")
    assert w.run(1000).did == []
    w = world("bypass")
    w.fail("A")
    w.run(3)
    w.machine.operator_acted("bypass", bypass=True)  # takes ours over
    w.heal("A")
    assert w.run(1000).did == ["bypass"]
    assert w.bypass == [True, True]


def test_nothing_is_done_beside_an_operation() -> None:
    w = world("detach")
    w.blocked = "operation op-1 runs"
    w.fail("A")
    assert w.run(100).did == []
    assert w.machine.reason == "operation op-1 runs"
    w.blocked = ""
    assert w.run(1).did == ["bypass", "detach None"]


def test_a_rank_that_restarts_gets_the_bypass_again() -> None:
    w = world("bypass")
    w.fail("A")
    w.run(5)
    w.bypass = [True, False]
    w.run(1)
    assert w.did == ["bypass", "bypass"]
    assert w.machine.pace.transitions == 1  # no second failover


def test_a_bypass_that_a_rank_refuses_is_tried_again() -> None:
    w = world("bypass")
    w.bypass_fails = 2
    w.fail("A")
    w.run(10)
    assert w.did == ["bypass", "bypass", "bypass"]
    assert w.bypass == [True, True]
    assert [step for step in w.notes if step == "failed"] == ["failed", "failed"]


@pytest.mark.parametrize("moment", [1.0, 2.5, 20.0, 40.0, 45.0])
@pytest.mark.parametrize("action", ["bypass", "detach", "spares"])
def test_a_restart_of_the_sidecar_goes_on_where_it_was(action: str, moment: float) -> None:
    spares = [SPARE_B] if action == "spares" else []
    w = world(action, spares=spares, reconnect=True)
    w.fail("A")
    w.run(moment)
    w.restart()
    w.run(50 - moment)
    w.heal("A")
    w.run(300)
    assert (w.state, w.bypass) == (A, [False, False])
    assert w.machine.episode is None


def test_a_restart_between_the_operation_and_its_result() -> None:
    """The move was durable before it began: whether it happened is read from the desired state."""
    w = world("spares", spares=[SPARE_B], reconnect=True)
    w.fail("A")
    w.run(2)
    moving = [n for n in w.machine.notes if n[0] == "spare"]
    assert moving
    for done in (True, False):
        x = world("spares", spares=[SPARE_B], reconnect=True)
        x.fail("A")
        x.now += 2
        assert x.step() is None  # the bypass
        decision = x.machine.next(x.now, x.facts())  # the move: durable, then the sidecar dies
        target = decision.target  # type: ignore[union-attr]
        if done:
            x.state = target
        x.bypass = [not done] * 2
        x.restart()
        x.run(10)
        assert x.state == target
        assert x.did == (["bypass"] if done else ["bypass", "spare B"])


def test_a_home_whose_secrets_are_not_known_is_not_tried() -> None:
    secret = TargetState(backend="A", extra_config=f'{{"password": "{REDACTED}"}}')
    w = World({"A": policy("detach")}, state=secret)
    w.fail("A")
    w.run(3)
    w.heal("A")
    assert w.run(10_000).did == ["bypass", "detach None"]
    assert "secrets" in w.machine.reason


def test_a_policy_that_is_taken_away_gives_back_what_it_holds() -> None:
    w = world("bypass")
    w.fail("A")
    w.run(5)
    w.machine.set_policies({})
    w.run(5)
    assert (w.did, w.bypass, w.machine.episode) == (["bypass", "unbypass"], [False, False], None)
    w = world("detach")
    w.fail("A")
    w.run(5)
    w.machine.set_policies({})
    w.heal("A")
    assert w.run(1000).did == ["bypass", "detach None"]  # detached it stays: the operator decides


def test_the_record_says_no_secret_when_printed() -> None:
    w = World({"A": policy("detach")}, state=TargetState(backend="A", extra_config='{"password": "hush"}'))
    w.fail("A")
    w.run(5)
    record = w.machine.record()
    assert "hush" not in f"{record} {record.episode!r} {w.machine.notes}"
    kept = msgspec.msgpack.decode(msgspec.msgpack.encode(msgspec.to_builtins(record)))
    assert msgspec.convert(kept, Record) == record


@pytest.mark.parametrize("seed", range(40))
def test_random_histories(seed: int) -> None:
    """Whatever fails, heals, restarts or is changed: never a failing store in use for long, never a store that the
    operator did not name, at most flap_limit transitions in a window, and an end when all is well."""
    dice = random.Random(seed)
    action = dice.choice(["bypass", "detach", "spares"])
    spares = [SPARE_B, SPARE_C][: dice.randint(1, 2)] if action == "spares" else []
    limit = dice.randint(2, 8)
    w = World(
        {"A": policy(action, spares=spares, reconnect=dice.choice([True, False, None]), flap_limit=limit,
                     confirm_s=dice.choice([0.0, 1.0]), min_stay_s=dice.choice([0.0, 5.0]))},
        dice=dice.random,
    )  # fmt: skip
    for _ in range(60):
        what = dice.random()
        if what < 0.4:
            w.fail(dice.choice("ABC"))
        elif what < 0.75:
            w.heal(dice.choice("ABC"))
        elif what < 0.85:
            w.restart()
        elif what < 0.9:
            w.bypass[dice.randrange(2)] = False  # a rank was restarted
        else:
            w.state, w.bypass = dice.choice([A, B, NONE]), [False, False]
            w.machine.operator_acted("attach")
        w.run(dice.choice([0.5, 3.0, 20.0]))
        w.run(2.0)
        assert w.state.backend in (None, "A", "B", "C")
        assert w.state.backend != "C" or len(spares) == 2
        if w.state.backend == "A" and "A" in w.sick:
            assert all(w.bypass), (seed, w.log[-5:], w.machine.state)
        assert w.machine.pace.transitions <= limit
    w.heal("A", "B", "C")
    w.machine.release(w.now)
    w.run(5000)
    if w.machine.policies["A"].goes_back or action == "bypass":
        assert w.machine.episode is None or not w.machine.policies["A"].goes_back
