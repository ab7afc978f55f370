"""One store's counters: per key by result, per call, and why keys were skipped. The guard holds the lock."""

from collections import Counter, deque

from hicache_hooks.counts import CallCounts
from hicache_proto.model import OpUsage, RecentUse, StoreUsage
from hicache_proto.usage import written_never_read

BLOCK = 100  # look-ups between two marks
BLOCKS = 10  # marks that are kept: what was read in the last 1000 to 1099 look-ups is known (F57)

KINDS = ("put", "get", "exists", "set_aside", "clear")


class Counts:
    """All of one store."""

    def __init__(self) -> None:
        self.by_kind = {kind: CallCounts() for kind in KINDS}
        self.skipped: Counter[str] = Counter()  # keys by reason: "bypass", "breaker", "closed"; requests: "threshold"
        self.lookups = 0  # requests that could have read
        self.gaps = self.gap_pages = 0
        self._marks = deque([RecentUse()], maxlen=BLOCKS + 1)  # totals at the end of each block
        self.calls = 0  # of traffic
        self.errors = 0
        self.timeouts = 0
        self.no_room = False  # of the last put whose store said yes or no to a page

    def looked_up(self) -> None:
        """A request could have read."""
        self.lookups += 1
        if self.lookups % BLOCK == 0:
            self._marks.append(self._totals())

    def found(self, *, too_short: bool, gap_pages: int) -> None:
        """What is wrong with what a look-up found."""
        self.skipped["threshold"] += too_short
        self.gaps += gap_pages > 0
        self.gap_pages += gap_pages

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
        if kind == "put" and (hit or miss):
            self.no_room = miss > 0

    def usage(self) -> dict[str, OpUsage]:
        """By call kind."""
        return {kind: counts.usage() for kind, counts in self.by_kind.items()}

    def store_usage(self) -> StoreUsage:
        """Everything, and whether the store was written and never read (F57)."""
        ops = self.usage()
        skipped = {reason: n for reason, n in self.skipped.items() if n}
        now, before = self._totals(), self._marks[0]
        recent = RecentUse(now.lookups - before.lookups, now.written - before.written, now.read - before.read)
        return StoreUsage(
            ops=ops,
            lookups=self.lookups,
            skipped=skipped,
            write_only=written_never_read(ops, self.lookups, recent),
            gaps=self.gaps,
            gap_pages=self.gap_pages,
            recent=recent,
        )

    def _totals(self) -> RecentUse:
        return RecentUse(self.lookups, self.by_kind["put"].hit, self.by_kind["get"].hit)
