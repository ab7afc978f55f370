"""What /metrics and status say about guards: breakers, use by store, latency, and stores that are never read."""

from typing import Any

import msgspec
import pytest
from tests.unit.obs.test_metrics import FakeCoordinator, scrape

from hicache_proto.model import (
    LATENCY_BOUNDS_S,
    BreakerReport,
    GuardReport,
    LatencySummary,
    OpUsage,
    RankReport,
    RecentUse,
    StoreUsage,
    ThreadReport,
)
from hicache_proto.usage import MIN_LOOKUPS, plus, stores, total
from hicache_sidecar.engine.status import idle_document, store_warnings
from hicache_sidecar.obs.counters import Counters
from hicache_sidecar.obs.metrics import Metrics


def buckets(**at: int) -> list[int]:
    made = [0] * (len(LATENCY_BOUNDS_S) + 1)
    for index, n in at.items():
        made[int(index.removeprefix("b"))] = n
    return made


def guard(state: str = "closed", **fields: Any) -> GuardReport:
    sides = {"read": BreakerReport(state=state, ratio=0.5, opened_total=3), "write": BreakerReport()}
    return GuardReport(name="file", breaker=state, sides=sides, **fields)


def reported(coordinator: FakeCoordinator, **fields: Any) -> None:
    coordinator.report(0, "a")
    session = coordinator.registry.ranks[0]
    session.report = msgspec.structs.replace(session.report, **fields)
    for listener in coordinator.registry.on_report:
        listener(session)


@pytest.fixture
def both() -> tuple[Metrics, FakeCoordinator]:
    metrics, coordinator = Metrics(Counters()), FakeCoordinator()
    metrics.follow(coordinator)  # type: ignore[arg-type]
    return metrics, coordinator


def test_breakers_and_hanging_calls(both: tuple[Metrics, FakeCoordinator]) -> None:
    """F69, F39."""
    metrics, coordinator = both
    reported(coordinator, guard=guard("open", late=2, epoch_changes=3))
    values = scrape(metrics, coordinator)
    assert values["hicache_breaker_state"] == {
        (("rank", "0"), ("side", "read")): 2, (("rank", "0"), ("side", "write")): 0,
    }  # fmt: skip
    assert values["hicache_breaker_openings"][("rank", "0"), ("side", "read")] == 3
    assert values["hicache_storage_late_calls"][("rank", "0"),] == 2
    assert values["hicache_storage_epoch_changes"][("rank", "0"),] == 3


def test_two_stores_of_one_kind_are_two_series(both: tuple[Metrics, FakeCoordinator]) -> None:
    """F92; and the numbers are those of the report (F69: 20 of 100 reads failed)."""
    metrics, coordinator = both
    one = StoreUsage(ops={"get": OpUsage(hit=80, error=20, bytes=800)}, lookups=100)
    other = StoreUsage(ops={"get": OpUsage(hit=5)}, skipped={"threshold": 1000})
    reported(coordinator, stores={"aibrix:ROCKSDB": one, "aibrix:L1": other})
    values = scrape(metrics, coordinator)
    keys = values["hicache_store_keys_total"]
    assert keys[("op", "get"), ("rank", "0"), ("result", "error"), ("store", "aibrix:ROCKSDB")] == 20
    assert keys[("op", "get"), ("rank", "0"), ("result", "hit"), ("store", "aibrix:L1")] == 5
    assert values["hicache_storage_skipped"][("rank", "0"), ("reason", "threshold"), ("store", "aibrix:L1")] == 1000


def test_latency_is_a_histogram_that_survives_a_restart(both: tuple[Metrics, FakeCoordinator]) -> None:
    metrics, coordinator = both
    first = OpUsage(latency=LatencySummary(count=3, total_s=2.0, buckets=buckets(b0=2, b13=1)))
    reported(coordinator, usage={"get": first})
    coordinator.report(0, "b", epoch=2, get=first)
    values = scrape(metrics, coordinator)
    found = values["hicache_storage_call_duration_seconds_bucket"]
    assert found[("le", "0.001"), ("op", "get"), ("rank", "0")] == 4
    assert found[("le", "10"), ("op", "get"), ("rank", "0")] == 4
    assert found[("le", "+Inf"), ("op", "get"), ("rank", "0")] == 6
    assert values["hicache_storage_call_duration_seconds_count"][("op", "get"), ("rank", "0")] == 6
    assert values["hicache_storage_call_duration_seconds_sum"][("op", "get"), ("rank", "0")] == 4.0


