"""The transaction: one table for a rank, one for the coordinator. Pure; both sides execute these functions.

Theory of operation
===================

An operation *n* moves all participants from state A to state B. A rank that has not heard that B was decided
is on A, or will be on A when its lease ends (presumed abort). The coordinator decides B only after every
participant said SWITCHED under n while their leases were surely alive, and only by a durable OUTCOME record.

Rules (numbers are those of the design's list; each is executed by the line that names it)

 1. Admission stays closed from FREEZE to the outcome. FINALIZE is sent only after a durable OUTCOME B.
 2. The end of a lease is UNDO(n) on that rank. After it every message of n is answered ``expired``. COMMIT needs
    FROZEN and a live lease when it runs, not when it arrives.
 3. Silence means A: a SWITCHED rank at lease end swaps back.
 4. The coordinator decides B only while its own clock says that no participant's lease can have ended.
 5. A message of another session never reaches these functions (the link drops it).
 6. n only grows. A rank refuses a PREPARE with an n that it has seen.
 9. What a builder built is handed over only if its n is still PREPARING; else it is closed by the builder.
10. COMMIT swaps one reference, UNDO swaps it back, FINALIZE retires the old set.

Duties of the coordinator's driver, on which the proof in tests/unit/transaction stands:

* it repeats the request of the phase it is in (renewing leases) until the table moves on;
* an answer counts only in the phase, and for FREEZE in the round, that asked for it (rule 5); a heartbeat counts
  always, since a connection keeps its order;
* before it feeds anything in COMMIT it looks at its clock and feeds DOUBT instead once the limit has passed (rule 4);
* it looks again right before B is written, and feeds NOT_DURABLE instead of writing: it may have been stopped between;
* it feeds LOST when a hello no longer holds n, and again on entering a phase, since BEGIN and OUTCOME do not look;
* OUTCOME A is durable before a client reads the answer, and before the next BEGIN;
* after a restart B is decided only for leases that were asked for since (``lease_over`` of ``recover``).

And of the rank's executor: BUILD is followed by exactly one BUILT or BUILD_FAILED, wanted or not; LEASE_END comes
only from a timer that is armed and over; it is looked at before any message is taken.

Executors feed *events*, apply the returned *actions* in order, and keep the returned record. A pair
(record, event) that has no row leaves the record as it is and returns no action: the reply to any message is
the rank's current record, so stale messages are harmless by construction.
"""

from enum import StrEnum

import msgspec

# Lease lengths (design.md, rule 3: in_doubt > freeze, both below the engine's watchdog of 20 s or more).
PREPARED_S = 30.0
FREEZE_S = 5.0
IN_DOUBT_S = 10.0
DECIDE_MARGIN_S = 1.0  # rule 4: decide B only until COMMIT's send time + in_doubt - margin

# ------------------------------------------------------------------ rank


class RankPhase(StrEnum):
    """Phase of a rank's current operation."""

    NONE = "none"
    PREPARING = "preparing"  # a builder runs
    PREPARED = "prepared"  # B's set is parked
    DRAINING = "draining"  # admission held, not idle yet
    FROZEN = "frozen"  # admission held, idle seen
    SWITCHED = "switched"  # B installed, A's set still open, in doubt
    QUARANTINED = "quarantined"  # swap back failed: engine restart needed


class Ended(StrEnum):
    """How operation n ended on this rank, once its phase is NONE."""

    NOT = ""
    UNDONE = "undone"  # by UNDO, or the build failed: the rank is on A
    EXPIRED = "expired"  # by lease end: the rank is on A
    FINAL = "final"  # by FINALIZE: the rank is on B


class RankRecord(msgspec.Struct, frozen=True):
    """All that a rank remembers. ``n`` is the highest operation seen, ``revision`` the one that decided its state."""

    n: int = 0
    phase: RankPhase = RankPhase.NONE
    ended: Ended = Ended.NOT
    round: int = 0  # highest freeze round entered or thawed
    hot: bool = False
    revision: int = 0
    builder_n: int = 0  # the operation whose builder still runs here, wanted or not; 0 for none


