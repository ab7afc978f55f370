"""Breadth-first search over the model, and the fair ending that every state must have.

``explore`` visits every state that a scenario can reach (or stops at a limit and says so); ``settle`` takes one state
and lets everything run on without new faults: it must end with all ranks on the recorded outcome.
"""

from collections import deque
from typing import NamedTuple

from tests.unit.transaction import model_steps as steps
from tests.unit.transaction import model_world as mw
from tests.unit.transaction.model_rank import BOOT, NO_TIMER, Bad, apply, says
from tests.unit.transaction.model_world import Recovering, Rules, Scenario, World

from hicache_proto.transaction import CoordEvent, CoordPhase, CoordRecord, Ended, On, RankEvent, RankPhase, See

SETTLE_STEPS = 200  # far above what any fair ending took; more means that it never ends


REAL = Rules()


class Found(NamedTuple):
    """``why`` is empty when nothing was violated; ``complete`` when no state was left out."""

    states: int
    complete: bool
    why: str = ""
    trace: tuple[str, ...] = ()


def in_commit(scenario: Scenario, rules: Rules = REAL) -> World:
    """The state in which every rank is frozen and COMMIT is on its way; all that was sent before may come again."""
    w = mw.begin(rules, mw.spend(mw.start(scenario), "ops"))
    while isinstance(w.coord, CoordRecord) and w.coord.phase is not CoordPhase.COMMIT:
        w = _happy_step(rules, w, w.coord)
    return w


def explore(
    scenario: Scenario,
    rules: Rules = REAL,
    *,
    first: World | None = None,
    limit: int = 10**9,
    settle_every: int = 1,
) -> Found:
    """Visit all states that ``first`` (the start of the scenario) leads to; ``settle`` every ``settle_every``-th."""
    first = first or mw.start(scenario)
    seen = {first: 0}
    parents: list[tuple[int, str]] = [(-1, "")]
    order = deque([first])
    index = 0
    while order:
        world = order.popleft()
        label = "settling"
        try:
            if index % settle_every == 0:
                settle(rules, world)
            for label, after in steps.successors(rules, world):
                if after not in seen:
                    seen[after] = len(parents)
                    parents.append((index, label))
                    order.append(after)
                label = "a step from here"  # one that raises has no name yet
        except Bad as bad:
            return Found(len(seen), False, str(bad), (*_trace(parents, index), label))
        index += 1
        if len(seen) > limit:
            return Found(len(seen), False)
    return Found(len(seen), True)


def _trace(parents: list[tuple[int, str]], index: int) -> tuple[str, ...]:
    steps: list[str] = []
    while index > 0:
        index, label = parents[index]
        steps.append(label)
    return tuple(reversed(steps))


# ------------------------------------------------------------------ the fair ending


def settle(rules: Rules, w: World) -> World:
    """No more faults: messages arrive, clocks run, the sidecar is up. Raises Bad if that does not end well."""
    owed = {r: k.rec.n for r, k in enumerate(w.ranks) if k.rec.phase is RankPhase.SWITCHED and k.rec.n in w.decided}
    for _ in range(SETTLE_STEPS):
        after = _fair_step(rules, w)
        if after is None:
            break
        w = after
    else:
        raise Bad("it does not come to rest")
    for r, n in owed.items():
        if w.ranks[r].rec.revision != n:
            raise Bad(f"rank {r} had switched and B of {n} was recorded, but it did not become final")
    return _converge(rules, w)


def _fair_step(rules: Rules, w: World) -> World | None:
    coord = w.coord
    if coord is None:
        return mw.restart(rules, w)
    if isinstance(coord, Recovering):
        answers = tuple((rank, True) for rank in w.ranks)
        if coord.answers != answers:
            return w._replace(coord=coord._replace(answers=answers))
        return mw.decide(rules, w) or w._replace(coord=coord._replace(waited=True))
    if isinstance(coord, CoordRecord):
        return _fair_operation(rules, w, coord)
    for r, rank in enumerate(w.ranks):
        for n in rank.builders:
            return w._replace(ranks=mw.put(w.ranks, r, apply(rules.rank_step, rank, RankEvent(On.BUILT, n))))
        if rank.timer != NO_TIMER:
            return steps.lease_ends(rules, w, r)
    return None


