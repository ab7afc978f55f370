"""The failover machine in virtual time: what each policy does, and when."""

import itertools

import pytest
from tests.unit.failover.world import NONE, SPARE_B, SPARE_C, A, B, World, guard

from hicache_proto.failover import FailoverPolicy
from hicache_proto.model import GuardReport
from hicache_sidecar.core.failover_types import Condition, RankView, health, look, policy_for

FAST = {"confirm_s": 2.0, "min_stay_s": 30.0, "steady_s": 60.0, "backoff_s": 5.0, "backoff_max_s": 600.0}


def policy(action: str, **fields: object) -> FailoverPolicy:
    return FailoverPolicy(action=action, **{**FAST, **fields})  # type: ignore[arg-type]


def world(action: str, **fields: object) -> World:
    return World({"A": policy(action, **fields)})


def test_nothing_happens_without_a_policy_or_without_a_failure() -> None:
    quiet = World({"B": policy("bypass")})
    quiet.fail("A")
    assert quiet.run(100).did == []
    assert quiet.machine.state == "off"
    well = world("bypass").run(1000)
    assert (well.did, well.machine.state) == ([], "watching")


def test_a_breaker_that_closes_within_confirm_s_is_left_to_the_guard() -> None:
    w = world("bypass")
    w.fail("A")
    w.run(1.9)
    assert w.machine.state == "suspect"
    w.heal("A")
    assert w.run(100).did == []


def test_bypass_is_set_after_confirm_s_and_lifted_when_the_probes_find_it_well() -> None:
    """F78: attached again after the back-off; F84: not before the minimum stay."""
    w = world("bypass")
    w.fail("A")
    w.run(10)
    assert w.log == [(1002.0, "bypass")]
    assert w.bypass == [True, True]
    w.heal("A")
    w.run(15)
    assert w.did == ["bypass"]  # min_stay_s
    w.run(10)
    assert w.log[1:] == [(1032.0, "unbypass")]
    assert w.machine.state == "trial"
    w.run(60)
    assert (w.machine.state, w.machine.episode, w.machine.pace.attempts) == ("watching", None, 0)
    assert w.notes == ["bypass", "unbypass", "recovered"]


def test_time_counts_from_the_breakers_opening() -> None:
    """A sidecar that was away when the breaker opened does not wait once more."""
    w = world("bypass")
    w.fail("A")
    w.opened["A"] -= 5
    w.step()
    assert w.did == ["bypass"]


def test_a_bypassed_store_that_stays_down_stays_bypassed() -> None:
    w = world("bypass")
    w.fail("A")
    assert w.run(5000).did == ["bypass"]


def test_without_reconnect_the_bypass_stays() -> None:
    w = world("bypass", reconnect=False)
    w.fail("A")
    w.run(10)
    w.heal("A")
    assert w.run(5000).did == ["bypass"]


def test_detach_bypasses_first_then_detaches_then_attaches_again() -> None:
    """F77: bypass, then one ordinary operation; F78: reconnect with growing pauses."""
    w = world("detach")
    w.fail("A")
    w.run(3)
    assert w.did == ["bypass", "detach None"]
    assert w.state == NONE
    w.run(300)
    tries = [at for at, step, to, _ in w.moves if to == "A"]
    pauses = [b - a for a, b in zip([w.moves[0][0], *tries], tries, strict=False)]
    assert pauses == [30.0, 10.0, 20.0, 40.0, 80.0]  # the minimum stay, then doubling; the dice show 1
    w.heal("A")
    w.run(400)
    assert w.did[-1] == "return A"
    assert w.state == A
    w.run(60)
    assert w.machine.episode is None


def test_pauses_are_capped_and_jittered() -> None:
    """F78: between half and all of the pause; never above the cap."""
    rolls = iter([i / 97 for i in range(97)] * 50)
    w = World({"A": policy("detach", backoff_max_s=40.0)}, dice=lambda: next(rolls))
    w.fail("A")
    w.run(4000)
    tries = [at for at, _, to, _ in w.moves if to == "A"]
    pauses = [b - a for a, b in itertools.pairwise(tries)][4:]
    assert len(pauses) > 50
    assert all(20.0 <= pause <= 40.0 for pause in pauses)
    assert len({round(pause, 3) for pause in pauses}) > 20