class On(StrEnum):
    """Events of a rank: messages, and what its executor found."""

    PREPARE = "prepare"
    BUILT = "built"
    BUILD_FAILED = "build_failed"
    FREEZE = "freeze"
    IDLE = "idle"  # the idle check passed on the scheduler thread
    BUSY = "busy"  # strict: the idle check failed
    THAW = "thaw"
    COMMIT = "commit"
    SWAP_FAILED = "swap_failed"  # the swap raised and left A installed
    FINALIZE = "finalize"
    UNDO = "undo"
    LEASE_END = "lease_end"
    UNDO_FAILED = "undo_failed"  # swapping back raised


class RankEvent(msgspec.Struct, frozen=True):
    """One event for operation ``n``. Flags matter to the events that name them."""

    on: On
    n: int
    round: int = 0  # FREEZE, THAW
    hot: bool = False  # PREPARE
    idle: bool = False  # COMMIT: the idle check, made in this same scheduler step
    lease_alive: bool = True  # COMMIT: this rank's own clock, in this same scheduler step


class Do(StrEnum):
    """Actions of a rank, applied in order by its executor."""

    BUILD = "build"  # start the builder of B
    CLOSE_BUILT = "close_built"  # the builder closes what it built: nobody wants it any more
    ARM_PREPARED = "arm_prepared"  # (re)start the operation's one timer with prepared_s
    ARM_FREEZE = "arm_freeze"
    ARM_IN_DOUBT = "arm_in_doubt"
    DISARM = "disarm"
    HOLD = "hold"  # close admission under the name of operation n
    OPEN = "open"  # drop operation n's hold
    SWAP = "swap"  # A -> B, one reference
    SWAP_BACK = "swap_back"  # B -> A
    DROP_NEW = "drop_new"  # stop and close B's set, off-thread
    RETIRE_OLD = "retire_old"  # stop and close A's set, off-thread
    PUBLISH = "publish"  # the engine's own config view and labels
    BYPASS = "bypass"  # quarantine: no I/O on either set


_OPEN_PHASES = (
    RankPhase.PREPARING,
    RankPhase.PREPARED,
    RankPhase.DRAINING,
    RankPhase.FROZEN,
    RankPhase.SWITCHED,
)

Step = tuple[RankRecord, tuple[Do, ...]]


def rank_step(rec: RankRecord, ev: RankEvent) -> Step:
    """The rank's table: next record and the actions to apply."""
    if ev.n < rec.n:
        # Rule 6: an older operation. Only a builder that finished late still has something to give back (rule 9).
        if ev.on in (On.BUILT, On.BUILD_FAILED) and ev.n == rec.builder_n:
            rec = msgspec.structs.replace(rec, builder_n=0)
        return rec, (Do.CLOSE_BUILT,) if ev.on is On.BUILT else ()
    if ev.n > rec.n:
        return _first_message(rec, ev)
    return _own_operation(rec, ev)


def _first_message(rec: RankRecord, ev: RankEvent) -> Step:
    """A message of an operation that this rank has not seen."""
    if rec.phase is not RankPhase.NONE:
        return rec, ()  # one at a time; the reply shows the operation that still runs here
    if ev.on is On.PREPARE:
        if rec.builder_n:
            return rec, ()  # rule 9: one builder at a time; the coordinator's repeat is taken once it has ended
        new = RankRecord(n=ev.n, phase=RankPhase.PREPARING, hot=ev.hot, revision=rec.revision, builder_n=ev.n)
        return new, (Do.BUILD, Do.ARM_PREPARED)
    if ev.on is On.UNDO:  # remembered, so that a late PREPARE(n) builds nothing
        return RankRecord(n=ev.n, ended=Ended.UNDONE, revision=rec.revision, builder_n=rec.builder_n), ()
    return rec, ()


