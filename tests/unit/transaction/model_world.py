"""Coordinator, journal, network and N model ranks; the coordinator's side of the model.

The network: a request, once sent, may be delivered at any later time, any number of times, in any order, or never,
as long as its session lasts (that is loss, delay, duplicates and reordering in one). One reply per rank may be under
way, delivered late or often. Ghost fields (``decided``, ``told``) remember facts for the invariants only.

Time is left out but for what the rules use: a lease may end whenever its timer is armed, except that an in-doubt
lease cannot end while the coordinator's clock still vouches for it (DOUBT not due: COMMIT's send time + in_doubt -
margin lies before any rank's own end of lease).
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from tests.unit.transaction.model_rank import Bad, Rank, says

from hicache_proto import transaction
from hicache_proto.transaction import (
    Act,
    CoordEvent,
    CoordPhase,
    CoordRecord,
    Recovered,
    Said,
    See,
)
from hicache_sidecar.store import recovery

Message = tuple[str, int, int]  # kind, n, round
Tag = tuple[str, int, int]


class Rules(NamedTuple):
    """What is proved. A test that proves its teeth replaces one of these."""

    rank_step: Callable[..., transaction.Step] = transaction.rank_step
    coord_step: Callable[..., transaction.CoordStep] = transaction.coord_step
    fence: bool = True  # rule 5: messages of an older session are dropped
    tags: bool = True  # rule 5: replies of another phase or round are dropped
    doubt: bool = True  # rule 4: the clock is looked at before the decision
    vouch: bool = True  # rule 4 after a restart
    look_then_write: bool = True  # rule 4: what is said to be too late was not written
    wait_for_durable: bool = True  # rule 1: FINALIZE after the fsync, not beside it
    seen_n: bool = True  # rule 6: n is above what the ranks showed
    own_number: bool = True  # rule 14: a convergence is an operation with a number of its own
    next_decision: Callable[..., recovery.Decision] = recovery.Recovery.next


class Scenario(NamedTuple):
    """How much may go wrong: budgets."""

    ranks: int = 2
    ops: int = 1
    drain: bool = False
    hot: bool = False
    rounds: int = 1  # over 1: strict with time to wait
    busy: bool = False
    coord_crashes: int = 0
    journal_losses: int = 0
    rank_crashes: int = 0
    rehellos: int = 0
    swap_failures: int = 0
    undo_failures: int = 0
    build_failures: int = 0


class Journal(NamedTuple):
    """What is durable."""

    pending: tuple[int, frozenset[int]] | None = None
    revision: int = 0
    last_n: int = 0


class Reply(NamedTuple):
    tag: Tag
    said: Said
    failed: bool = False
    busy: bool = False


class Recovering(NamedTuple):
    """A restarted coordinator: per rank what it said, and whether its lease was asked for since."""

    answers: tuple[tuple[Rank, bool] | None, ...]
    waited: bool = False


class World(NamedTuple):
    """One state of everything. ``coord`` is None while the process is down, "idle" between operations."""

    ranks: tuple[Rank, ...]
    left: Scenario  # budgets that are left
    coord: CoordRecord | Recovering | str | None = "idle"
    fsync: str = ""
    journal: Journal = Journal()
    sent: tuple[frozenset[Message], ...] = ()
    replies: tuple[Reply | None, ...] = ()
    lost: frozenset[int] = frozenset()
    noticed: frozenset[int] = frozenset()  # ghost: the table was told of these losses before the outcome
    doubt_due: bool = False
    recovered: bool = True  # False from a restart until recovery says Ready
    decided: frozenset[int] = frozenset()
    told: frozenset[tuple[int, str]] = frozenset()


Next = tuple[str, World]


def start(scenario: Scenario) -> World:
    n = scenario.ranks
    return World(
        ranks=(Rank(),) * n, left=scenario, sent=(frozenset(),) * n, replies=(None,) * n,
    )  # fmt: skip


def put(items: tuple, index: int, value: object) -> tuple:  # type: ignore[type-arg]
    return (*items[:index], value, *items[index + 1 :])


def spend(w: World, name: str) -> World:
    return w._replace(left=w.left._replace(**{name: getattr(w.left, name) - 1}))


def tag_of(coord: object) -> Tag | None:
    """What a reply must carry to count now."""
    if not isinstance(coord, CoordRecord):
        return None
    match coord.phase:
        case CoordPhase.PREPARE | CoordPhase.COMMIT | CoordPhase.UNDO:
            return coord.phase.value, coord.n, 0
        case CoordPhase.FREEZE:
            return "freeze", coord.n, coord.round
        case CoordPhase.FINALIZE | CoordPhase.CONVERGING:
            return "finalize", coord.n, 0
        case _:
            return None


# ------------------------------------------------------------------ coordinator


def feed(rules: Rules, w: World, ev: CoordEvent) -> World:
    """One event to the coordinator's table, and its actions."""
    coord = w.coord
    if not isinstance(coord, CoordRecord):
        raise TypeError("no operation runs")
    if rules.doubt and w.doubt_due and coord.phase is CoordPhase.COMMIT:
        ev = CoordEvent(See.DOUBT)
    if ev.see is See.LOST and coord.phase not in (CoordPhase.UNDO, CoordPhase.FINALIZE, CoordPhase.CONVERGING):
        w = w._replace(noticed=w.noticed | {ev.rank})
    rec, actions = rules.coord_step(coord, ev)
    return act(rules, w._replace(coord=rec), actions)


