"""The proof's teeth: with a rule switched off, the search finds a violation. A rule without one would be decoration."""

from typing import Any

import msgspec
import pytest
from tests.unit.transaction.search import Found, Rules, Scenario, explore, in_commit

from hicache_proto import transaction
from hicache_proto.transaction import (
    Act,
    CoordPhase,
    CoordRecord,
    Do,
    Ended,
    On,
    RankEvent,
    RankPhase,
    RankRecord,
    Recovered,
    Said,
    See,
)
from hicache_sidecar.store import recovery

replace = msgspec.structs.replace


# ---- the rank's table without one rule


def opens_at_commit(rec: RankRecord, ev: RankEvent) -> transaction.Step:
    """Rule 1 off: admission is opened when B is installed, not when B is decided."""
    after, actions = transaction.rank_step(rec, ev)
    return after, (*actions, Do.OPEN) if Do.SWAP in actions else actions


def closes_at_commit(rec: RankRecord, ev: RankEvent) -> transaction.Step:
    """Rule 10 off: the old set is retired as soon as the new one is installed."""
    after, actions = transaction.rank_step(rec, ev)
    return after, (*actions, Do.RETIRE_OLD) if Do.SWAP in actions else actions


def commits_on_a_dead_lease(rec: RankRecord, ev: RankEvent) -> transaction.Step:
    """Rule 2 off: COMMIT is judged when it arrived, not when it runs."""
    return transaction.rank_step(rec, replace(ev, lease_alive=True))


def commits_unfrozen(rec: RankRecord, ev: RankEvent) -> transaction.Step:
    """Rule 2 off: COMMIT is taken in PREPARED too."""
    if ev.on is On.COMMIT and rec.n == ev.n and rec.phase is RankPhase.PREPARED:
        return replace(rec, phase=RankPhase.SWITCHED), (Do.SWAP, Do.ARM_IN_DOUBT)
    return transaction.rank_step(rec, ev)


def forgets_after_lease_end(rec: RankRecord, ev: RankEvent) -> transaction.Step:
    """Rule 2 off: after the end of a lease, n is unknown again."""
    after, actions = transaction.rank_step(rec, ev)
    if ev.on is On.LEASE_END and after.ended is Ended.EXPIRED:
        after = replace(after, n=after.n - 1, ended=Ended.NOT, round=0)
    return after, actions


def never_expires(rec: RankRecord, ev: RankEvent) -> transaction.Step:
    """Rule 2 off: a lease ends nothing."""
    if ev.on is On.LEASE_END:
        return rec, (Do.DISARM,)
    return transaction.rank_step(rec, ev)


def silence_means_b(rec: RankRecord, ev: RankEvent) -> transaction.Step:
    """Rule 3 off: a switched rank whose lease ends stays on B."""
    if ev.on is On.LEASE_END and rec.phase is RankPhase.SWITCHED:
        return transaction.rank_step(rec, replace(ev, on=On.FINALIZE))
    return transaction.rank_step(rec, ev)


def takes_an_n_again(rec: RankRecord, ev: RankEvent) -> transaction.Step:
    """Rule 6 off: a PREPARE with an n that was seen starts it again."""
    if ev.on is On.PREPARE and rec.n == ev.n and rec.phase is RankPhase.NONE:
        rec = replace(rec, n=ev.n - 1, ended=Ended.NOT)
    return transaction.rank_step(rec, ev)


def forgets_an_early_undo(rec: RankRecord, ev: RankEvent) -> transaction.Step:
    """Rule 6 off: an older n is taken while nothing is open."""
    if ev.n < rec.n and rec.phase is RankPhase.NONE and ev.on is On.PREPARE:
        rec = replace(rec, n=ev.n - 1, ended=Ended.NOT)
    return transaction.rank_step(rec, ev)


def takes_any_build(rec: RankRecord, ev: RankEvent) -> transaction.Step:
    """Rule 9 off: a builder hands over whatever became of n."""
    if ev.on is On.BUILT and rec.n == ev.n and rec.phase is RankPhase.NONE:
        return replace(rec, phase=RankPhase.PREPARED, builder_n=0), ()
    return transaction.rank_step(rec, ev)