def test_spares_in_their_order_and_no_way_back_by_itself() -> None:
    """F84: no automatic fail-back unless set."""
    w = world("spares", spares=[SPARE_B, SPARE_C])
    w.fail("A")
    w.run(3)
    assert w.did == ["bypass", "spare B"]
    assert w.state.backend == "B"
    assert (w.state.prefetch_policy, w.state.write_policy) == ("timeout", "write_back")  # not said: as it was
    w.heal("A")
    assert w.run(5000).did == ["bypass", "spare B"]
    assert w.machine.state == "on_spare"


def test_a_spare_that_cannot_be_attached_is_passed_over_and_rests() -> None:
    w = world("spares", spares=[SPARE_B, SPARE_C])
    w.fail("A", "B")
    w.run(10)
    assert w.did == ["bypass", "failed B", "spare C"]


def test_when_every_spare_fails_the_store_stays_bypassed_and_all_are_tried_again() -> None:
    w = world("spares", spares=[SPARE_B, SPARE_C])
    w.fail("A", "B", "C")
    w.run(2)
    assert w.did == ["bypass", "failed B", "failed C"]
    assert (w.machine.state, w.bypass) == ("bypassed", [True, True])
    w.run(8)
    assert w.did[3:] == ["failed B", "failed C"]
    w.heal("C")
    w.run(20)
    assert w.did[-1] == "spare C"


def test_home_that_comes_back_before_it_could_be_left_is_used_again() -> None:
    w = world("spares", spares=[SPARE_B])
    w.fail("A", "B")
    w.run(5)
    w.heal("A")
    w.run(100)
    assert w.did[-1] == "unbypass"
    assert w.machine.episode is None


def test_a_spare_that_fails_hands_over_to_the_next_and_round_to_home() -> None:
    w = world("spares", spares=[SPARE_B, SPARE_C], flap_limit=100)
    w.fail("A")
    w.run(60)
    w.fail("B")
    w.run(60)
    assert w.did == ["bypass", "spare B", "bypass", "spare C"]
    w.heal("A")
    w.fail("C")
    w.run(60)
    assert w.did[4:] == ["bypass", "failed B", "return A"]


def test_with_reconnect_a_spare_gives_way_to_home() -> None:
    w = world("spares", spares=[SPARE_B], reconnect=True)
    w.fail("A")
    w.run(20)
    w.heal("A")
    w.run(100)
    assert w.did == ["bypass", "spare B", "return A"]
    assert w.log[-1][0] == 1032.0  # min_stay_s after the spare
    w.run(100)
    assert w.machine.episode is None


@pytest.mark.parametrize(("hot", "asked", "mode"), [(True, "auto", "hot"), (False, "auto", "drain"),
                                                   (True, "drain", "drain"), (True, "strict", "strict")])  # fmt: skip
def test_the_mode_of_operations(hot: bool, asked: str, mode: str) -> None:
    w = World({"A": policy("detach", mode=asked)}, hot=hot)
    w.fail("A")
    w.run(3)
    assert [m for *_, m in w.moves] == [mode]


def test_reads_count_and_writes_only_when_asked() -> None:
    """F62: a full disk opens the write side; what it holds is still read."""
    w = World({"A": policy("bypass")}, side="write")
    w.fail("A")
    assert w.run(100).did == []
    w = World({"A": policy("bypass", watch="reads_and_writes")}, side="write")
    w.fail("A")
    assert w.run(100).did == ["bypass"]


def test_one_rank_without_its_store_is_enough() -> None:
    ranks = (RankView(0, guard("A", "closed")), RankView(1, guard("A", "half_open")), RankView(2, guard("A", "open")))
    assert health(ranks, "reads").condition is Condition.SICK
    assert "rank 2: breaker open (read: errors)" in health(ranks, "reads").why
    assert health(ranks[:2], "reads").condition is Condition.TRYING
    assert health(ranks[:1], "reads").condition is Condition.WELL
    assert health((), "reads").condition is Condition.UNKNOWN
    assert look(RankView(0, GuardReport(name="A", breaker="open", reason="hung")), "reads")[0] is Condition.SICK
    assert health((*ranks[:1], RankView(3)), "reads").condition is Condition.UNKNOWN


def test_policies_by_name_and_for_all_others() -> None:
    policies = {"A": policy("bypass"), "*": policy("detach")}
    assert policy_for(policies, "A").action == "bypass"
    assert policy_for(policies, "B").action == "detach"
    assert policy_for(policies, None).action == "none"
    assert policy_for({}, "A").action == "none"
    w = World({"*": policy("detach")}, state=B)
    w.fail("B")
    assert w.run(3).did == ["bypass", "detach None"]
