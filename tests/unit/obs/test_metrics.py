"""Metrics: families once, totals that never go down, bounded series (F89 to F92)."""

import os
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

from hicache_proto.hooklink import RankHello
from hicache_proto.model import (
    EffectiveState,
    IdleReport,
    LatencySummary,
    OpUsage,
    RankIdentity,
    RankReport,
    State,
    TargetState,
    ThreadReport,
)
from hicache_sidecar.core.failover import Failover
from hicache_sidecar.core.failover_types import Episode, Facts, Record
from hicache_sidecar.engine.counters import Counters as EngineCounters
from hicache_sidecar.obs.counters import Counters
from hicache_sidecar.obs.metrics import STATE_NUMBERS, Metrics
from hicache_sidecar.obs.usage import MAX_OPS, UsageTotals


@dataclass
class FakeSession:
    hello: RankHello
    report: RankReport
    alive: bool = True

    @property
    def id(self) -> str:
        return self.hello.session

    @property
    def rank(self) -> int:
        return self.hello.identity.rank


@dataclass
class FakeRegistry:
    ranks: dict[int, FakeSession] = field(default_factory=dict)
    on_report: list[Any] = field(default_factory=list)
    expected: int = 2

    @property
    def live(self) -> dict[int, FakeSession]:
        return self.ranks

    def age_ms(self, session: FakeSession) -> int:
        return 1500


class FakeFailover:
    """No policy, nothing attached."""

    unreadable = ""
    steps: tuple[Any, ...] = ()

    def __init__(self) -> None:
        self.machine = Failover(Record(), lambda: 0.5)

    def facts(self) -> Facts:
        return Facts(desired=None)


class FakeStatus:
    state, revision, drift, missing_ranks = "attached", 4, [1, 2], [1]


class FakeCoordinator:
    """The parts of the coordinator that the metrics read."""

    def __init__(self) -> None:
        self.registry, self.counters = FakeRegistry(), EngineCounters()
        self.ctx = self
        self.failover = FakeFailover()

    def ready(self) -> tuple[bool, dict[str, Any]]:
        return True, {}

    def status(self) -> FakeStatus:
        return FakeStatus()

    def report(self, rank: int, session: str, epoch: int = 1, backend: str | None = "file", **usage: OpUsage) -> None:
        hello = RankHello(
            protocol=1, engine_id="e", session=session, role="rank", identity=RankIdentity(dp_rank=rank, dp_size=2),
            pid=1, incarnation="i", epoch=epoch,
        )  # fmt: skip
        state = EffectiveState(backend=backend, revision=3)
        report = RankReport(state=state, usage=usage, idle=IdleReport(counters={"waiting_queue": 5}))
        self.registry.ranks[rank] = FakeSession(hello, report)
        for listener in self.registry.on_report:
            listener(self.registry.ranks[rank])


Values = dict[str, dict[tuple[tuple[str, str], ...], float]]


def scrape(metrics: Metrics, coordinator: Any, accept: str = "") -> Values:
    body, _ = metrics.render(coordinator, accept)
    families = list(text_string_to_metric_families(body.decode()))
    names = Counter(family.name for family in families)
    assert max(names.values()) == 1  # F89: each family appears once
    found: Values = {}
    for family in families:
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


@pytest.fixture
def followed() -> tuple[Metrics, FakeCoordinator]:
    metrics, coordinator = Metrics(Counters()), FakeCoordinator()
    metrics.follow(coordinator)  # type: ignore[arg-type]
    return metrics, coordinator


Pair = tuple[Metrics, FakeCoordinator]


def test_state_numbers_are_fixed() -> None:
    assert list(STATE_NUMBERS) == [
        "detached", "attaching", "attached", "bypassed", "draining", "detaching", "quarantined", "split", "engine_down",
    ]  # fmt: skip
    assert STATE_NUMBERS[State.ENGINE_DOWN] == 8


def test_twenty_cycles_leave_each_family_once(followed: Pair) -> None:
    """F89: attach and detach, some failing, never register anything twice; F90: the number of series is constant."""
    metrics, coordinator = followed
    sizes = set()
    for cycle in range(20):
        coordinator.report(0, f"s{cycle}", epoch=cycle, backend="file" if cycle % 2 else None, get=OpUsage(hit=cycle))
        coordinator.counters.finished("attach", "ok" if cycle % 4 else "rolled_back", 0.5)
        values = scrape(metrics, coordinator)
        sizes.add(sum(len(series) for name, series in values.items() if name.startswith("hicache_storage")))
    assert len(sizes) == 1
    assert values["hicache_engine_epoch"][("rank", "0"),] == 19


def test_results_are_separate_and_totals_survive_a_restart(followed: Pair) -> None:
    """F91: 3 misses, 2 errors, 1 timeout are exactly these; the engine's restart takes nothing away."""
    metrics, coordinator = followed
    usage = OpUsage(hit=7, miss=3, error=2, timeout=1, bytes=4096, latency=LatencySummary(count=4, total_s=0.5))
    coordinator.report(1, "a", get=usage)
    values = scrape(metrics, coordinator)

    def keys(result: str) -> float:
        return values["hicache_storage_keys_total"][("op", "get"), ("rank", "1"), ("result", result)]

    assert [keys(r) for r in ("hit", "miss", "error", "timeout", "skipped")] == [7, 3, 2, 1, 0]
    assert values["hicache_storage_call_seconds_total"][("op", "get"), ("rank", "1")] == 0.5
    coordinator.report(1, "b", epoch=2, get=OpUsage(hit=8))  # a new session that already counts more hits than before
    values = scrape(metrics, coordinator)
    assert (keys("hit"), keys("miss")) == (15, 3)
    coordinator.report(1, "b", epoch=2, get=OpUsage(hit=2))  # a new storage set in the same session
    values = scrape(metrics, coordinator)
    assert keys("hit") == 17