def drops_late_builds(rec: RankRecord, ev: RankEvent) -> transaction.Step:
    """Rule 9 off: nobody closes what a late builder built."""
    after, actions = transaction.rank_step(rec, ev)
    return after, tuple(action for action in actions if action is not Do.CLOSE_BUILT)


def builds_beside_a_builder(rec: RankRecord, ev: RankEvent) -> transaction.Step:
    """Rule 9 off: a builder that still runs does not refuse the next PREPARE."""
    newer = ev.on is On.PREPARE and ev.n > rec.n
    return transaction.rank_step(replace(rec, builder_n=0) if newer else rec, ev)


def thaws_without_opening(rec: RankRecord, ev: RankEvent) -> transaction.Step:
    """UNDO leaves admission closed."""
    after, actions = transaction.rank_step(rec, ev)
    return after, tuple(a for a in actions if a is not Do.OPEN) if ev.on is On.UNDO else actions


# ---- the coordinator's table without one rule


def finalizes_at_commit(rec: CoordRecord, ev: transaction.CoordEvent) -> transaction.CoordStep:
    """Rule 1 off: the first rank that switched decides for all."""
    if rec.phase is CoordPhase.COMMIT and ev.see is See.SAID and ev.said is Said.SWITCHED:
        rec = replace(rec, have=rec.participants - {ev.rank})
    return transaction.coord_step(rec, ev)


def undoes_after_the_outcome(rec: CoordRecord, ev: transaction.CoordEvent) -> transaction.CoordStep:
    """Rule 1 off: a loss after OUTCOME B still rolls back."""
    if rec.phase is CoordPhase.FINALIZE and ev.see is See.SAID and ev.said is Said.EXPIRED:
        return replace(rec, phase=CoordPhase.UNDO, have=frozenset(), outcome="a"), (Act.SEND_UNDO,)
    return transaction.coord_step(rec, ev)


def ignores_losses(rec: CoordRecord, ev: transaction.CoordEvent) -> transaction.CoordStep:
    """Rule 13 off: a participant that is another incarnation now is no no."""
    if ev.see is See.LOST and rec.phase in (CoordPhase.PREPARE, CoordPhase.FREEZE, CoordPhase.COMMIT):
        return rec, ()
    return transaction.coord_step(rec, ev)


# ---- recovery without one rule


def any_switched_is_b(participants: frozenset[int], answers: dict[int, Said], *_: Any) -> Recovered:
    """Rule 1 off: one SWITCHED participant is enough for B."""
    return Recovered.COMMIT_B if Said.SWITCHED in answers.values() else Recovered.ABORT_A


NEXT = recovery.Recovery.next


def ignores_lost_journal(rec: recovery.Recovery, expected: frozenset[int], now_s: float) -> recovery.Decision:
    """Rule 6 off: what the ranks prove is not adopted."""
    decision = NEXT(rec, expected, now_s)
    return recovery.Ready() if isinstance(decision, recovery.Adopt) else decision


def forgets_finalize(rec: recovery.Recovery, expected: frozenset[int], now_s: float) -> recovery.Decision:
    """Rule 1 off: after a restart FINALIZE is not sent again; what is still held is undone."""
    decision = NEXT(rec, expected, now_s)
    if isinstance(decision, recovery.Finalize):
        return recovery.AbortA(decision.n, decision.participants, "", recorded=True)
    return decision


def leaves_one_fresh_rank(rec: recovery.Recovery, expected: frozenset[int], now_s: float) -> recovery.Decision:
    """Rule 13 off: ``leave`` counts for a single fresh rank too."""
    decision = NEXT(rec, expected, now_s)
    if isinstance(decision, recovery.Ready) and any(view.fresh for view in rec._views.values()):
        return recovery.Ready(left=True)
    return decision


