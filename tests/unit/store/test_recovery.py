"""Recovery's decisions (rules 1, 3, 6, 13): cases by hand, and properties over every small picture.

The search in tests/unit/transaction drives the same class together with the coordinator's and ranks' tables.
"""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from hicache_proto import transaction
from hicache_proto.model import EffectiveState, RankReport
from hicache_proto.transaction import Ended, RankPhase, Said
from hicache_sidecar.store.recovery import (
    AbortA,
    Adopt,
    Ask,
    CommitB,
    Decision,
    Finalize,
    RankView,
    Ready,
    Recovery,
    Split,
    Wait,
    said_by,
    view_of,
)

BOTH = frozenset({0, 1})
OPEN_PHASES = [p for p in RankPhase if p not in (RankPhase.NONE, RankPhase.QUARANTINED)]


def view(rank: int, n: int = 0, phase: str = "none", ended: str = "", revision: int = 0, **more: object) -> RankView:
    return RankView(rank, n, phase, ended, revision, **more)  # type: ignore[arg-type]


def told(recovery: Recovery, *views: RankView) -> Recovery:
    for each in views:
        recovery.tell(each)
    return recovery


def switched(rank: int, until: float | None = None, n: int = 5) -> RankView:
    return view(rank, n, "switched", revision=4, vouched_until_s=until)


# ---- a BEGIN without outcome


def test_b_needs_every_participant_switched_and_vouched_for() -> None:
    """Rule 1 and rule 4: a hello alone vouches for nothing; a fresh report does, until its limit."""
    recovery = Recovery(pending=(5, BOTH), revision=4)
    assert isinstance(recovery.next(None, 0.0), Wait)
    told(recovery, switched(0))
    decision = recovery.next(BOTH, 0.0)
    assert isinstance(decision, Wait)
    assert decision.missing == {1}
    told(recovery, switched(1))
    assert recovery.next(BOTH, 0.0) == Ask(BOTH)
    told(recovery, switched(0, until=7.0))
    assert recovery.next(BOTH, 0.0) == Ask(frozenset({1}))
    told(recovery, switched(1, until=6.0))
    assert recovery.next(BOTH, 5.9) == CommitB(5, BOTH)
    assert isinstance(recovery.next(BOTH, 6.0), AbortA)


def test_a_heartbeat_keeps_the_vouching_of_the_answer_before_it() -> None:
    """Else a heartbeat between two answers would ask for ever."""
    recovery = told(
        Recovery(pending=(5, BOTH), revision=4), switched(0, 9.0), switched(1, 9.0), switched(0), switched(1)
    )
    assert recovery.next(BOTH, 1.0) == CommitB(5, BOTH)
    recovery.gone(0)  # another session of another process: nothing is kept
    told(recovery, switched(0))
    assert recovery.next(BOTH, 1.0) == Ask(frozenset({0}))


def test_one_no_is_enough_for_a() -> None:
    """Rule 1: A as soon as one participant is not SWITCHED under n; the reason names it."""
    for other in (view(1, 5, "frozen"), view(1, 5, ended="expired"), view(1), view(1, 5, "quarantined")):
        recovery = told(Recovery(pending=(5, BOTH), revision=4), other)
        decision = recovery.next(BOTH, 0.0)
        assert isinstance(decision, AbortA)
        assert not decision.recorded
        assert "rank 1" in decision.why


def test_the_wait_is_one_in_doubt_lease() -> None:
    """Rule 1: then A, whoever is silent."""
    recovery = told(Recovery(pending=(5, BOTH), revision=4), switched(0, 99.0))
    assert isinstance(recovery.next(BOTH, 0.0), Wait)
    recovery.waited()
    decision = recovery.next(BOTH, 10.0)
    assert isinstance(decision, AbortA)
    assert "rank 1 is silent" in decision.why


def test_a_finalised_rank_proves_b_when_the_record_was_lost() -> None:
    """--recover cut the OUTCOME away: only OUTCOME B leads to FINAL, no lease is asked for."""
    recovery = told(
        Recovery(pending=(5, BOTH), revision=4), view(0, 5, ended="final", revision=5), view(1, 5, ended="expired")
    )
    assert recovery.next(BOTH, 0.0) == CommitB(5, BOTH)
    recovery.settled(5, b=True)
    assert recovery.next(BOTH, 0.0) == Ready()  # nothing differs as far as the driver said