def test_engine_values(followed: Pair) -> None:
    metrics, coordinator = followed
    coordinator.report(0, "a")
    coordinator.counters.stall_us_last, coordinator.counters.stall_us_total = 1500, 4000
    coordinator.counters.late_finalize = 2
    values = scrape(metrics, coordinator)
    assert values["hicache_scheduler_stall_last_seconds"][()] == 0.0015
    assert values["hicache_scheduler_stall_seconds_total"][()] == 0.004
    assert values["hicache_hook_messages_total"][("what", "late_finalize"),] == 2
    assert values["hicache_state"][()] == 2
    assert values["hicache_revision"][()] == 4
    assert values["hicache_drift"][()] == 2
    assert values["hicache_ranks_missing"][()] == 1
    assert values["hicache_rank_busy"][("counter", "waiting_queue"), ("rank", "0")] == 5
    assert values["hicache_rank_report_age_seconds"][("rank", "0"),] == 1.5
    assert values["hicache_rank_backend_info"][("backend", "file"), ("rank", "0")] == 1


def test_threads_of_other_sets_are_the_same_series(followed: Pair) -> None:
    """F90: fifty restarts and attaches later there are as many series as at first, under the same names."""
    metrics, coordinator = followed
    seen = []
    for n in range(50):
        coordinator.report(0, f"s{n}", epoch=n)
        session = coordinator.registry.ranks[0]
        names = (f"hicache-hf3fs-{n}-backup-0", f"hicache-hf3fs-{n}-backup-0-late-{n}", f"hicache-hf3fs-{n}-d2h-0")
        threads = [
            ThreadReport(name, alive=i != 2, stalled_s=float(i), restarts=i + 1)
            for i, name in enumerate((*names, "backup_io"))
        ]
        session.report = msgspec.structs.replace(session.report, threads=threads, abandoned=n)
        seen.append(scrape(metrics, coordinator))
    for name, series in seen[0].items():
        if name.startswith("hicache_"):
            assert series.keys() == seen[-1][name].keys(), name
    rank = ("rank", "0")
    assert seen[-1]["hicache_storage_thread_up"] == {
        (rank, ("thread", "backup-0")): 1, (rank, ("thread", "d2h-0")): 0, (rank, ("thread", "backup_io")): 1,
    }  # fmt: skip
    assert seen[-1]["hicache_storage_thread_stalled_seconds"][rank, ("thread", "backup-0")] == 1.0
    assert seen[-1]["hicache_abandoned_threads"] == {(rank,): 49}  # F46
    assert seen[-1]["hicache_storage_thread_restarts"][rank, ("thread", "backup-0")] == 3  # F38: 1 and 2


def test_both_formats(followed: Pair) -> None:
    metrics, coordinator = followed
    _, plain = metrics.render(coordinator, "")  # type: ignore[arg-type]
    assert plain.startswith("text/plain")
    body, open_metrics = metrics.render(coordinator, "application/openmetrics-text; version=1.0.0")  # type: ignore[arg-type]
    assert open_metrics.startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")


def test_no_multiprocess_files(followed: Pair, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """F90: the variable of the multi-process mode changes nothing."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    scrape(*followed)
    assert os.listdir(tmp_path) == []


def test_label_values_are_escaped_and_bounded(followed: Pair) -> None:
    """F92: whatever an engine calls its backend, the text stays parseable; kinds per rank are capped."""
    metrics, coordinator = followed
    kinds = {f"op{index}": OpUsage(hit=1) for index in range(100)}
    coordinator.report(0, "a", backend='evil"\n} 1\nhicache_x 2', **kinds)
    values = scrape(metrics, coordinator)
    assert "hicache_x" not in values
    assert len(values["hicache_storage_bytes_total"]) == MAX_OPS


def test_ranks_that_left_the_topology_are_forgotten() -> None:
    totals = UsageTotals()
    totals.observe(0, {"get": OpUsage(hit=1)})
    totals.observe(1, {"get": OpUsage(hit=1)})
    totals.keep([0])
    assert list(totals.totals()) == [(0, "get")]


async def test_failover_state_and_steps(autojump_clock: Any) -> None:
    """An alert on a hold, and on a store that is left again and again."""
    metrics, coordinator = Metrics(Counters()), FakeCoordinator()
    coordinator.counters.failover_steps.update({"bypass": 3, "hold": 1})
    machine = coordinator.failover.machine
    machine.episode = Episode(home=TargetState(backend="file"), state=TargetState())
    machine.state, machine.until = "held", trio.current_time() + 10.0
    values = scrape(metrics, coordinator)
    assert values["hicache_failover_state"] == {(): 8}
    assert values["hicache_failover_hold"] == {(): 1}
    assert values["hicache_failover_steps_total"] == {(("step", "bypass"),): 3, (("step", "hold"),): 1}
    assert values["hicache_failover_next_try_seconds"] == {(): 10.0}
