"""Use summed over the ranks, kept until a report is new: status is asked for more often than ranks report."""

from collections.abc import Sequence

from hicache_proto import usage
from hicache_proto.model import OpUsage, RankReport, StoreUsage

Summed = tuple[dict[str, OpUsage], dict[str, StoreUsage]]


class Sums:
    """The sums of the reports that were asked for last. What it gives out is not to be changed."""

    def __init__(self) -> None:
        self._reports: Sequence[RankReport] = ()
        self._summed: Summed = ({}, {})

    def of(self, reports: Sequence[RankReport]) -> Summed:
        """By call kind, and by store."""
        known = self._reports
        if len(reports) != len(known) or any(a is not b for a, b in zip(reports, known, strict=True)):
            self._summed = usage.total(r.usage for r in reports), usage.stores(r.stores for r in reports)
            self._reports = reports
        return self._summed