def test_after_b_the_switched_are_finalised_and_after_a_undone() -> None:
    """Rules 1 and 3: as soon as one is seen, without waiting for the others."""
    recovery = told(Recovery(pending=(5, BOTH), revision=4), switched(0, 9.0), switched(1, 9.0))
    recovery.settled(5, b=True)
    assert recovery.next(BOTH, 0.0) == Finalize(5, BOTH)
    late = told(Recovery(revision=5), switched(1))
    assert late.next(BOTH, 0.0) == Finalize(5, frozenset({1}))
    undone = told(Recovery(pending=(5, BOTH), revision=4), switched(0, 9.0), switched(1, 9.0))
    undone.settled(5, b=False)
    assert undone.next(BOTH, 0.0) == AbortA(5, BOTH, undone.next(BOTH, 0.0).why, recorded=True)  # type: ignore[union-attr]


# ---- the journal and the ranks disagree


def test_a_newer_revision_is_adopted_once_all_said_hello() -> None:
    """Rule 6: a silent rank might prove more."""
    recovery = told(Recovery(revision=3), view(0, 9, ended="final", revision=7, identity_of_state="x"))
    decision = recovery.next(BOTH, 0.0)
    assert decision == Wait("ranks are missing", frozenset({1}))
    told(recovery, view(1, 9, ended="final", revision=9, identity_of_state="y"))
    adopt = recovery.next(BOTH, 0.0)
    assert isinstance(adopt, Adopt)
    assert (adopt.rank, adopt.revision, adopt.n) == (1, 9, 9)
    recovery.adopted(9)
    told(recovery, view(0, 9, ended="final", revision=7, differs=True))
    assert recovery.next(BOTH, 0.0) == Ready(converge=frozenset({0}))


def test_a_lost_journal_and_a_rank_in_doubt() -> None:
    """One rank finalised, the other is SWITCHED: decided, so it is adopted and finalised, not undone."""
    recovery = told(Recovery(), view(0, 5, ended="final", revision=5), switched(1))
    adopt = recovery.next(BOTH, 0.0)
    assert isinstance(adopt, Adopt)
    assert adopt.revision == 5
    recovery.adopted(5)
    assert recovery.next(BOTH, 0.0) == Finalize(5, frozenset({1}))


def test_a_lost_journal_and_all_in_doubt() -> None:
    """Nobody proves that it was decided: presumed abort, then what they agree on is adopted."""
    recovery = told(Recovery(), view(0, 5, "switched", revision=4), view(1, 5, "switched", revision=4))
    assert isinstance(recovery.next(BOTH, 0.0), Adopt)  # revision 4 is proven
    first = told(Recovery(), view(0, 1, "switched"), view(1, 1, "frozen"))
    decision = first.next(BOTH, 0.0)
    assert isinstance(decision, AbortA)
    assert decision.recorded
    assert decision.participants == BOTH


def test_first_contact() -> None:
    """interface.md: what the ranks report is adopted as revision 1; if they disagree it is a split."""
    recovery = told(Recovery(), view(0, identity_of_state="a"), view(1, identity_of_state="a"))
    assert recovery.next(BOTH, 0.0) == Adopt(0, 1, 0, "first contact")
    told(recovery, view(1, identity_of_state="b"))
    assert isinstance(recovery.next(BOTH, 0.0), Split)


def test_ranks_that_disagree_at_the_top_are_a_split() -> None:
    """Nothing proves one side."""
    recovery = told(
        Recovery(revision=2),
        view(0, 5, ended="final", revision=5, identity_of_state="a"),
        view(1, 5, ended="final", revision=5, identity_of_state="b"),
    )
    assert isinstance(recovery.next(BOTH, 0.0), Split)


# ---- who is brought to the desired state


def test_a_restarted_rank_is_converged_and_drift_is_shown() -> None:
    """Rules 13 and 14: fresh or behind: converged. Different at the desired revision: shown, never repaired."""
    expected = frozenset({0, 1, 2, 3})
    recovery = told(
        Recovery(revision=5),
        view(0, 5, ended="final", revision=5),
        view(1, differs=True),
        view(2, 5, ended="expired", revision=4, differs=True),
        view(3, 5, ended="final", revision=5, differs=True),
    )
    assert recovery.next(expected, 0.0) == Ready(converge=frozenset({1, 2}), drift=frozenset({3}))


def test_leave_counts_only_if_all_are_fresh() -> None:
    """Rule 13: a single fresh rank is always brought to the desired state."""
    recovery = told(Recovery(revision=5, leave=True), view(0, differs=True), view(1, differs=True))
    assert recovery.next(BOTH, 0.0) == Ready(left=True)
    told(recovery, view(0, 5, ended="final", revision=5))
    assert recovery.next(BOTH, 0.0) == Ready(converge=frozenset({1}))


def test_a_fresh_rank_that_has_the_state_already_is_left_alone() -> None:
    """An engine whose own flags attach the desired backend needs no operation."""
    recovery = told(Recovery(revision=1), view(0), view(1))
    assert recovery.next(BOTH, 0.0) == Ready()


