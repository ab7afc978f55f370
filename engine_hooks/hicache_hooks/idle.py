"""The strict idle check; nothing else decides that an engine is idle (spec.md, "Idle").

The engine hands over a self-describing map of counters. Every non-zero counter blocks, whether this code knows
its name or not, so that a new engine feature blocks before anybody taught us about it; a mandatory counter that
is missing is an error, never "idle" (failures.md F1, F2). The answer binds only on the scheduler thread, in the
same step as what relies on it.
"""

from typing import Any

import msgspec

from hicache_hooks.adapter import EngineAdapter
from hicache_proto.errors import HicacheError, NotIdle, UnsupportedByEngine
from hicache_proto.model import MANDATORY_COUNTERS, QUEUE_COUNTERS, RUNNING_COUNTERS, Blocker, IdleReport


def blockers_of(report: IdleReport, rank: int) -> list[Blocker]:
    """Every non-zero counter, by name.

    Raises:
        UnsupportedByEngine: a mandatory counter is missing (``details.reason`` = ``incomplete_idle_report``).
    """
    counters = report.counters
    missing = [name for name in MANDATORY_COUNTERS if name not in counters]
    if missing:
        raise UnsupportedByEngine(
            f"incomplete idle report: rank {rank} does not report {', '.join(missing)}",
            details={"reason": "incomplete_idle_report", "rank": rank, "missing": missing},
            hint="the hooks do not match this engine version",
        )
    return [
        Blocker(rank=rank, name=name, count=count, age_ms=report.ages_ms.get(name))
        for name, count in counters.items()
        if count != 0
    ]


def not_idle(blockers: list[Blocker], report: IdleReport) -> NotIdle:
    """The refusal, in the spec's words, with every blocker in ``details.blocked_by``."""
    queued = sum(report.counters.get(name, 0) for name in QUEUE_COUNTERS)
    running = sum(report.counters.get(name, 0) for name in RUNNING_COUNTERS)
    listed = ", ".join(f"{b.name}={b.count}" for b in blockers)
    return NotIdle(
        f"scheduler is not idle. #queue-req={queued} #running-req={running} blocked by {listed}",
        details={"blocked_by": [_plain(b) for b in blockers], "queue_req": queued, "running_req": running},
    )


def _plain(blocker: Blocker) -> dict[str, Any]:
    return {name: value for name, value in msgspec.structs.asdict(blocker).items() if value is not None}


class IdleGate:
    """The check of one rank."""

    __slots__ = ("_adapter", "_rank")

    def __init__(self, adapter: EngineAdapter) -> None:
        self._adapter = adapter
        self._rank = adapter.identity().rank

    def refusal(self) -> HicacheError | None:
        """None when idle, else why not: NotIdle with the blockers, or UnsupportedByEngine (F2, or waiting is no use).

        Call it on the scheduler thread. Never raises: an engine whose counters cannot be read is not idle.
        """
        try:
            report = self._adapter.idle_report()
            blockers = blockers_of(report, self._rank)
        except HicacheError as error:
            return error
        except Exception as error:
            return UnsupportedByEngine(
                f"incomplete idle report: rank {self._rank}: {type(error).__name__}: {error}",
                details={"reason": "incomplete_idle_report", "rank": self._rank, "missing": []},
            )
        if blockers and report.hopeless:
            listed = ", ".join(f"{b.name}={b.count}" for b in blockers)
            return UnsupportedByEngine(
                f"{report.hopeless}: the engine will not become idle by waiting; blocked by {listed}",
                details={"reason": report.hopeless, "blocked_by": [_plain(b) for b in blockers]},
                hint="let the engine go on first",
            )
        return not_idle(blockers, report) if blockers else None
