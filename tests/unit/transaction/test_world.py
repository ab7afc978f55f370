"""Rule 11 by explicit-state search: ranks that share a broadcast never differ about what is installed.

Two ranks of one world over the real table. The coordinator's messages reach each rank at any time, in any order,
more than once; a rank's swap may fail; leases end. Between two scheduler iterations both ranks must run the same
set, or they would enter different collectives and hang (F33, F114). With a part of the rule switched off the search
finds how they come to differ.
"""

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from tests.unit.transaction.model_rank import DOUBT_TIMER, NO_TIMER, Bad, Rank, apply

from hicache_proto.transaction import On, RankEvent, RankPhase, rank_step

N = 1
LEADER = 0
HELD = (RankPhase.DRAINING, RankPhase.FROZEN, RankPhase.SWITCHED)
MESSAGES = ("freeze", "commit", "finalize", "undo")


class Rules(NamedTuple):
    """What rule 11 says; a test switches one off."""

    broadcast: bool = True  # commands act on all ranks in the iteration in which the leader's broadcast brings them
    leader_clock: bool = True  # a held lease ends by the leader's clock, through the broadcast
    agreement: bool = True  # COMMIT ends with one agreement: one no and all swap back in that step


class World(NamedTuple):
    """One state of both ranks and of what is on its way."""

    ranks: tuple[Rank, ...] = (Rank(), Rank())
    queue: tuple[str, ...] = ()  # injected, not yet brought by the broadcast
    sent: frozenset[str] = frozenset({"prepare"})
    doubt: bool = False  # the coordinator's clock no longer vouches: B is not decided any more
    decided: bool = False
    failures: int = 1  # swaps that may still fail


def put(w: World, r: int, rank: Rank) -> World:
    return w._replace(ranks=(*w.ranks[:r], rank, *w.ranks[r + 1 :]))


def feed(rank: Rank, on: On, **facts: object) -> Rank:
    return apply(rank_step, rank, RankEvent(on, N, **facts))  # type: ignore[arg-type]


def run(rank: Rank, command: str, *, fails: bool = False) -> Rank:
    """One command on one rank, as its executor takes it."""
    match command:
        case "freeze":
            frozen = feed(rank, On.FREEZE, round=1)
            return feed(frozen, On.IDLE) if frozen.rec.phase is RankPhase.DRAINING else frozen
        case "commit":
            return apply(rank_step, rank, RankEvent(On.COMMIT, N, idle=True), swap_fails=fails)
        case "lease_end":
            return feed(rank, On.LEASE_END) if rank.rec.phase is not RankPhase.NONE else rank
        case _:
            return feed(rank, On(command))


def iteration(rules: Rules, w: World, command: str, failing: int | None) -> World:
    """The broadcast brings ``command`` to every rank; ``failing`` is the rank whose swap raises."""
    before = w.ranks
    ranks = tuple(run(rank, command, fails=r == failing) for r, rank in enumerate(before))
    switched = [rank.rec.phase is RankPhase.SWITCHED for rank in ranks]
    if command == "commit" and rules.agreement and not all(switched):
        ranks = tuple(
            feed(rank, On.UNDO) if now and before[r].rec.phase is not RankPhase.SWITCHED else rank
            for r, (rank, now) in enumerate(zip(ranks, switched, strict=True))
        )
    return w._replace(ranks=ranks, failures=w.failures - (failing is not None))


def successors(rules: Rules, w: World) -> Iterator[World]:
    """Everything that can happen next."""
    for r, rank in enumerate(w.ranks):
        yield put(w, r, feed(rank, On.PREPARE))
        for _ in rank.builders:
            yield put(w, r, feed(rank, On.BUILT))
        for message in w.sent - {"prepare"}:
            if not rules.broadcast:
                yield put(w, r, run(rank, message))
                if message == "commit" and w.failures:
                    yield put(w, r, run(rank, message, fails=True))._replace(failures=w.failures - 1)
            elif r == LEADER and len(w.queue) < 2:
                yield w._replace(queue=(*w.queue, message))
        yield from lease(rules, w, r)
    if w.queue:
        after = w._replace(queue=w.queue[1:])
        yield iteration(rules, after, w.queue[0], None)
        if w.queue[0] == "commit" and w.failures:
            yield from (iteration(rules, after, "commit", r) for r in range(len(w.ranks)))
    yield from coordinator(w)


def lease(rules: Rules, w: World, r: int) -> Iterator[World]:
    """A lease may end when its timer is armed; an in-doubt one not while the coordinator vouches for it (rule 4)."""
    rank = w.ranks[r]
    if rank.timer == NO_TIMER or (rank.timer == DOUBT_TIMER and not (w.doubt or w.decided)):
        return
    if rank.rec.phase not in HELD or not rules.leader_clock:
        yield put(w, r, feed(rank, On.LEASE_END))
    elif r == LEADER and len(w.queue) < 2:
        yield w._replace(queue=(*w.queue, "lease_end"))


def coordinator(w: World) -> Iterator[World]:
    """It sends each phase's message once every rank was seen where that phase begins; UNDO at any time before B."""
    phases = {rank.rec.phase for rank in w.ranks}
    if phases == {RankPhase.PREPARED}:
        yield w._replace(sent=w.sent | {"freeze"})
    if phases == {RankPhase.FROZEN}:
        yield w._replace(sent=w.sent | {"commit"})
    if not w.decided:
        if phases == {RankPhase.SWITCHED} and not w.doubt and "undo" not in w.sent:
            yield w._replace(decided=True, sent=w.sent | {"finalize"})
        yield w._replace(sent=w.sent | {"undo"})
        yield w._replace(doubt=True)


def explore(rules: Rules) -> tuple[int, str, bool]:
    """States visited, the first violation, and whether B was ever decided."""
    first = World()
    seen, order, decided = {first}, deque([first]), False
    while order:
        world = order.popleft()
        decided = decided or world.decided
        for after in _safely(rules, world):
            if isinstance(after, str):
                return len(seen), after, decided
            if after not in seen:
                seen.add(after)
                order.append(after)
    return len(seen), "", decided


def _safely(rules: Rules, world: World) -> Iterator[World | str]:
    try:
        for after in successors(rules, world):
            installed = {rank.installed for rank in after.ranks}
            yield f"the ranks of a world run {sorted(installed)}" if len(installed) > 1 else after
    except Bad as bad:
        yield str(bad)


def test_the_ranks_of_a_world_never_differ() -> None:
    """F33, F114: every reachable state, to the end; both outcomes among them."""
    states, why, decided = explore(Rules())
    assert not why
    assert decided
    assert states > 1000


@pytest.mark.parametrize("off", Rules._fields)
def test_each_part_of_rule_11_is_needed(off: str) -> None:
    states, why, _ = explore(Rules()._replace(**{off: False}))
    assert why, f"{states} states and no violation"
