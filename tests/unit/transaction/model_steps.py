"""Every step that can happen from a state of the model: requests that arrive, builders, leases, faults, decisions.

``successors`` names each next state; the invariants that need the journal are checked here, on the way.
"""

from collections.abc import Iterator

from tests.unit.transaction.model_rank import DOUBT_TIMER, NO_TIMER, Bad, Rank, apply, fresh, is_open, says
from tests.unit.transaction.model_world import (
    Journal,
    Message,
    Next,
    Recovering,
    Reply,
    Rules,
    World,
    begin,
    crash,
    decide,
    durable,
    feed,
    new_session,
    put,
    restart,
    spend,
    tag_of,
)

from hicache_proto.transaction import CoordEvent, CoordPhase, CoordRecord, On, RankEvent, RankPhase, See

# ------------------------------------------------------------------ ranks


def deliver(rules: Rules, w: World, r: int, message: Message) -> Iterator[Next]:
    """A request reaches rank ``r``: all ways in which the rank can take it."""
    kind, n, round_ = message
    rank, rec = w.ranks[r], w.ranks[r].rec
    step = rules.rank_step
    over = n < rec.n or (n == rec.n and rec.phase is RankPhase.NONE)

    def done(name: str, after: Rank, *, failed: bool = False, busy: bool = False, cost: str = "") -> Next:
        if over and after != rank:
            raise Bad(f"a stale {kind} of {n} changed rank {r}")
        _guard(w, r, after, lease=False)
        new = spend(w, cost) if cost else w
        new = new._replace(ranks=put(w.ranks, r, after))
        if tag_of(w.coord) == message or not rules.tags:
            new = new._replace(replies=put(w.replies, r, Reply(message, says(after, n), failed, busy)))
        return f"{kind}({n},{round_}) at {r}{name}", new

    match kind:
        case "prepare":
            yield done("", apply(step, rank, RankEvent(On.PREPARE, n, hot=w.left.hot)))
        case "freeze":
            frozen = apply(step, rank, RankEvent(On.FREEZE, n, round=round_))
            checks = frozen.rec.phase is RankPhase.DRAINING and frozen.rec.n == n and frozen.rec.round == round_
            if not checks:
                yield done("", frozen)
                return
            yield done(", idle", apply(step, frozen, RankEvent(On.IDLE, n)))
            if w.left.busy:
                if w.left.drain:
                    yield done(", busy", frozen)
                else:
                    yield done(", busy", apply(step, frozen, RankEvent(On.BUSY, n)), busy=True)
        case "thaw":
            yield done("", apply(step, rank, RankEvent(On.THAW, n, round=round_)))
        case "commit":
            yield done("", apply(step, rank, RankEvent(On.COMMIT, n, idle=True)))
            if not is_open(rank, n):
                return
            if w.left.busy and not rank.rec.hot:
                yield done(", busy", apply(step, rank, RankEvent(On.COMMIT, n)), failed=True)
            if rank.timer not in (NO_TIMER, DOUBT_TIMER):
                late = apply(step, rank, RankEvent(On.COMMIT, n, idle=True, lease_alive=False))
                if late.installed == n and rank.installed != n:
                    raise Bad(f"rank {r} switched on a lease that was over")
                yield done(", lease over", late)
            if w.left.swap_failures:
                failing = apply(step, rank, RankEvent(On.COMMIT, n, idle=True), swap_fails=True)
                yield done(", swap fails", failing, failed=True, cost="swap_failures")
        case "finalize":
            yield done("", apply(step, rank, RankEvent(On.FINALIZE, n)))
        case "undo":
            yield done("", apply(step, rank, RankEvent(On.UNDO, n)))
            if w.left.undo_failures and rank.rec.phase is RankPhase.SWITCHED:
                stuck = apply(step, rank, RankEvent(On.UNDO, n), undo_fails=True)
                yield done(", swap back fails", stuck, failed=True, cost="undo_failures")


def _guard(w: World, r: int, after: Rank, *, lease: bool) -> None:
    """Invariants that need the journal."""
    before = w.ranks[r]
    if after.rec.revision and after.rec.revision not in w.decided:
        raise Bad(f"rank {r} finalised {after.rec.revision}, which nobody decided durably")
    if before.old is not None and before.old in after.closed and before.rec.n not in w.decided:
        raise Bad(f"rank {r} closed the old set before the outcome")
    went_back = before.rec.phase is RankPhase.SWITCHED and after.installed != before.installed
    if went_back and not lease and before.rec.n in w.decided:
        raise Bad(f"rank {r} went back to A by message after B of {before.rec.n} was recorded")


def lease_may_end(w: World, r: int) -> bool:
    """Is it possible, by the clocks, that the rank's lease ends now?"""
    rank = w.ranks[r]
    if rank.timer == NO_TIMER:
        return False
    if rank.timer != DOUBT_TIMER or w.doubt_due:
        return True
    if isinstance(w.coord, CoordRecord):
        return not (w.coord.phase is CoordPhase.COMMIT and w.coord.n == rank.rec.n)
    if isinstance(w.coord, Recovering):
        answer = w.coord.answers[r]
        return answer is None or not answer[1]
    return True


def lease_ends(rules: Rules, w: World, r: int) -> World:
    rank = w.ranks[r]
    after = apply(rules.rank_step, rank, RankEvent(On.LEASE_END, rank.rec.n))
    if after.held:
        raise Bad(f"rank {r} keeps admission closed after its lease")
    _guard(w, r, after, lease=True)
    return w._replace(ranks=put(w.ranks, r, after))


