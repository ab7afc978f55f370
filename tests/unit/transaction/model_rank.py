"""A model rank: the real table, and the things that its actions move: sets, holds, one timer, builders.

``apply`` is the executor. It raises ``Bad`` the moment an action makes no sense (a set closed twice, a hold opened
that is not held, a second builder); ``check`` looks at what must hold between events.
"""

from collections.abc import Callable
from typing import NamedTuple

from hicache_proto import transaction
from hicache_proto.transaction import Do, Ended, On, RankEvent, RankPhase, RankRecord, Said

FIRST = 0  # the set that every rank runs at the start
BOOT = -1  # what a freshly started process runs
NO_TIMER, PREPARED_TIMER, FREEZE_TIMER, DOUBT_TIMER = range(4)
OPEN = (RankPhase.PREPARING, RankPhase.PREPARED, RankPhase.DRAINING, RankPhase.FROZEN, RankPhase.SWITCHED)

RankStep = Callable[[RankRecord, RankEvent], transaction.Step]


class Bad(Exception):
    """An invariant is broken."""


class Rank(NamedTuple):
    """One rank. Sets are named by the operation that built them; None = no set in that place."""

    rec: RankRecord = RankRecord()
    installed: int = FIRST
    old: int | None = None  # A's set while B is in doubt
    parked: int | None = None  # B's set before COMMIT
    builders: tuple[int, ...] = ()
    timer: int = NO_TIMER
    held: tuple[int, ...] = ()
    made: frozenset[int] = frozenset()
    closed: frozenset[int] = frozenset()
    built: tuple[int, ...] = ()  # operations for which BUILD ran
    swapped: tuple[int, ...] = ()  # operations for which SWAP succeeded


def fresh() -> Rank:
    """A restarted process: it knows nothing, and runs what the engine boots with."""
    return Rank(installed=BOOT)


def says(rank: Rank, n: int) -> Said:
    """What the rank's report means for operation n."""
    rec = rank.rec
    return transaction.said(rec.n, rec.phase, rec.ended, n, rec.revision)


def is_open(rank: Rank, n: int) -> bool:
    return rank.rec.n == n and rank.rec.phase in OPEN


def apply(step: RankStep, rank: Rank, ev: RankEvent, *, swap_fails: bool = False, undo_fails: bool = False) -> Rank:
    """Feed ``ev`` and apply the actions in order; ``*_fails`` makes that action raise.

    A rank alone has few states and is in one of them in thousands of worlds, so what was computed is kept.
    """
    key = (step, rank, ev, swap_fails, undo_fails)
    after = _applied.get(key)
    if after is None:
        after = _applied[key] = _apply(step, rank, ev, swap_fails, undo_fails)
    return after


_applied: dict[object, Rank] = {}


def _apply(step: RankStep, rank: Rank, ev: RankEvent, swap_fails: bool, undo_fails: bool) -> Rank:
    rec, actions = step(rank.rec, ev)
    rank = rank._replace(rec=rec)
    if ev.on in (On.BUILT, On.BUILD_FAILED):
        rank = rank._replace(builders=tuple(n for n in rank.builders if n != ev.n))
        if ev.on is On.BUILT:
            rank = rank._replace(made=rank.made | {ev.n})
            if Do.CLOSE_BUILT not in actions:
                _want(rank.parked is None, "two parked sets")
                rank = rank._replace(parked=ev.n)
    for action in actions:
        if action is Do.SWAP and swap_fails:
            return apply(step, rank, RankEvent(On.SWAP_FAILED, ev.n))
        if action is Do.SWAP_BACK and undo_fails:
            return apply(step, rank, RankEvent(On.UNDO_FAILED, ev.n))
        rank = _do(rank, action, ev.n)
    check(rank)
    return rank


def _want(fact: bool, otherwise: str) -> None:
    if not fact:
        raise Bad(otherwise)


def _close(rank: Rank, name: int | None) -> Rank:
    if name is None:
        raise Bad("a set that is not there was closed")
    _want(name not in rank.closed, f"set {name} was closed twice")
    _want(name != rank.installed, f"the installed set {name} was closed")
    return rank._replace(closed=rank.closed | {name})


def _do(rank: Rank, action: Do, n: int) -> Rank:
    match action:
        case Do.BUILD:
            _want(not rank.builders, "a second builder was started")
            _want(n not in rank.built, f"operation {n} was built twice")
            return rank._replace(builders=(*rank.builders, n), built=(*rank.built, n))
        case Do.CLOSE_BUILT:
            return _close(rank, n)
        case Do.ARM_PREPARED:
            return rank._replace(timer=PREPARED_TIMER)
        case Do.ARM_FREEZE:
            return rank._replace(timer=FREEZE_TIMER)
        case Do.ARM_IN_DOUBT:
            return rank._replace(timer=DOUBT_TIMER)
        case Do.DISARM:
            return rank._replace(timer=NO_TIMER)
        case Do.HOLD:
            _want(n not in rank.held, "held twice")
            return rank._replace(held=(*rank.held, n))
        case Do.OPEN:
            _want(n in rank.held, "a hold was opened that was not held")
            return rank._replace(held=tuple(h for h in rank.held if h != n))
        case Do.SWAP:
            _want(rank.parked == n, "swapped to a set that is not parked")
            _want(n not in rank.swapped, f"operation {n} was switched twice")
            return rank._replace(old=rank.installed, installed=n, parked=None, swapped=(*rank.swapped, n))
        case Do.SWAP_BACK:
            if rank.old is None:
                raise Bad("swapped back to a set that is not there")
            return rank._replace(parked=rank.installed, installed=rank.old, old=None)
        case Do.DROP_NEW:
            return _close(rank, rank.parked)._replace(parked=None)
        case Do.RETIRE_OLD:
            return _close(rank, rank.old)._replace(old=None)
        case Do.PUBLISH | Do.BYPASS:
            return rank


def check(rank: Rank) -> None:
    """What must hold between events. Raises Bad."""
    rec, phase = rank.rec, rank.rec.phase
    if phase is RankPhase.QUARANTINED:
        _want(not rank.held, "a quarantined rank keeps admission closed")
        return
    if phase in OPEN:
        _want(rank.timer != NO_TIMER, f"{phase}: no lease will end it")
    else:
        _want(not rank.held, "admission is held and no operation owns it")
        _want(rank.parked is None, "a prepared set has no owner")
        _want(rank.timer == NO_TIMER, "a timer runs for nothing")
    held = phase in (RankPhase.DRAINING, RankPhase.FROZEN) or (phase is RankPhase.SWITCHED and not rec.hot)
    _want(rank.held == ((rec.n,) if held else ()), f"{phase}: held by {rank.held}")
    _want((rank.old is not None) == (phase is RankPhase.SWITCHED), f"{phase}: old set is {rank.old}")
    want_parked = phase in (RankPhase.PREPARED, RankPhase.DRAINING, RankPhase.FROZEN)
    _want((rank.parked is not None) == want_parked, f"{phase}: parked set is {rank.parked}")
    if phase is RankPhase.NONE and rec.ended is not Ended.NOT:
        _want((rank.installed == rec.n) == (rec.ended is Ended.FINAL), f"{rec.ended} on set {rank.installed}")
    leaked = rank.made - rank.closed - {rank.installed, rank.old, rank.parked}
    _want(not leaked, f"sets {set(leaked)} are open and nobody's")
