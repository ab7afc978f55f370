"""Why an operation did not reach B: from the table's event to the error that the client reads. Pure."""

from collections.abc import Mapping
from types import MappingProxyType

from hicache_proto.errors import (
    DeadlineExceeded,
    HicacheError,
    Inconsistent,
    NotIdle,
    PrepareFailed,
    RolledBack,
    UnsupportedByEngine,
)
from hicache_proto.model import QUEUE_COUNTERS, RUNNING_COUNTERS, Blocker
from hicache_proto.transaction import CoordEvent, CoordPhase, See
from hicache_sidecar.engine import idle
from hicache_sidecar.engine.idle import RETRY_AFTER_S, rows
from hicache_sidecar.engine.operation import CANCELLED, STOPPING


def busy(verb: str, blockers: list[Blocker], why: str = "") -> NotIdle:
    """The spec's refusal from a list of blockers."""
    queued = sum(b.count for b in blockers if b.name in QUEUE_COUNTERS)
    running = sum(b.count for b in blockers if b.name in RUNNING_COUNTERS)
    names = ", ".join(f"{b.name}={b.count} (rank {b.rank})" for b in blockers)
    message = f"Reject {verb}: scheduler is not idle. #queue-req={queued} #running-req={running}"
    return NotIdle(
        message + (f"; blocked by {names}" if names else "") + (f"; {why}" if why else ""),
        details={"blocked_by": rows(blockers), "retry_after_s": RETRY_AFTER_S},
    )


def cause_of(
    phase: CoordPhase,
    event: CoordEvent,
    error: HicacheError | None,
    silent: list[int],
    blockers: list[Blocker],
    *,
    verb: str,
    drain: bool,
    checkpoint: bool = False,
    told: Mapping[int, str] = MappingProxyType({}),
    stalled: Mapping[int, str] = MappingProxyType({}),
) -> HicacheError:
    """The error for the event that ended ``phase``; ``silent`` are the participants that the phase still missed,
    ``told`` what one of them last said against it, and ``stalled`` how far those were last seen whose world waits."""
    details: dict[str, object] = {"phase": phase.value}
    if error is not None:
        details |= error.details
        details.setdefault("reason", error.code)
        if event.rank >= 0:
            details["rank"] = event.rank
    if event.see is See.CANCEL:
        return cancelled(event.detail, "every rank is on the old state", details)
    if event.see is See.BUSY:
        return busy(verb, blockers)
    if event.see is See.TIMEOUT and checkpoint and silent and phase in (CoordPhase.PREPARE, CoordPhase.FREEZE):
        return DeadlineExceeded(
            f"{verb}: the checkpoint was not written when time was up; nothing was cleared",
            details=details | {"silent_ranks": silent, "reason": "checkpoint_late"},
        )
    if event.see is See.DOUBT and silent:
        return _stalled(event, silent, details, stalled)
    if event.see is See.TIMEOUT:
        return _late(phase, event, silent, blockers, details, verb=verb, drain=drain, told=told)
    if phase is CoordPhase.PREPARE:
        return PrepareFailed(event.detail or "a rank could not prepare", details=details)
    if phase is CoordPhase.FREEZE and isinstance(error, UnsupportedByEngine | PrepareFailed):
        # Nothing was switched: a refusal by name (a paused engine, counters that cannot be read, a checkpoint that the
        # store did not take), no roll-back.
        return type(error)(event.detail or error.message, details=details, hint=error.hint)
    return RolledBack(event.detail or "a rank did not switch", details=details)


def _late(
    phase: CoordPhase,
    event: CoordEvent,
    silent: list[int],
    blockers: list[Blocker],
    details: dict[str, object],
    *,
    verb: str,
    drain: bool,
    told: Mapping[int, str],
) -> HicacheError:
    if phase is CoordPhase.WAIT and not drain:
        return busy(verb, blockers, "the wait for idle ran out")
    if phase is CoordPhase.FREEZE and blockers:
        names = ", ".join(f"{b.name}={b.count} (rank {b.rank})" for b in blockers)
        progress, stalled = idle.progress(blockers)
        return DeadlineExceeded(
            f"{verb}: still draining when {event.detail or 'time was up'}; blocked by {names}{stalled}",
            details=details | {"blocked_by": rows(blockers), "reason": "still_draining", "progress": progress},
        )
    joined = "; ".join(f"rank {rank}: {told.get(rank, 'no reply')}" for rank in silent)
    if phase is CoordPhase.PREPARE:
        details |= {"reason": "prepare_late"}
    return DeadlineExceeded(
        f"{verb}: time ran out in {phase.value}" + (f"; {joined}" if joined else ""),
        details=details | {"silent_ranks": silent},
        hint="the store's set-up has not come back on these ranks; no other can begin there before it does"
        if phase is CoordPhase.PREPARE
        else None,
    )


def _stalled(event: CoordEvent, silent: list[int], details: dict[str, object], seen: Mapping[int, str]) -> HicacheError:
    """Ranks that were ready and did not switch. In a world of several ranks the others wait for them inside the swap's
    agreement, with their scheduler threads (F114): then it is ``collective_stall``, and how far each was is said."""
    joined = "; ".join(f"rank {rank}: no reply" + (f" ({seen[rank]})" if rank in seen else "") for rank in silent)
    reason = "collective_stall" if seen else "no_reply"
    return RolledBack(f"{event.detail}; {joined}", details=details | {"reason": reason, "silent_ranks": silent})


def cancelled(why: str, what: str, details: dict[str, object] | None = None) -> RolledBack:
    """The end of an operation that somebody (``why``) did not let go on."""
    reason = "stopping" if why == STOPPING else "cancelled"
    return RolledBack(f"{why or CANCELLED}: {what}", details={**(details or {}), "reason": reason})


def not_restored(cause: HicacheError, split: dict[int, str]) -> HicacheError:
    """Some rank could not be brought back: never called rolled back (F30)."""
    what = "; ".join(f"rank {rank}: {why}" for rank, why in sorted(split.items()))
    return Inconsistent(
        f"{cause.message}; and not every rank is on the old state: {what}",
        details=cause.details | {"reason": "split", "rolled_back": False, "cause": cause.code},
        hint="the ranks named are in bypass; restart their engine",
    )