def _own_operation(rec: RankRecord, ev: RankEvent) -> Step:
    phase = rec.phase
    if ev.on in (On.BUILT, On.BUILD_FAILED) and ev.n == rec.builder_n:
        rec = msgspec.structs.replace(rec, builder_n=0)
    match ev.on:
        case On.PREPARE if phase in (RankPhase.PREPARING, RankPhase.PREPARED):
            return rec, (Do.ARM_PREPARED,)
        case On.BUILT if phase is RankPhase.PREPARING:
            return _to(rec, RankPhase.PREPARED), ()
        case On.BUILT:
            return rec, (Do.CLOSE_BUILT,)  # rule 9
        case On.BUILD_FAILED if phase is RankPhase.PREPARING:
            return _end(rec, Ended.UNDONE), (Do.DISARM,)
        case On.FREEZE if phase is RankPhase.PREPARED and ev.round > rec.round and not rec.hot:
            return msgspec.structs.replace(rec, phase=RankPhase.DRAINING, round=ev.round), (Do.HOLD, Do.ARM_FREEZE)
        case On.FREEZE if phase in (RankPhase.DRAINING, RankPhase.FROZEN) and ev.round == rec.round:
            return rec, (Do.ARM_FREEZE,)
        case On.FREEZE if phase in (RankPhase.DRAINING, RankPhase.FROZEN) and ev.round > rec.round:
            # The thaw between the rounds was lost: held already, but this round's idle check is still to be made.
            return msgspec.structs.replace(rec, phase=RankPhase.DRAINING, round=ev.round), (Do.ARM_FREEZE,)
        case On.IDLE if phase is RankPhase.DRAINING:
            return _to(rec, RankPhase.FROZEN), ()
        case On.BUSY if phase is RankPhase.DRAINING:
            return _to(rec, RankPhase.PREPARED), (Do.OPEN, Do.ARM_PREPARED)
        case On.THAW if phase in (RankPhase.DRAINING, RankPhase.FROZEN) and ev.round >= rec.round:
            thawed = msgspec.structs.replace(rec, phase=RankPhase.PREPARED, round=ev.round)
            return thawed, (Do.OPEN, Do.ARM_PREPARED)
        case On.THAW if phase is RankPhase.PREPARED and ev.round >= rec.round:
            return msgspec.structs.replace(rec, round=ev.round), (Do.ARM_PREPARED,)
        case On.COMMIT if phase is RankPhase.FROZEN or (phase is RankPhase.PREPARED and rec.hot):
            if not ev.lease_alive:
                return _undo(rec, Ended.EXPIRED)  # rule 2: looked at when it runs
            if not ev.idle and not rec.hot:
                return rec, ()
            return _to(rec, RankPhase.SWITCHED), (Do.SWAP, Do.ARM_IN_DOUBT)
        case On.SWAP_FAILED if phase is RankPhase.SWITCHED:
            return _to(rec, RankPhase.PREPARED if rec.hot else RankPhase.FROZEN), ()
        case On.FINALIZE if phase is RankPhase.SWITCHED:
            final = msgspec.structs.replace(rec, phase=RankPhase.NONE, ended=Ended.FINAL, revision=rec.n)
            opening = () if rec.hot else (Do.OPEN,)
            return final, (Do.DISARM, *opening, Do.PUBLISH, Do.RETIRE_OLD)
        case On.UNDO if phase in _OPEN_PHASES:
            return _undo(rec, Ended.UNDONE)
        case On.LEASE_END if phase in _OPEN_PHASES:
            return _undo(rec, Ended.EXPIRED)  # rules 2 and 3
        case On.UNDO_FAILED if phase is RankPhase.NONE and rec.ended in (Ended.UNDONE, Ended.EXPIRED):
            # The executor drops what is left of UNDO's actions and applies these: thaw anyway, close neither set.
            return _to(rec, RankPhase.QUARANTINED), (Do.BYPASS,) if rec.hot else (Do.BYPASS, Do.OPEN)
        case _:
            return rec, ()