def test_view_of_a_report() -> None:
    """Vouching runs from the time of the question, by the lease that the rank had left, less the margin."""
    report = RankReport(state=EffectiveState(backend="file", revision=4), op_n=5, op_phase="switched", lease_left_s=8.0)
    asked = view_of(1, report, asked_at_s=100.0)
    assert asked.vouched_until_s == 107.0
    assert view_of(1, report).vouched_until_s is None
    assert (asked.op_n, asked.revision, asked.fresh, asked.holds) == (5, 4, False, True)
    assert view_of(0, RankReport()).fresh
    other = view_of(1, RankReport(state=EffectiveState(backend="nixl")))
    assert other.identity_of_state != asked.identity_of_state
    assert view_of(1, report, identity="x").identity_of_state == "x"


# ---- properties


def views_for(rank: int) -> st.SearchStrategy[RankView]:
    """Any report that the rank's table can make."""
    numbers = st.integers(0, 6)
    over = st.tuples(st.just("none"), st.sampled_from([str(e) for e in Ended]))
    running = st.tuples(st.sampled_from([str(p) for p in RankPhase if p is not RankPhase.NONE]), st.just(""))
    return st.builds(
        lambda n, how, revision, who, differs, until: RankView(
            rank, n, how[0], how[1], n if how[1] == "final" else min(revision, n), who, differs, until
        ),
        numbers,
        over | running,
        numbers,
        st.sampled_from(["a", "b"]),
        st.booleans(),
        st.none() | st.floats(0, 10),
    )


@given(
    st.data(),
    st.integers(1, 3),
    st.none() | st.integers(1, 6),
    st.none() | st.integers(0, 6),
    st.booleans(),
    st.floats(0, 10),
)
def test_what_holds_for_every_picture(
    data: st.DataObject, size: int, pending: int | None, revision: int | None, over: bool, now: float
) -> None:
    """Whatever the ranks say: B only on proof, nothing adopted over a missing rank, nothing below the journal."""
    everyone = frozenset(range(size))
    heard = data.draw(st.sets(st.sampled_from(sorted(everyone))))
    views = [data.draw(views_for(rank)) for rank in sorted(heard)]
    recovery = told(Recovery(pending=(pending, everyone) if pending else None, revision=revision), *views)
    recovery.lease_over = over
    decision: Decision = recovery.next(everyone, now)
    match decision:
        case CommitB(n, participants):
            said = [said_by(each, n) for each in views]
            proven = Said.FINAL in said
            alive = all(each.vouched_until_s is not None and now < each.vouched_until_s for each in views)
            assert n == pending
            assert proven or (heard == participants and set(said) == {Said.SWITCHED} and alive and not over)
        case AbortA(n, participants, _, recorded):
            assert (n == pending) != recorded
            assert not any(each.revision == n for each in views if each.rank in participants and recorded)
        case Finalize(n, participants):
            assert participants <= heard
            assert n == revision or any(each.revision == n for each in views)
            assert all(each.holds and each.op_n == n for each in views if each.rank in participants)
        case Adopt(rank, new, n):
            assert heard == everyone
            assert new == max(1, *(each.revision for each in views))
            assert revision is None or new > revision
            assert n >= new or new == 1
            assert rank in heard
        case Split():
            assert heard == everyone
            assert len({each.identity_of_state for each in views}) > 1
        case Ready(converge, drift, left):
            assert heard == everyone
            assert pending is None
            assert not left
            assert converge | drift == {each.rank for each in views if each.differs}
            assert not converge & drift
            assert not any(each.holds for each in views)
        case Wait(_, missing):
            assert not over or pending is None
            assert missing == everyone - heard
        case Ask(ranks):
            assert pending is not None
            assert ranks <= heard


def test_recover_is_total_and_needs_every_participant() -> None:
    """``transaction.recover`` over every combination of two answers: B needs both SWITCHED, or one FINAL."""
    options = [None, *Said]
    for first, second, outcome, over in itertools.product(options, options, ("", "a", "b"), (False, True)):
        answers = {r: said for r, said in ((0, first), (1, second)) if said is not None}
        verdict = transaction.recover(BOTH, answers, outcome, over)
        if outcome:
            assert verdict is (
                transaction.Recovered.RESEND_FINALIZE if outcome == "b" else transaction.Recovered.ABORT_A
            )
        elif verdict is transaction.Recovered.COMMIT_B:
            assert Said.FINAL in answers.values() or (first is second is Said.SWITCHED and not over)
        elif verdict is transaction.Recovered.WAIT:
            assert not over
            assert None in (first, second)
            assert {first, second} <= {None, Said.SWITCHED}