def _fair_operation(rules: Rules, w: World, rec: CoordRecord) -> World:
    if w.fsync:
        return mw.durable(rules, w)
    match rec.phase:
        case CoordPhase.PREPARE | CoordPhase.WAIT | CoordPhase.FREEZE | CoordPhase.COMMIT:
            return mw.feed(rules, w, CoordEvent(See.TIMEOUT))
        case CoordPhase.FINALIZE | CoordPhase.CONVERGING | CoordPhase.UNDO:
            kind = "undo" if rec.phase is CoordPhase.UNDO else "finalize"
            for r in sorted(rec.participants - rec.have):
                if r in w.lost:
                    return mw.feed(rules, w, CoordEvent(See.LOST, r))
                _, w = next(steps.deliver(rules, w, r, (kind, rec.n, 0)))
                after = mw.feed(rules, w, CoordEvent(See.SAID, r, says(w.ranks[r], rec.n)))
                if after != w:
                    return after
            return mw.feed(rules, w, CoordEvent(See.LEASES_OVER))
        case _:
            raise Bad(f"nothing moves {rec.phase} on")


def _at_rest(w: World) -> None:
    """Nothing is held, nothing runs out of itself, and nobody undid what was decided."""
    for r, rank in enumerate(w.ranks):
        if rank.held or rank.timer != NO_TIMER or rank.builders:
            raise Bad(f"rank {r} still holds something at rest")
        rec = rank.rec
        if rank.installed != BOOT and rec.n in w.decided and rec.ended is Ended.UNDONE:
            raise Bad(f"rank {r} was told to undo {rec.n}, which is decided")  # drift outside rule 3's window
        if rec.revision > w.journal.revision:
            raise Bad(f"rank {r} is at revision {rec.revision}, the journal at {w.journal.revision}")


def _behind(w: World) -> frozenset[int]:
    """Ranks that are not where the journal wants them: fresh ones, and those that missed an outcome (rule 3)."""
    return frozenset(
        r
        for r, rank in enumerate(w.ranks)
        if rank.rec.phase is not RankPhase.QUARANTINED and rank.rec.revision != w.journal.revision
    )


def _converge(rules: Rules, w: World) -> World:
    """Bring the ranks that differ to the desired state, as an ordinary operation without faults (rule 14)."""
    _at_rest(w)
    behind, before = _behind(w), w.journal.revision
    if not behind:
        return w
    if forgotten := behind - mw.behind(rules, w):
        raise Bad(f"nobody brings ranks {sorted(forgotten)} to the desired state")
    w = mw.begin(rules, w._replace(left=w.left._replace(busy=False, rounds=1)), behind)
    for _ in range(SETTLE_STEPS):
        rec = w.coord
        if not isinstance(rec, CoordRecord):
            break
        w = _happy_step(rules, w, rec)
    else:
        raise Bad("convergence does not end")
    # The others have the same state under the older number: drift is told by comparing states, not numbers.
    _at_rest(w)
    for r, rank in enumerate(w.ranks):
        if rank.rec.phase is not RankPhase.QUARANTINED and rank.rec.revision not in (before, w.journal.revision):
            raise Bad(f"rank {r} was not converged: revision {rank.rec.revision}")
    if before in (rank.rec.revision for r, rank in enumerate(w.ranks) if r in behind):
        raise Bad("convergence left a rank behind")
    return w


def _happy_step(rules: Rules, w: World, rec: CoordRecord) -> World:
    if w.fsync:
        return mw.durable(rules, w)
    tag = mw.tag_of(rec)
    for r in sorted(rec.participants - rec.have):
        if tag is not None:
            _, w = next(steps.deliver(rules, w, r, tag))
        for n in w.ranks[r].builders:
            w = w._replace(ranks=mw.put(w.ranks, r, apply(rules.rank_step, w.ranks[r], RankEvent(On.BUILT, n))))
        w = mw.feed(rules, w, CoordEvent(See.SAID, r, says(w.ranks[r], rec.n)))
        if w.coord is not rec:
            return w
    raise Bad(f"convergence stands still in {rec.phase}")