def _to(rec: RankRecord, phase: RankPhase) -> RankRecord:
    return msgspec.structs.replace(rec, phase=phase)


def _end(rec: RankRecord, ended: Ended) -> RankRecord:
    return msgspec.structs.replace(rec, phase=RankPhase.NONE, ended=ended)


def _undo(rec: RankRecord, ended: Ended) -> Step:
    """The one code for abort, roll-back, cancel and lease end. Swap back before opening: no request may see B."""
    actions: list[Do] = [Do.DISARM]
    if rec.phase is RankPhase.SWITCHED:
        actions.append(Do.SWAP_BACK)
    if rec.phase in (RankPhase.DRAINING, RankPhase.FROZEN) or (rec.phase is RankPhase.SWITCHED and not rec.hot):
        actions.append(Do.OPEN)  # exactly the phases that hold admission
    if rec.phase is not RankPhase.PREPARING:  # a running builder closes its own work (rule 9)
        actions.append(Do.DROP_NEW)
    return _end(rec, ended), tuple(actions)


class Said(StrEnum):
    """A rank's record read for one operation n: what the coordinator's table works with."""

    UNKNOWN = "unknown"  # has not seen n
    PREPARING = "preparing"
    PREPARED = "prepared"
    DRAINING = "draining"
    FROZEN = "frozen"
    SWITCHED = "switched"
    QUARANTINED = "quarantined"
    UNDONE = "undone"
    EXPIRED = "expired"
    FINAL = "final"


def said(op_n: int, op_phase: str, op_ended: str, n: int, revision: int = -1) -> Said:
    """What a report with ``(op_n, op_phase, op_ended)`` means for operation ``n``."""
    if op_phase == RankPhase.QUARANTINED:
        return Said.QUARANTINED
    if op_n < n:
        return Said.UNKNOWN
    if op_n > n:
        return Said.FINAL if revision == n else Said.EXPIRED
    if op_phase != RankPhase.NONE:
        return Said(op_phase)
    return Said(op_ended) if op_ended else Said.UNKNOWN


# ------------------------------------------------------------------ coordinator


class CoordPhase(StrEnum):
    """Where the coordinator stands in one operation. VALIDATE comes before: nothing happened yet."""

    BEGIN = "begin"  # BEGIN is being made durable
    PREPARE = "prepare"
    WAIT = "wait"  # strict with time to wait: all prepared, admission open, waiting for an idle moment
    FREEZE = "freeze"
    COMMIT = "commit"
    OUTCOME = "outcome"  # OUTCOME B is being made durable
    FINALIZE = "finalize"
    CONVERGING = "converging"  # B is decided; a participant answered ``expired`` or left: drift, brought to B later
    UNDO = "undo"
    DONE = "done"


class CoordRecord(msgspec.Struct, frozen=True):
    """The coordinator's whole memory of one operation.

    ``have`` are the participants that have reached what the phase waits for; ``outcome`` is "", "a" or "b".
    """

    n: int
    participants: frozenset[int]
    phase: CoordPhase = CoordPhase.BEGIN
    have: frozenset[int] = frozenset()
    round: int = 0
    drain: bool = False
    hot: bool = False
    wait: bool = False  # strict with time left: a busy rank leads to WAIT, not to UNDO
    outcome: str = ""
    reason: str = ""  # why UNDO: the first cause
    touched: frozenset[int] = frozenset()  # participants that may hold something of n
    finished: bool = False  # FINISH was given; nothing more comes of this record


