"""One store's counters: per key by result, per call, and why keys were skipped. The guard holds the lock."""

from collections import Counter

from hicache_hooks.counts import CallCounts
from hicache_proto.model import OpUsage, StoreUsage
from hicache_proto.usage import written_never_read

KINDS = ("put", "get", "exists", "set_aside", "clear")


class Counts:
    """All of one store."""

    def __init__(self) -> None:
        self.by_kind = {kind: CallCounts() for kind in KINDS}
        self.skipped: Counter[str] = Counter()  # keys by reason: "bypass", "breaker", "closed"; requests: "threshold"
        self.lookups = 0  # requests that could have read
        self.calls = 0  # of traffic
        self.errors = 0
        self.timeouts = 0

    def skip(self, kind: str, keys: int, reason: str) -> None:
        """A call that was not made."""
        self.by_kind[kind].skipped += keys
        self.skipped[reason] += keys

    def add(self, kind: str, *, hit: int = 0, miss: int = 0, error: int = 0, timeout: int = 0, nbytes: int = 0) -> None:
        """Results of one call."""
        counts = self.by_kind[kind]
        counts.hit += hit
        counts.miss += miss
        counts.error += error
        counts.timeout += timeout
        counts.bytes += nbytes

    def usage(self) -> dict[str, OpUsage]:
        """By call kind."""
        return {kind: counts.usage() for kind, counts in self.by_kind.items()}

    def store_usage(self) -> StoreUsage:
        """Everything, and whether the store was written and never read (F57)."""
        ops = self.usage()
        skipped = {reason: n for reason, n in self.skipped.items() if n}
        write_only = written_never_read(ops, self.lookups)
        return StoreUsage(ops=ops, lookups=self.lookups, skipped=skipped, write_only=write_only)
