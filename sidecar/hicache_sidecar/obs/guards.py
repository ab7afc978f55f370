"""Metric families of the guards: breakers, calls that hang, and use by store (failures.md F39, F57, F69, F92).

Names of stores come from the ranks, which bound their characters and their number; both are bounded here once more.
"""

from collections.abc import Iterable, Iterator, Mapping

from hicache_proto.model import LATENCY_BOUNDS_S, RankReport
from hicache_sidecar.obs.usage import BUCKETS, RESULTS, Sample, UsageTotals

Labels = tuple[str, ...]
Family = tuple[str, str, str, Labels, list[tuple[Labels, float]]]  # kind, name, help, label names, samples

BREAKER = {"closed": 0, "half_open": 1, "open": 2}
MAX_SERIES = 64  # store and call kind per rank
MAX_REASONS = 16  # per rank and store


class GuardMetrics:
    """Totals by store that never go down, and what the last reports say."""

    def __init__(self) -> None:
        self._stores = UsageTotals(MAX_SERIES)

    def observe(self, rank: int, report: RankReport) -> None:
        """Add one report."""
        for name, store in report.stores.items():
            self._stores.observe(rank, {f"{name[:64]} {op}": usage for op, usage in store.ops.items()})

    def restarted(self, rank: int) -> None:
        """See ``UsageTotals.restarted``."""
        self._stores.restarted(rank)

    def keep(self, ranks: Iterable[int]) -> None:
        """See ``UsageTotals.keep``."""
        self._stores.keep(ranks)

    def families(self, reports: Mapping[tuple[str], RankReport]) -> Iterator[Family]:
        """All families, from the last report of each rank."""
        guards = {rank: report.guard for rank, report in reports.items() if report.guard is not None}
        sides = [((*rank, side), one) for rank, guard in guards.items() for side, one in guard.sides.items()]
        yield (
            "gauge", "hicache_breaker_state", "0 closed, 1 half-open, 2 open", ("rank", "side"),
            [(labels, BREAKER.get(one.state, 2)) for labels, one in sides],
        )  # fmt: skip
        yield (
            "gauge", "hicache_breaker_failed_ratio", "Failed share of the calls in the window", ("rank", "side"),
            [(labels, one.ratio) for labels, one in sides],
        )  # fmt: skip
        yield (
            "gauge", "hicache_breaker_openings", "Openings since the store was attached", ("rank", "side"),
            [(labels, one.opened_total) for labels, one in sides],
        )  # fmt: skip
        yield (
            "gauge", "hicache_storage_late_calls", "Calls past their deadline that are inside the store", ("rank",),
            [(rank, guard.late) for rank, guard in guards.items()],
        )  # fmt: skip
        yield (
            "gauge", "hicache_storage_epoch_changes", "Times that the attached store was found emptied", ("rank",),
            [(rank, guard.epoch_changes) for rank, guard in guards.items()],
        )  # fmt: skip
        yield (
            "gauge", "hicache_storage_write_only", "1 when written, often looked up and never read", ("rank", "store"),
            [((*rank, name[:64]), store.write_only) for rank, r in reports.items() for name, store in r.stores.items()],
        )  # fmt: skip
        yield (
            "gauge", "hicache_storage_chain_gaps", "Look-ups that found pages behind one that is not stored",
            ("rank", "store"),
            [((*rank, name[:64]), store.gaps) for rank, r in reports.items() for name, store in r.stores.items()],
        )  # fmt: skip
        yield (
            "gauge", "hicache_storage_skipped", "Not asked of the store, by reason: requests (threshold) or keys",
            ("rank", "store", "reason"),
            [
                ((*rank, name[:64], reason), n)
                for rank, report in reports.items()
                for name, store in report.stores.items()
                for reason, n in sorted(store.skipped.items())[:MAX_REASONS]
            ],
        )  # fmt: skip
        labels = ("rank", "store", "op")
        totals = [
            ((str(rank), *key.rsplit(" ", 1)), sample) for (rank, key), sample in sorted(self._stores.totals().items())
        ]
        yield (
            "counter", "hicache_store_keys", "Keys by store and result; a miss is no error", (*labels, "result"),
            [((*key, result), sample[result]) for key, sample in totals for result in RESULTS],
        )  # fmt: skip
        yield (
            "counter", "hicache_store_bytes", "Bytes moved, by store", labels,
            [(key, sample["bytes"]) for key, sample in totals],
        )  # fmt: skip


def latency(totals: Mapping[tuple[int, str], Sample]) -> Iterator[tuple[Labels, list[tuple[str, float]], float]]:
    """Labels, cumulative buckets and sum of each histogram; call kinds that never said a duration are left out."""
    bounds = [*(f"{bound:g}" for bound in LATENCY_BOUNDS_S), "+Inf"]
    for (rank, op), sample in sorted(totals.items()):
        below, buckets = 0.0, []
        for bound, name in zip(bounds, BUCKETS, strict=True):
            below += sample[name]
            buckets.append((bound, below))
        if below:
            yield (str(rank), op), buckets, sample["seconds"]