class See(StrEnum):
    """Events of the coordinator."""

    DURABLE = "durable"  # the record asked for by FSYNC_* is on disk
    NOT_DURABLE = "not_durable"  # BEGIN could not be written, or B was not for want of time: nothing of it is on disk
    SAID = "said"  # a participant's answer
    FAILED = "failed"  # a participant answered with an error: build, canary, swap
    LOST = "lost"  # a participant died, or is another incarnation now (rule 13)
    BUSY = "busy"  # a participant is not idle (strict)
    IDLE = "idle"  # WAIT: an idle moment was seen
    TIMEOUT = "timeout"  # the operation's deadline, or the wait's
    CANCEL = "cancel"
    DOUBT = "doubt"  # rule 4: our clock cannot vouch for the leases any more
    LEASES_OVER = "leases_over"  # UNDO, FINALIZE: our clock says that every lease of n has ended, silent ranks' too


class CoordEvent(msgspec.Struct, frozen=True):
    """One event; ``rank`` and ``said`` for the per-rank ones."""

    see: See
    rank: int = -1
    said: Said = Said.UNKNOWN
    detail: str = ""


class Act(StrEnum):
    """Actions of the coordinator; sends go to every participant that the driver can reach."""

    FSYNC_BEGIN = "fsync_begin"
    SEND_PREPARE = "send_prepare"
    WATCH_IDLE = "watch_idle"
    SEND_THAW = "send_thaw"
    SEND_FREEZE = "send_freeze"
    SEND_COMMIT = "send_commit"
    FSYNC_OUTCOME_B = "fsync_outcome_b"
    SEND_FINALIZE = "send_finalize"
    RECORD_OUTCOME_A = "record_outcome_a"  # need not be waited for: no record means A
    SEND_UNDO = "send_undo"
    FINISH = "finish"


CoordStep = tuple[CoordRecord, tuple[Act, ...]]

_BEFORE_OUTCOME = (CoordPhase.PREPARE, CoordPhase.WAIT, CoordPhase.FREEZE, CoordPhase.COMMIT)


def coord_start(
    n: int, participants: frozenset[int], *, drain: bool = False, hot: bool = False, wait: bool = False
) -> CoordStep:
    """Begin operation ``n``: the record must be durable before anything is sent."""
    return CoordRecord(n=n, participants=participants, drain=drain, hot=hot, wait=wait), (Act.FSYNC_BEGIN,)


def coord_step(rec: CoordRecord, ev: CoordEvent) -> CoordStep:
    """The coordinator's table: next record and the actions to take."""
    if rec.finished or (ev.rank >= 0 and ev.rank not in rec.participants):
        return rec, ()
    if ev.see in (See.CANCEL, See.TIMEOUT, See.DOUBT, See.FAILED, See.LOST) and rec.phase in _BEFORE_OUTCOME:
        return _abort(rec, ev)
    match rec.phase:
        case CoordPhase.BEGIN:
            return _in_begin(rec, ev)
        case CoordPhase.PREPARE:
            return _gather(rec, ev, Said.PREPARED)
        case CoordPhase.WAIT:
            return _freeze(rec) if ev.see is See.IDLE else _ended_early(rec, ev) or (rec, ())
        case CoordPhase.FREEZE:
            return _in_freeze(rec, ev)
        case CoordPhase.COMMIT:
            return _gather(rec, ev, Said.SWITCHED)
        case CoordPhase.OUTCOME if ev.see is See.DURABLE:
            return _move(rec, CoordPhase.FINALIZE, outcome="b"), (Act.SEND_FINALIZE,)
        case CoordPhase.OUTCOME if ev.see is See.NOT_DURABLE:
            return _abort(rec, ev)  # rule 4: too late when it was to be written
        case CoordPhase.FINALIZE | CoordPhase.CONVERGING:
            return _in_finalize(rec, ev)
        case CoordPhase.UNDO:
            return _in_undo(rec, ev)
        case _:
            return rec, ()


def _move(rec: CoordRecord, phase: CoordPhase, **changes: object) -> CoordRecord:
    return msgspec.structs.replace(rec, phase=phase, have=frozenset(), **changes)


