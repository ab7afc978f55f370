"""What a waiting call is answered: a pure function of the rank's record and a few facts.

``None`` = not settled, wait; ``True`` = the rank is where the call wants it; an error says why it is not. The
docstring of ``hicache_proto.hooklink`` is the contract; each line there is a branch here.
"""

from typing import Literal

import msgspec

from hicache_hooks.sets import Sets
from hicache_proto.errors import (
    DeadlineExceeded,
    HicacheError,
    Internal,
    OperationInProgress,
    PrepareFailed,
    Quarantined,
)
from hicache_proto.hooklink import Call, Freeze, Thaw
from hicache_proto.transaction import Ended, RankPhase, RankRecord

Verdict = Literal[True] | HicacheError | None


class View(msgspec.Struct, frozen=True):
    """What other threads may know; replaced as a whole."""

    record: RankRecord = RankRecord()
    lease_deadline: float | None = None  # this process's clock
    quarantine: str = ""
    notes: dict[str, str] = {}


class Facts:
    """What the table does not remember about the present operation. Written by the scheduler thread."""

    __slots__ = ("build_error", "commit_error", "ran", "refusal")

    def __init__(self) -> None:
        self.build_error: dict[int, HicacheError] = {}
        self.commit_error: HicacheError | None = None
        self.ran: dict[str, tuple[int, int]] = {}  # last world command by kind: (n, round)
        self.refusal: HicacheError | None = None  # of the last idle test in FREEZE


def verdict(call: Call, rec: RankRecord, facts: Facts, sets: Sets) -> Verdict:
    """Read the answer to ``call`` off the present state."""
    if rec.phase is RankPhase.QUARANTINED:
        return Quarantined(
            sets.undo_error or "quarantined", details={"reason": "undo_failed"}, hint="restart the engine"
        )
    if call.n != rec.n:
        return _other_operation(call, rec)
    if rec.phase is RankPhase.NONE:
        return _ended(call, rec, facts, sets)
    match call.phase:
        case "prepare":
            return None if rec.phase is RankPhase.PREPARING else True
        case "freeze":
            return _freeze(call, rec, facts)
        case "thaw":
            if not _ran(call, facts):
                return None
            return True if rec.phase is RankPhase.PREPARED else _wrong(call, rec, "not_thawed")
        case "commit":
            if rec.phase is RankPhase.SWITCHED:
                return True
            return (facts.commit_error or _wrong(call, rec, "not_frozen")) if _ran(call, facts) else None
        case "finalize":
            return _wrong(call, rec, "not_switched") if _ran(call, facts) else None
        case _:
            return None  # undo: the broadcast has not come round yet


def _other_operation(call: Call, rec: RankRecord) -> Verdict:
    if call.phase == "undo":
        # Rule 6: nothing of another operation is left here, or ever will be, unless it is open right now.
        return True
    if call.n < rec.n:
        if call.phase == "finalize" and rec.revision == call.n:
            return True
        return Internal(f"operation {call.n} is over: this rank has seen {rec.n}", details={"reason": "stale"})
    if rec.phase is not RankPhase.NONE:
        return OperationInProgress(f"operation {rec.n} is open on this rank", details={"n": rec.n, "phase": rec.phase})
    return Internal(f"operation {call.n} was never prepared here", details={"reason": "unknown_operation"})


def _ended(call: Call, rec: RankRecord, facts: Facts, sets: Sets) -> Verdict:
    if call.phase == "undo":
        return _wrong(call, rec, "final") if rec.ended is Ended.FINAL else True
    match rec.ended:
        case Ended.FINAL:
            return _final(sets) if call.phase == "finalize" else True
        case Ended.EXPIRED:
            return DeadlineExceeded(f"operation {rec.n} ended here by its lease", details={"reason": "expired"})
        case _:
            built = facts.build_error.get(rec.n)
            if built is not None:
                return built
            if facts.commit_error is not None and call.phase == "commit":
                return facts.commit_error
            return PrepareFailed(f"operation {rec.n} was undone", details={"reason": "undone"})


def _final(sets: Sets) -> Verdict:
    if sets.retiring:
        return None
    if sets.publish_error:
        return Internal(
            f"the engine's own view was not updated: {sets.publish_error}", details={"reason": "publish_failed"}
        )
    if sets.retire_stuck:
        return Quarantined(
            f"threads_stuck: {', '.join(sets.retire_stuck)}; the old backend stays open",
            details={"reason": "threads_stuck", "threads": list(sets.retire_stuck)},
            hint="closing is tried again; restart the engine if it does not end",
        )
    return True


def _freeze(call: Call, rec: RankRecord, facts: Facts) -> Verdict:
    wanted = call.body.round if isinstance(call.body, Freeze) else 0
    if rec.round == wanted and rec.phase in (RankPhase.FROZEN, RankPhase.SWITCHED):
        return True
    if not _ran(call, facts) or (rec.round == wanted and rec.phase is RankPhase.DRAINING):
        return None
    if rec.phase is RankPhase.PREPARED and facts.refusal is not None and rec.round == wanted:
        return facts.refusal
    return _wrong(call, rec, "thawed" if rec.round >= wanted else "not_prepared")


def _ran(call: Call, facts: Facts) -> bool:
    wanted = call.body.round if isinstance(call.body, Freeze | Thaw) else 0
    return facts.ran.get(call.phase, (0, 0)) >= (call.n, wanted)


def _wrong(call: Call, rec: RankRecord, reason: str) -> Internal:
    return Internal(
        f"operation {rec.n}: {call.phase} does not fit {rec.phase}{rec.ended and ' ' + rec.ended}",
        details={"reason": reason, "phase": rec.phase},
    )
