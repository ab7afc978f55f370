"""Sums of usage reports: over the stores of a process, and over the ranks of an engine. Pure."""

from collections.abc import Iterable, Mapping
from itertools import zip_longest

from hicache_proto.model import LatencySummary, OpUsage, RecentUse, StoreUsage

MIN_LOOKUPS = 100  # F57: fewer requests than this may simply have had nothing in common


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
            buckets=[x + y for x, y in zip_longest(a.latency.buckets, b.latency.buckets, fillvalue=0)],
        ),
    )


def total(parts: Iterable[Mapping[str, OpUsage]]) -> dict[str, OpUsage]:
    """By call kind."""
    summed: dict[str, OpUsage] = {}
    for part in parts:
        for kind, usage in part.items():
            summed[kind] = plus(summed[kind], usage) if kind in summed else usage
    return summed


def written_never_read(ops: Mapping[str, OpUsage], lookups: int, recent: RecentUse = RecentUse()) -> bool:  # noqa: B008
    """F57: pages were stored, requests asked often enough, and none ever came from the store; or none lately."""
    put, get = ops.get("put", OpUsage()), ops.get("get", OpUsage())
    ever = RecentUse(lookups, put.hit, get.hit)
    return any(use.written > 0 and use.read == 0 and use.lookups >= MIN_LOOKUPS for use in (ever, recent))


def stores(parts: Iterable[Mapping[str, StoreUsage]]) -> dict[str, StoreUsage]:
    """By store."""
    by_name: dict[str, list[StoreUsage]] = {}
    for part in parts:
        for name, usage in part.items():
            by_name.setdefault(name, []).append(usage)
    return {name: _store(usages) for name, usages in sorted(by_name.items())}


def _store(parts: list[StoreUsage]) -> StoreUsage:
    ops = total(part.ops for part in parts)
    lookups = sum(part.lookups for part in parts)
    skipped: dict[str, int] = {}
    for part in parts:
        for reason, n in part.skipped.items():
            skipped[reason] = skipped.get(reason, 0) + n
    recent = RecentUse(
        lookups=sum(part.recent.lookups for part in parts),
        written=sum(part.recent.written for part in parts),
        read=sum(part.recent.read for part in parts),
    )
    return StoreUsage(
        ops=ops,
        lookups=lookups,
        skipped=skipped,
        write_only=written_never_read(ops, lookups, recent),
        gaps=sum(part.gaps for part in parts),
        gap_pages=sum(part.gap_pages for part in parts),
        recent=recent,
    )