def _abort(rec: CoordRecord, ev: CoordEvent) -> CoordStep:
    lost = frozenset({ev.rank}) if ev.see is See.LOST else frozenset()
    reason = ev.detail or ev.see.value
    # A lost participant cannot answer UNDO; its own lease, or its death, brings it to A (rule 3).
    return _undo_or_done(
        msgspec.structs.replace(_move(rec, CoordPhase.UNDO, reason=reason, outcome="a"), have=lost),
        (Act.RECORD_OUTCOME_A, Act.SEND_UNDO),
    )


def _undo_or_done(rec: CoordRecord, actions: tuple[Act, ...]) -> CoordStep:
    if rec.have >= rec.participants:
        return msgspec.structs.replace(rec, phase=CoordPhase.DONE, finished=True), (*actions, Act.FINISH)
    return rec, actions


def _in_begin(rec: CoordRecord, ev: CoordEvent) -> CoordStep:
    if ev.see is See.DURABLE:
        return _move(rec, CoordPhase.PREPARE), (Act.SEND_PREPARE,)
    if ev.see in (See.NOT_DURABLE, See.CANCEL, See.TIMEOUT):
        return _move(rec, CoordPhase.DONE, outcome="a", finished=True, reason=ev.detail or ev.see), (Act.FINISH,)
    return rec, ()


def _ended_early(rec: CoordRecord, ev: CoordEvent) -> CoordStep | None:
    """Before the outcome, a participant on which n has ended is a no, whatever the phase waits for."""
    if ev.see is not See.SAID or ev.said not in (Said.EXPIRED, Said.UNDONE, Said.QUARANTINED, Said.FINAL):
        return None
    detail = ev.detail or f"rank {ev.rank}: {ev.said}"
    return _abort(rec, msgspec.structs.replace(ev, see=See.FAILED, detail=detail))


def _gather(rec: CoordRecord, ev: CoordEvent, wanted: Said) -> CoordStep:
    """PREPARE and COMMIT: every participant must say ``wanted``; one that has ended n instead is a no."""
    if over := _ended_early(rec, ev):
        return over
    if ev.see is not See.SAID or ev.said is not wanted:
        return rec, ()
    have = rec.have | {ev.rank}
    if have < rec.participants:
        return msgspec.structs.replace(rec, have=have), ()
    if wanted is Said.SWITCHED:
        return _move(rec, CoordPhase.OUTCOME), (Act.FSYNC_OUTCOME_B,)
    if rec.hot:
        return _move(rec, CoordPhase.COMMIT), (Act.SEND_COMMIT,)
    return _freeze(rec)


def _freeze(rec: CoordRecord) -> CoordStep:
    return _move(rec, CoordPhase.FREEZE, round=rec.round + 1), (Act.SEND_FREEZE,)


def _in_freeze(rec: CoordRecord, ev: CoordEvent) -> CoordStep:
    if ev.see is See.BUSY and not rec.drain:
        if rec.wait:
            return _move(rec, CoordPhase.WAIT), (Act.SEND_THAW, Act.WATCH_IDLE)
        return _abort(rec, ev)
    if over := _ended_early(rec, ev):
        return over
    if ev.see is See.SAID and ev.said is Said.UNKNOWN:  # it was PREPARED before: another incarnation (rule 13)
        return _abort(rec, msgspec.structs.replace(ev, see=See.LOST, detail=f"rank {ev.rank} does not know n any more"))
    if ev.see is not See.SAID or ev.said is not Said.FROZEN:
        return rec, ()
    have = rec.have | {ev.rank}
    if have < rec.participants:
        return msgspec.structs.replace(rec, have=have), ()
    return _move(rec, CoordPhase.COMMIT), (Act.SEND_COMMIT,)