_SENDS = {
    Act.SEND_PREPARE: "prepare",
    Act.SEND_THAW: "thaw",
    Act.SEND_FREEZE: "freeze",
    Act.SEND_COMMIT: "commit",
    Act.SEND_FINALIZE: "finalize",
    Act.SEND_UNDO: "undo",
}


def act(rules: Rules, w: World, actions: tuple[Act, ...]) -> World:
    rec = w.coord
    if not isinstance(rec, CoordRecord):
        raise TypeError("no operation runs")
    for action in actions:
        if action in _SENDS:
            # The WAIT that follows a thaw has the round that it thaws.
            message = (_SENDS[action], rec.n, rec.round if action in (Act.SEND_FREEZE, Act.SEND_THAW) else 0)
            w = w._replace(sent=tuple(s | {message} if r in rec.participants else s for r, s in enumerate(w.sent)))
            if action is Act.SEND_COMMIT:
                w = w._replace(doubt_due=False)
        elif action is Act.FSYNC_BEGIN:
            w = w._replace(fsync="begin")
        elif action is Act.FSYNC_OUTCOME_B:
            for r in rec.participants & w.noticed:
                raise Bad(f"B of {rec.n} is decided although rank {r} was seen to hold it no more")
            for r in rec.participants:
                # A rank that died is another incarnation: it counts as a no as soon as that is seen (rule 13).
                if w.ranks[r].rec.n >= rec.n and says(w.ranks[r], rec.n) not in (Said.SWITCHED, Said.FINAL):
                    raise Bad(f"B of {rec.n} is decided while rank {r} says {says(w.ranks[r], rec.n)}")
            if not rules.wait_for_durable:
                message = ("finalize", rec.n, 0)
                w = w._replace(sent=tuple(s | {message} if r in rec.participants else s for r, s in enumerate(w.sent)))
            w = w._replace(fsync="b")
        elif action is Act.FINISH:
            w = _finish(w, rec)
    tag = tag_of(w.coord)
    if rules.tags:
        w = w._replace(replies=tuple(p if p is not None and p.tag == tag else None for p in w.replies))
    return w


def _finish(w: World, rec: CoordRecord) -> World:
    journal = w.journal
    if rec.outcome == "a" and journal.pending is not None and journal.pending[0] == rec.n:
        journal = journal._replace(pending=None)  # durable before the client reads the answer
    outcome = rec.outcome if rec.phase is CoordPhase.DONE else "converging"
    if outcome == "a" and rec.n in w.decided:
        raise Bad(f"the client hears A of {rec.n}, the journal said B")
    then = "idle" if w.recovered else Recovering(answers=(None,) * len(w.ranks))
    w = w._replace(coord=then, journal=journal, told=w.told | {(rec.n, outcome)})
    return w._replace(lost=frozenset(), noticed=frozenset(), doubt_due=False)


def durable(rules: Rules, w: World, *, feed_it: bool = True) -> World:
    """The fsync that is under way reaches the disk."""
    rec = w.coord
    if not isinstance(rec, CoordRecord):
        raise TypeError("nothing is written")
    if w.fsync == "begin":
        journal = Journal((rec.n, rec.participants), w.journal.revision, rec.n)
    else:
        if (rec.n, "a") in w.told:
            raise Bad(f"B of {rec.n} is recorded after a client heard A")
        journal = Journal(None, rec.n, max(w.journal.last_n, rec.n))
        w = w._replace(decided=w.decided | {rec.n})
    w = w._replace(journal=journal, fsync="")
    return feed(rules, w, CoordEvent(See.DURABLE)) if feed_it else w


def begin(rules: Rules, w: World, participants: frozenset[int] | None = None) -> World:
    """Start the next operation."""
    seen = max(max(r.rec.n, r.rec.revision) for r in w.ranks) if rules.seen_n else 0
    n = max(w.journal.last_n, seen) + 1 if rules.own_number or participants is None else w.journal.revision
    everyone = frozenset(range(len(w.ranks)))
    rec, actions = transaction.coord_start(
        n, participants or everyone, drain=w.left.drain, hot=w.left.hot, wait=w.left.rounds > 1
    )
    return act(rules, w._replace(coord=rec), actions)


