"""Proof of the transaction's table: every state that loss, delay, duplicates, crashes and lease ends can lead to.

Each scenario is searched to its end (``complete``), and from the states (all, or every k-th in the larger ones) the
fair ending must bring all ranks to the recorded outcome. Covers F11, F30, F36 (explicit answers for prepare lost,
commit lost, coordinator dead between phases) and rules 1 to 6, 9, 10, 13 of the design.
"""

import pytest
from tests.unit.transaction.search import Found, Scenario, explore


def prove(scenario: Scenario, settle_every: int) -> Found:
    found = explore(scenario, settle_every=settle_every)
    assert not found.why, "\n".join([found.why, *found.trace])
    assert found.complete
    return found


DEFAULT = {
    "strict, busy or idle": (Scenario(busy=True), 1),
    "drain": (Scenario(drain=True, busy=True), 1),
    "hot": (Scenario(hot=True), 1),
    "strict with time to wait": (Scenario(rounds=2, busy=True), 20),
    "builds and swaps that fail": (Scenario(swap_failures=1, build_failures=1), 3),
    "a swap back that fails": (Scenario(undo_failures=1), 1),
    "a link cut": (Scenario(rehellos=1), 5),
    "a rank dies": (Scenario(rank_crashes=1), 20),
    "the sidecar dies": (Scenario(coord_crashes=1), 40),
    "hot, the sidecar dies": (Scenario(hot=True, coord_crashes=1), 40),
}

LARGE = {
    "the sidecar dies twice": (Scenario(coord_crashes=2), 20),
    "the sidecar dies and the journal is lost": (Scenario(coord_crashes=1, journal_losses=1), 10),
    "the sidecar dies and a link is cut": (Scenario(coord_crashes=1, rehellos=1), 20),
    "the sidecar and a rank die": (Scenario(coord_crashes=1, rank_crashes=1), 20),
    "the sidecar dies in a drain": (Scenario(coord_crashes=1, drain=True, busy=True), 20),
    "two operations": (Scenario(ops=2), 20),
    "three ranks": (Scenario(ranks=3), 40),
}


@pytest.mark.parametrize("name", DEFAULT)
def test_no_invariant_is_broken(name: str) -> None:
    """F36: whatever happens, all ranks end on the recorded outcome, or are known to differ."""
    prove(*DEFAULT[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_no_invariant_is_broken_in_the_large(name: str) -> None:
    """F36, with two faults at once, two operations in a row, and three ranks."""
    prove(*LARGE[name])


BOUNDED = {
    "two operations, the sidecar dies": Scenario(ops=2, coord_crashes=1),
    "two operations, the journal is lost": Scenario(ops=2, coord_crashes=1, journal_losses=1),
    "two operations, a rank dies": Scenario(ops=2, rank_crashes=1),
    "three ranks, the sidecar dies": Scenario(ranks=3, coord_crashes=1),
    "three ranks, a rank dies, busy": Scenario(ranks=3, rank_crashes=1, busy=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BOUNDED)
def test_no_invariant_is_broken_near_the_start_of_the_largest(name: str) -> None:
    """Scenarios with too many states to visit all: the nearest 400 000 of each."""
    found = explore(BOUNDED[name], limit=400_000, settle_every=50)
    assert not found.why, "\n".join([found.why, *found.trace])


def test_the_model_reaches_both_outcomes() -> None:
    """A search that never decides anything would prove nothing: both outcomes, and the window of rule 3, occur."""
    from tests.unit.transaction import model_steps as steps
    from tests.unit.transaction import model_world as mw
    from tests.unit.transaction.search import REAL

    seen = {mw.start(Scenario(coord_crashes=1))}
    order = list(seen)
    told: set[tuple[int, str]] = set()
    while order and len(told) < 3:
        for _, after in steps.successors(REAL, order.pop()):
            if after not in seen:
                seen.add(after)
                order.append(after)
                told |= after.told
    assert told >= {(1, "a"), (1, "b"), (1, "converging")}