def _in_finalize(rec: CoordRecord, ev: CoordEvent) -> CoordStep:
    """B is durable. A participant that expired or left is drift, not a roll-back (rule 3's window)."""
    if ev.see is See.LEASES_OVER:
        return msgspec.structs.replace(rec, phase=CoordPhase.CONVERGING, finished=True), (Act.FINISH,)
    if ev.see is See.SAID and ev.said is Said.FINAL:
        pass
    elif ev.see is See.LOST or (
        ev.see is See.SAID and ev.said in (Said.EXPIRED, Said.UNDONE, Said.UNKNOWN, Said.QUARANTINED)
    ):
        rec = msgspec.structs.replace(rec, phase=CoordPhase.CONVERGING)
    else:
        return rec, ()
    rec = msgspec.structs.replace(rec, have=rec.have | {ev.rank})
    if rec.have < rec.participants:
        return rec, ()
    rec = msgspec.structs.replace(rec, finished=True)
    if rec.phase is CoordPhase.CONVERGING:
        return rec, (Act.FINISH,)  # the driver reports ``converging`` and starts convergence
    return msgspec.structs.replace(rec, phase=CoordPhase.DONE), (Act.FINISH,)


def _in_undo(rec: CoordRecord, ev: CoordEvent) -> CoordStep:
    """UNDO is repeated by the driver until every participant is known to be on A, or past its lease."""
    if ev.see is See.LEASES_OVER:  # rule 3: the silent ones are on A by themselves, or not serving at all
        return msgspec.structs.replace(rec, phase=CoordPhase.DONE, finished=True), (Act.FINISH,)
    gone = ev.see is See.LOST
    settled = ev.see is See.SAID and ev.said in (Said.UNDONE, Said.EXPIRED, Said.UNKNOWN, Said.QUARANTINED)
    if not (gone or settled):
        return rec, ()
    return _undo_or_done(msgspec.structs.replace(rec, have=rec.have | {ev.rank}), ())


# ------------------------------------------------------------------ recovery


class Recovered(StrEnum):
    """What recovery decides about an operation found in the journal."""

    WAIT = "wait"  # BEGIN without outcome, a participant is still silent and its lease may live
    COMMIT_B = "commit_b"  # every participant says SWITCHED under n: record B, finalise
    ABORT_A = "abort_a"
    RESEND_FINALIZE = "resend_finalize"  # OUTCOME B is on disk


def recover(participants: frozenset[int], answers: dict[int, Said], outcome: str, lease_over: bool) -> Recovered:
    """Rule 1 after a restart: ``answers`` are the ranks' hellos read for n, ``outcome`` is what the journal says."""
    if outcome == "b":
        return Recovered.RESEND_FINALIZE
    if outcome == "a":
        return Recovered.ABORT_A
    if any(answers.get(rank) is Said.FINAL for rank in participants):
        return Recovered.COMMIT_B  # only OUTCOME B leads there: the journal lost its record (damage, --recover)
    if any(answers.get(rank) not in (None, Said.SWITCHED) for rank in participants):
        return Recovered.ABORT_A
    if all(answers.get(rank) is Said.SWITCHED for rank in participants):
        return Recovered.ABORT_A if lease_over else Recovered.COMMIT_B
    return Recovered.ABORT_A if lease_over else Recovered.WAIT


def coord_resume(n: int, participants: frozenset[int], verdict: Recovered) -> CoordStep:
    """The coordinator's record after a restart, standing where ``verdict`` puts it, and the actions that go on.

    Raises:
        ValueError: ``WAIT`` is no verdict to resume with.
    """
    rec = CoordRecord(n=n, participants=participants)
    match verdict:
        case Recovered.COMMIT_B:
            return _move(rec, CoordPhase.OUTCOME), (Act.FSYNC_OUTCOME_B,)
        case Recovered.RESEND_FINALIZE:
            return _move(rec, CoordPhase.FINALIZE, outcome="b"), (Act.SEND_FINALIZE,)
        case Recovered.ABORT_A:
            moved = _move(rec, CoordPhase.UNDO, outcome="a", reason="recovery")
            return _undo_or_done(moved, (Act.RECORD_OUTCOME_A, Act.SEND_UNDO))
        case Recovered.WAIT:
            raise ValueError("recovery has not decided yet")