def crash(w: World) -> Iterator[Next]:
    """SIGKILL of the sidecar: what was being written is there or not."""
    rec = w.coord
    dead = spend(w, "coord_crashes")._replace(coord=None, fsync="", lost=frozenset(), noticed=frozenset(),
                                              doubt_due=False)  # fmt: skip
    yield "sidecar dies", dead
    if not isinstance(rec, CoordRecord):
        return
    if w.fsync:
        written = durable(Rules(), w, feed_it=False)
        yield (
            f"sidecar dies, {w.fsync} was durable",
            dead._replace(journal=written.journal, decided=written.decided),
        )
    elif rec.phase is CoordPhase.UNDO and w.journal.pending is not None:
        yield "sidecar dies, A was durable", dead._replace(journal=w.journal._replace(pending=None))


def restart(rules: Rules, w: World) -> World:
    """The sidecar starts: every link is a new session."""
    for r in range(len(w.ranks)):
        w = new_session(rules, w, r)
    return w._replace(coord=Recovering(answers=(None,) * len(w.ranks)), recovered=False)


def new_session(rules: Rules, w: World, r: int) -> World:
    if rules.fence:
        w = w._replace(sent=put(w.sent, r, frozenset()))
    return w._replace(replies=put(w.replies, r, None))


def decide(rules: Rules, w: World) -> World | None:
    """Let the real recovery decide; None while it waits."""
    state = w.coord
    if not isinstance(state, Recovering):
        raise TypeError("not recovering")
    key = (rules.next_decision, rules.vouch, w.journal, state, w.doubt_due, transaction.recover)
    decision = _decisions.get(key)
    if decision is None:
        decision = _decisions[key] = _ask_recovery(rules, w, state)
    match decision:
        case recovery.CommitB(n, participants):
            return _resume(rules, w, n, participants, Recovered.COMMIT_B)
        case recovery.AbortA(n, participants):
            return _resume(rules, w, n, participants, Recovered.ABORT_A)
        case recovery.Finalize(n, participants):
            return _resume(rules, w, n, participants, Recovered.RESEND_FINALIZE)
        case recovery.Adopt(_, revision, n):
            if w.journal.revision == 0 and revision == 1 and n == 0:
                return w._replace(coord="idle", doubt_due=False, recovered=True)  # first contact again: the same state
            return w._replace(journal=Journal(None, revision, max(n, w.journal.last_n)))
        case recovery.Ready() | recovery.Split():
            return w._replace(coord="idle", doubt_due=False, recovered=True)
        case recovery.Wait() | recovery.Ask():
            return None


_decisions: dict[object, recovery.Decision] = {}


def behind(rules: Rules, w: World) -> frozenset[int]:
    """Whom the real recovery brings to the desired state once all is at rest."""
    if not w.journal.revision:
        return frozenset()
    rec = recovery.Recovery(revision=w.journal.revision)
    for r, rank in enumerate(w.ranks):
        rec.tell(
            recovery.RankView(
                rank=r,
                op_n=rank.rec.n,
                op_phase=rank.rec.phase,
                op_ended=rank.rec.ended,
                revision=rank.rec.revision,
                differs=rank.installed != w.journal.revision,
            )
        )
    decision = rules.next_decision(rec, frozenset(range(len(w.ranks))), 0.0)
    return decision.converge if isinstance(decision, recovery.Ready) else frozenset()


def _ask_recovery(rules: Rules, w: World, state: Recovering) -> recovery.Decision:
    rec = recovery.Recovery(pending=w.journal.pending, revision=w.journal.revision)
    rec.lease_over = state.waited
    for r, answer in enumerate(state.answers):
        if answer is not None:
            rank, asked = answer
            vouched = 1.0 if asked or not rules.vouch else None
            rec.tell(
                recovery.RankView(
                    rank=r,
                    op_n=rank.rec.n,
                    op_phase=rank.rec.phase,
                    op_ended=rank.rec.ended,
                    revision=rank.rec.revision,
                    identity_of_state=str(rank.rec.revision),
                    vouched_until_s=vouched,
                )
            )
    now_s = 2.0 if w.doubt_due and rules.vouch else 0.0
    return rules.next_decision(rec, frozenset(range(len(w.ranks))), now_s)


def _resume(rules: Rules, w: World, n: int, participants: frozenset[int], verdict: Recovered) -> World:
    rec, actions = transaction.coord_resume(n, participants, verdict)
    return act(rules, w._replace(coord=rec, doubt_due=False), actions)
