"""Totals over every store that a process has used: counters never go down when a set is swapped (F91)."""

import threading

from hicache_hooks.guard import Guard
from hicache_proto.model import LatencySummary, OpUsage


class UsageTotals:
    """Sums the guards that live and remembers those that are gone. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live: list[Guard] = []
        self._past: dict[str, OpUsage] = {}

    def add(self, guard: Guard) -> None:
        """A store was opened."""
        with self._lock:
            self._live.append(guard)

    def retire(self, guard: Guard) -> None:
        """A store was closed: its last numbers are kept. Again: nothing."""
        with self._lock:
            if guard in self._live:
                self._live.remove(guard)
                self._past = _sum([self._past, guard.usage()])

    def totals(self) -> dict[str, OpUsage]:
        """By call kind, since the process started."""
        with self._lock:
            return _sum([self._past, *(guard.usage() for guard in self._live)])


def _sum(parts: list[dict[str, OpUsage]]) -> dict[str, OpUsage]:
    total: dict[str, OpUsage] = {}
    for part in parts:
        for kind, usage in part.items():
            total[kind] = plus(total[kind], usage) if kind in total else usage
    return total


def plus(a: OpUsage, b: OpUsage) -> OpUsage:
    """Both together."""
    return OpUsage(
        hit=a.hit + b.hit,
        miss=a.miss + b.miss,
        error=a.error + b.error,
        timeout=a.timeout + b.timeout,
        skipped=a.skipped + b.skipped,
        bytes=a.bytes + b.bytes,
        latency=LatencySummary(
            count=a.latency.count + b.latency.count,
            total_s=a.latency.total_s + b.latency.total_s,
            max_s=max(a.latency.max_s, b.latency.max_s),
        ),
    )