def rank_dies(rules: Rules, w: World, r: int) -> World:
    w = new_session(rules, w, r)._replace(ranks=put(w.ranks, r, fresh()))
    if isinstance(w.coord, CoordRecord):
        w = w._replace(lost=w.lost | {r})
    if isinstance(w.coord, Recovering):
        w = w._replace(coord=w.coord._replace(answers=put(w.coord.answers, r, None)))
    return w


# ------------------------------------------------------------------ everything that can happen


def successors(rules: Rules, w: World) -> Iterator[Next]:
    """Every next state, with a name for the trace."""
    yield from _coordinator(rules, w)
    for r, rank in enumerate(w.ranks):
        for message in w.sent[r]:
            yield from deliver(rules, w, r, message)
        for n in rank.builders:
            built = apply(rules.rank_step, rank, RankEvent(On.BUILT, n))
            yield f"rank {r} built {n}", w._replace(ranks=put(w.ranks, r, built))
            if w.left.build_failures:
                broken = apply(rules.rank_step, rank, RankEvent(On.BUILD_FAILED, n))
                yield f"rank {r} cannot build", spend(w, "build_failures")._replace(ranks=put(w.ranks, r, broken))
        if w.left.drain and rank.rec.phase is RankPhase.DRAINING:
            idle = apply(rules.rank_step, rank, RankEvent(On.IDLE, rank.rec.n))
            yield f"rank {r} becomes idle", w._replace(ranks=put(w.ranks, r, idle))
        if lease_may_end(w, r):
            yield f"lease of rank {r} ends", lease_ends(rules, w, r)
        if w.left.rank_crashes:
            yield f"rank {r} dies", rank_dies(rules, spend(w, "rank_crashes"), r)
        if w.left.rehellos and isinstance(w.coord, CoordRecord):
            yield f"link of rank {r} is cut", new_session(rules, spend(w, "rehellos"), r)


def _coordinator(rules: Rules, w: World) -> Iterator[Next]:
    coord = w.coord
    if coord is None:
        yield "sidecar starts", restart(rules, w)
        if w.left.journal_losses:
            # What no rank can prove any more was never decided, as far as anybody can know (nor was a client told).
            proven = w.decided & {rank.rec.revision for rank in w.ranks}
            lost = spend(w, "journal_losses")._replace(journal=Journal(), decided=proven)
            yield "sidecar starts, journal lost", restart(rules, lost)
        return
    if w.left.coord_crashes:
        yield from crash(w)
    if coord == "idle":
        if w.left.ops:
            yield "operation starts", begin(rules, spend(w, "ops"))
    elif isinstance(coord, Recovering):
        yield from _recovering(rules, w, coord)
    elif isinstance(coord, CoordRecord):
        yield from _operating(rules, w, coord)


def _recovering(rules: Rules, w: World, state: Recovering) -> Iterator[Next]:
    for r, rank in enumerate(w.ranks):
        for asked in (False, True):
            if asked and state.answers[r] is None:
                continue
            answers = put(state.answers, r, (rank, asked))
            yield f"rank {r} {'answers' if asked else 'says hello'}", w._replace(coord=state._replace(answers=answers))
    if not state.waited:
        yield "an in-doubt lease has passed", w._replace(coord=state._replace(waited=True))
    if not w.doubt_due:
        yield "vouching ends", w._replace(doubt_due=True)
    decided = decide(rules, w)
    if decided is not None:
        yield "recovery decides", decided


def _operating(rules: Rules, w: World, rec: CoordRecord) -> Iterator[Next]:
    if w.fsync:
        yield f"{w.fsync} is durable", durable(rules, w)
        if w.fsync == "b" and w.recovered:  # the driver of an operation looks at its clock again, recovery at its own
            too_late = w._replace(fsync="") if rules.look_then_write else durable(rules, w, feed_it=False)
            yield "too late to write b", feed(rules, too_late, CoordEvent(See.NOT_DURABLE))
        return
    if rec.phase in (CoordPhase.PREPARE, CoordPhase.WAIT, CoordPhase.FREEZE, CoordPhase.COMMIT):
        yield "cancel", feed(rules, w, CoordEvent(See.CANCEL))
    if rec.phase is CoordPhase.COMMIT and not w.doubt_due:
        yield "doubt is due", w._replace(doubt_due=True)
    if rec.phase is CoordPhase.WAIT and rec.round < w.left.rounds:
        yield "an idle moment", feed(rules, w, CoordEvent(See.IDLE))
    ending = rec.phase in (CoordPhase.UNDO, CoordPhase.FINALIZE, CoordPhase.CONVERGING)
    if ending and not any(is_open(w.ranks[r], rec.n) for r in rec.participants):
        yield "all leases are over", feed(rules, w, CoordEvent(See.LEASES_OVER))
    for r in sorted(rec.participants):
        if r in w.lost:  # its hello comes before anything else that it says, so the driver knows first
            yield f"rank {r} is seen lost", feed(rules, w, CoordEvent(See.LOST, r))
            continue
        reply = w.replies[r]
        if reply is not None and (reply.tag == tag_of(rec) or not rules.tags):
            see = See.BUSY if reply.busy else See.FAILED if reply.failed else See.SAID
            yield f"reply of {r}: {reply.said} {see}", feed(rules, w, CoordEvent(see, r, reply.said))
        said = says(w.ranks[r], rec.n)
        yield f"heartbeat of {r}: {said}", feed(rules, w, CoordEvent(See.SAID, r, said))
