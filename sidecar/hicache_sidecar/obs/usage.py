"""Totals of storage use by rank that never go down, however often an engine restarts (failures.md F91).

A rank counts from zero after each start, and perhaps for each storage set. Every report is added up here as the
difference to the one before; a count that went back began anew. Only ranks of the present topology are kept, so the
number of series is bounded by it (F90). Pure.
"""

from collections.abc import Iterable, Mapping

from hicache_proto.model import LATENCY_BOUNDS_S, OpUsage

RESULTS = ("hit", "miss", "error", "timeout", "skipped")
MAX_OPS = 16  # call kinds per rank: get, put, exists and what a hook may add

Sample = dict[str, float]  # field -> value
BUCKETS = (*(f"le_{bound:g}" for bound in LATENCY_BOUNDS_S), "le_inf")  # each for itself, not cumulative
_FIELDS = (*RESULTS, "bytes", "calls", "seconds", *BUCKETS)


def _sample(usage: OpUsage) -> Sample:
    flat: Sample = {name: getattr(usage, name) for name in (*RESULTS, "bytes")}
    flat["calls"] = usage.latency.count
    flat["seconds"] = usage.latency.total_s
    counted = usage.latency.buckets if len(usage.latency.buckets) == len(BUCKETS) else [0] * len(BUCKETS)
    flat.update(zip(BUCKETS, counted, strict=True))
    return flat


class UsageTotals:
    """Running totals by (rank, call kind)."""

    def __init__(self, max_ops: int = MAX_OPS) -> None:
        self._max_ops = max_ops
        self._totals: dict[tuple[int, str], Sample] = {}
        self._last: dict[tuple[int, str], Sample] = {}
        self._said: dict[tuple[int, str], OpUsage] = {}  # what ``_last`` was made of

    def observe(self, rank: int, usage: Mapping[str, OpUsage]) -> None:
        """Add one report of ``rank``."""
        for op, one in usage.items():
            key = (rank, op)
            if self._said.get(key) == one:
                continue  # most reports of a phase or a quiet second say what the last one said
            if key not in self._totals and sum(1 for known, _ in self._totals if known == rank) >= self._max_ops:
                continue
            now = _sample(one)
            before = self._last.get(key, dict.fromkeys(_FIELDS, 0.0))
            # All fields of one kind restart together: any that went back means that all did.
            if any(now[name] < before[name] for name in _FIELDS):
                before = dict.fromkeys(_FIELDS, 0.0)
            total = self._totals.setdefault(key, dict.fromkeys(_FIELDS, 0.0))
            for name in _FIELDS:
                total[name] += now[name] - before[name]
            self._last[key], self._said[key] = now, one

    def restarted(self, rank: int) -> None:
        """The next report of ``rank`` counts from zero, also where it is larger than the last one."""
        for key in [key for key in self._last if key[0] == rank]:
            del self._last[key], self._said[key]

    def keep(self, ranks: Iterable[int]) -> None:
        """Forget ranks that the topology no longer has."""
        wanted = set(ranks)
        for table in (self._totals, self._last, self._said):
            for key in [key for key in table if key[0] not in wanted]:
                del table[key]

    def totals(self) -> dict[tuple[int, str], Sample]:
        """The totals, for rendering."""
        return self._totals