def test_written_and_never_read_is_said() -> None:
    """F57: writes > 0, hits = 0 after enough look-ups; look-ups below the threshold are the hint."""
    coordinator = FakeCoordinator()
    store = StoreUsage(
        ops={"put": OpUsage(hit=9, bytes=9000), "get": OpUsage()}, lookups=1000, skipped={"threshold": 1000}
    )
    reported(coordinator, stores={"file": store})
    summed = stores(session.report.stores for session in coordinator.registry.ranks.values())
    (said,) = store_warnings(coordinator.registry.ranks.values(), summed)  # type: ignore[arg-type]
    assert said == (
        "write_only: file was given 9000 bytes and read nothing in 1000 look-ups, "
        "1000 of them below prefetch_threshold"
    )  # fmt: skip


def test_gaps_and_the_window_are_said() -> None:
    """F57: what is stored behind a missing page is a cause of its own; a store that was read once says its window."""
    coordinator = FakeCoordinator()
    ops = {"put": OpUsage(hit=9, bytes=9000), "get": OpUsage(hit=1)}
    recent = RecentUse(lookups=1050, written=8)
    reported(coordinator, stores={"file": StoreUsage(ops=ops, lookups=2000, gaps=7, gap_pages=70, recent=recent)})
    summed = stores(session.report.stores for session in coordinator.registry.ranks.values())
    (said,) = store_warnings(coordinator.registry.ranks.values(), summed)  # type: ignore[arg-type]
    assert said == (
        "write_only: file was given 9000 bytes and read nothing in its last 1050 look-ups, "
        "7 found pages behind one that is not stored"
    )
    metrics = Metrics(Counters())
    metrics.follow(coordinator)  # type: ignore[arg-type]
    assert scrape(metrics, coordinator)["hicache_storage_chain_gaps"] == {(("rank", "0"), ("store", "file")): 7}


@pytest.mark.parametrize(
    ("lookups", "hits", "expected"), [(MIN_LOOKUPS, 0, True), (MIN_LOOKUPS - 1, 0, False), (MIN_LOOKUPS, 1, False)]
)
def test_one_hit_or_few_look_ups_are_no_alarm(lookups: int, hits: int, expected: bool) -> None:
    """Ranks are summed first: one that has no traffic is no alarm while another reads."""
    half = StoreUsage(ops={"put": OpUsage(hit=1)}, lookups=lookups // 2)
    rest = StoreUsage(ops={"get": OpUsage(hit=hits)}, lookups=lookups - lookups // 2)
    assert stores([{"x": half}, {"x": rest}])["x"].write_only is expected


def test_open_breakers_and_stuck_threads_are_said_by_name() -> None:
    """F39: a worker that stands in a native call is named in status."""
    coordinator = FakeCoordinator()
    reported(coordinator, guard=guard("open", opened_for_s=4.2, reason="hung", stuck=["hicache-file-2-backup-0"]))
    said = store_warnings(coordinator.registry.ranks.values(), {})  # type: ignore[arg-type]
    assert said == [
        "rank 0: the breaker of file is open for 4 s (hung); what it holds back is recomputed",
        "rank 0: stuck inside the store: hicache-file-2-backup-0",
    ]


def test_a_full_store_is_said() -> None:
    """F62: it fails no call, so no breaker speaks for it."""
    coordinator = FakeCoordinator()
    reported(coordinator, guard=guard(no_room=True))
    said = store_warnings(coordinator.registry.ranks.values(), {})  # type: ignore[arg-type]
    assert said == ["rank 0: file has no room and takes no new pages; what it holds is still read"]


def test_the_idle_report_names_them_too() -> None:
    """F39; also a thread that stalls outside a call of the guard, which no deadline watches."""
    coordinator = FakeCoordinator()
    coordinator.registry.complete = True  # type: ignore[attr-defined]
    coordinator.registry.missing_ranks = []  # type: ignore[attr-defined]
    reported(coordinator, guard=guard(stuck=["a-backup-0"]), threads=[ThreadReport("a-backup-0-late-1", stalled_s=3)])
    assert idle_document(coordinator.registry).ranks[0].stuck == ["a-backup-0"]  # type: ignore[arg-type]
    reported(coordinator, threads=[ThreadReport("d2h-0", stalled_s=20), ThreadReport("h2d-0")])
    assert idle_document(coordinator.registry).ranks[0].stuck == ["d2h-0"]  # type: ignore[arg-type]


def test_sums_keep_every_field() -> None:
    one = OpUsage(1, 2, 3, 4, 5, 6, LatencySummary(7, 8.0, 9.0, [1, 2]))
    two = plus(one, one)
    assert msgspec.to_builtins(two) == {
        "hit": 2, "miss": 4, "error": 6, "timeout": 8, "skipped": 10, "bytes": 12,
        "latency": {"count": 14, "total_s": 16.0, "max_s": 9.0, "buckets": [2, 4]},
    }  # fmt: skip
    assert total([{"a": one}, {"b": one}, {"a": one}]) == {"a": two, "b": one}
    assert RankReport().stores == {}