def shows_who_missed_the_outcome(rec: recovery.Recovery, expected: frozenset[int], now_s: float) -> recovery.Decision:
    """Rule 14 off: a rank whose lease ended in the window of rule 3 is drift, and stays it."""
    decision = NEXT(rec, expected, now_s)
    if isinstance(decision, recovery.Ready):
        expired = {rank for rank, view in rec._views.items() if view.op_ended == Ended.EXPIRED}
        return recovery.Ready(converge=decision.converge - expired, drift=decision.drift | expired)
    return decision


OFF: dict[str, tuple[Rules, Scenario]] = {
    "1: FINALIZE before the fsync": (Rules(wait_for_durable=False), Scenario(coord_crashes=1)),
    "1: opened at COMMIT": (Rules(rank_step=opens_at_commit), Scenario()),
    "1: one rank decides": (Rules(coord_step=finalizes_at_commit), Scenario()),
    "1: rolled back after the outcome": (Rules(coord_step=undoes_after_the_outcome), Scenario()),
    "1: FINALIZE not repeated": (Rules(next_decision=forgets_finalize), Scenario(coord_crashes=1)),
    "2: COMMIT on a dead lease": (Rules(rank_step=commits_on_a_dead_lease), Scenario()),
    "2: COMMIT unfrozen": (Rules(rank_step=commits_unfrozen), Scenario(busy=True, rounds=2)),
    "2: n forgotten at lease end": (Rules(rank_step=forgets_after_lease_end), Scenario()),
    "2: leases do not end": (Rules(rank_step=never_expires), Scenario()),
    "3: silence means B": (Rules(rank_step=silence_means_b), Scenario()),
    "4: the clock is not looked at": (Rules(doubt=False), Scenario()),
    "4: too late, and written all the same": (Rules(look_then_write=False), Scenario()),
    "4: recovery does not ask": (Rules(vouch=False), Scenario(coord_crashes=1)),
    "5: older sessions count": (Rules(fence=False), Scenario(coord_crashes=1)),
    "6: an n is taken again": (Rules(rank_step=takes_an_n_again), Scenario()),
    "6: an older n is taken": (Rules(rank_step=forgets_an_early_undo), Scenario(ops=2)),
    "6: a lost journal adopts nothing": (
        Rules(next_decision=ignores_lost_journal),
        Scenario(coord_crashes=1, journal_losses=1),
    ),
    "9: any build is taken": (Rules(rank_step=takes_any_build), Scenario()),
    "9: late builds are not closed": (Rules(rank_step=drops_late_builds), Scenario()),
    "9: two builders": (Rules(rank_step=builds_beside_a_builder), Scenario(ops=2)),
    "10: retired at COMMIT": (Rules(rank_step=closes_at_commit), Scenario()),
    "12: UNDO does not open": (Rules(rank_step=thaws_without_opening), Scenario()),
    "13: a loss is no no": (Rules(coord_step=ignores_losses), Scenario(rank_crashes=1)),
    "13: one fresh rank is left": (Rules(next_decision=leaves_one_fresh_rank), Scenario(rank_crashes=1)),
    "14: convergence without a number": (Rules(own_number=False), Scenario()),
    "14: who missed the outcome is only shown": (Rules(next_decision=shows_who_missed_the_outcome), Scenario()),
}
LIMIT = 60_000  # far above what any of them takes


def hunt(scenario: Scenario, rules: Rules) -> Found:
    """From the start, and from the middle of a commit, where most of the danger is."""
    found = explore(scenario, rules, limit=4_000, settle_every=5)
    if found.why:
        return found
    return explore(scenario, rules, first=in_commit(scenario, rules), limit=LIMIT, settle_every=5)


@pytest.mark.parametrize("name", OFF)
def test_a_rule_switched_off_is_found(name: str) -> None:
    """Each rule is there because leaving it out breaks an invariant."""
    rules, scenario = OFF[name]
    found = hunt(scenario, rules)
    assert found.why, f"{found.states} states and no violation"


def test_a_recovery_that_guesses_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 1: B after a restart only if every participant says SWITCHED."""
    monkeypatch.setattr(transaction, "recover", any_switched_is_b)
    assert hunt(Scenario(coord_crashes=1), Rules(vouch=False)).why
