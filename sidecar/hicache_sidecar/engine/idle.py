"""The idle question, as the sidecar sees it: any non-zero counter blocks, known or not (failures.md F1 to F3).

Only the hook decides that its rank is idle, on the scheduler thread; this module reads reports to refuse early and
to tell people why. Pure.
"""

from collections.abc import Mapping

from hicache_proto.errors import Inconsistent, NotIdle
from hicache_proto.model import MANDATORY_COUNTERS, QUEUE_COUNTERS, RUNNING_COUNTERS, Blocker, IdleReport

STALLED_S = 3.0  # a transfer of which nothing ended for so long: the slowest honest one takes milliseconds a page
RETRY_AFTER_S = 1  # what a client is told to wait before it asks again (F6)


def missing_counters(report: IdleReport) -> list[str]:
    """Mandatory counters that the report lacks."""
    return [name for name in MANDATORY_COUNTERS if name not in report.counters]


def is_idle(report: IdleReport) -> bool:
    """True when the report is complete and every counter is zero."""
    return not missing_counters(report) and not any(report.counters.values())


def may_stall(blocker: Blocker) -> bool:
    """A transfer or queue, of which something should end all the time; a request may generate for minutes (F4)."""
    return blocker.name.startswith(("ongoing_", "storage_"))


def stalled(blocker: Blocker) -> bool:
    """Nothing of it ends."""
    return may_stall(blocker) and (blocker.still_s or 0.0) >= STALLED_S


def rows(found: list[Blocker]) -> list[dict[str, object]]:
    """``details.blocked_by``."""
    return [
        {
            name: value
            for name, value in (
                ("rank", b.rank),
                ("name", b.name),
                ("count", b.count),
                ("age_ms", b.age_ms),
                ("still_s", b.still_s),
            )
            if value is not None
        }
        for b in found
    ]


def progress(found: list[Blocker]) -> tuple[str, str]:
    """``stalled`` or ``slow``, and a clause that names what stalled (F4)."""
    still = [b for b in found if stalled(b)]
    if not still:
        return "slow", ""
    return "stalled", "; stalled: " + ", ".join(
        f"{b.name}={b.count} (rank {b.rank}) has not moved for {b.still_s:.0f} s" for b in still
    )


def blockers(reports: Mapping[int, IdleReport]) -> list[Blocker]:
    """Every non-zero counter of every rank, by rank and name."""
    return [
        Blocker(rank=rank, name=name, count=count, age_ms=report.ages_ms.get(name))
        for rank, report in sorted(reports.items())
        for name, count in sorted(report.counters.items())
        if count
    ]


def check_complete(reports: Mapping[int, IdleReport]) -> None:
    """Refuse a report without its mandatory counters: an error, never "idle" (F2).

    Raises:
        Inconsistent: names rank and counters.
    """
    for rank, report in sorted(reports.items()):
        if lacking := missing_counters(report):
            raise Inconsistent(
                f"rank {rank}: incomplete idle report: {', '.join(lacking)} missing",
                details={"reason": "incomplete_idle_report", "rank": rank, "missing": lacking},
                hint="the hook and the engine do not fit together: see the rank's capabilities",
            )


def not_idle(verb: str, reports: Mapping[int, IdleReport]) -> NotIdle:
    """The refusal of ``verb`` (``attach``, ``detach``, ...), in the spec's words, with every blocker."""
    found = blockers(reports)
    queued = _sum(reports, QUEUE_COUNTERS)
    running = _sum(reports, RUNNING_COUNTERS)
    names = ", ".join(f"{b.name}={b.count} (rank {b.rank})" for b in found)
    message = f"Reject {verb}: scheduler is not idle. #queue-req={queued} #running-req={running}"
    return NotIdle(
        f"{message}; blocked by {names}" if names else message,
        details={
            "blocked_by": [
                {"rank": b.rank, "name": b.name, "count": b.count} | ({} if b.age_ms is None else {"age_ms": b.age_ms})
                for b in found
            ],
            "retry_after_s": RETRY_AFTER_S,
        },
    )


def _sum(reports: Mapping[int, IdleReport], names: tuple[str, ...]) -> int:
    return sum(report.counters.get(name, 0) for report in reports.values() for name in names)
