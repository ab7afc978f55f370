"""Counters of one kind of backend call, shared by both guards: our backends' and the SGLang engine's own.

Per key, and a miss is no error (F91): ``hit`` found or stored, ``miss`` not there or not taken, ``error``,
``timeout``, ``skipped`` (bypass, breaker, or closed).
"""

from bisect import bisect_left

from hicache_proto.model import LATENCY_BOUNDS_S, LatencySummary, OpUsage


class CallCounts:
    """Changed under the lock of the guard that owns it."""

    __slots__ = ("buckets", "bytes", "calls", "error", "hit", "max_s", "miss", "skipped", "timeout", "total_s")

    def __init__(self) -> None:
        self.hit = self.miss = self.error = self.timeout = self.skipped = self.bytes = self.calls = 0
        self.total_s = self.max_s = 0.0
        self.buckets = [0] * (len(LATENCY_BOUNDS_S) + 1)

    def took(self, seconds: float) -> None:
        """One more call, which lasted ``seconds``."""
        self.calls += 1
        self.total_s += seconds
        self.max_s = max(self.max_s, seconds)
        self.buckets[bisect_left(LATENCY_BOUNDS_S, seconds)] += 1

    def usage(self) -> OpUsage:
        """As reported."""
        return OpUsage(
            hit=self.hit,
            miss=self.miss,
            error=self.error,
            timeout=self.timeout,
            skipped=self.skipped,
            bytes=self.bytes,
            latency=LatencySummary(
                count=self.calls, total_s=self.total_s, max_s=self.max_s, buckets=list(self.buckets)
            ),
        )
