"""SGLang's idle predicates as counters: each blocks by its name, and what the engine's verdict misses blocks too."""

from types import SimpleNamespace
from typing import Any

import pytest

from hicache_hooks.idle import IdleGate
from hicache_hooks.sglang.idle import idle_report
from hicache_proto.model import MANDATORY_COUNTERS, IdleReport, RankIdentity


class Threads:
    """Storage threads that do as told."""

    def __init__(self, calls: int = 0, queued: int = 0) -> None:
        self._counters = {"storage_calls": calls, "storage_queues": queued}

    def counters(self) -> dict[str, int]:
        return self._counters


def scheduler(**changes: Any) -> Any:
    """An idle SGLang scheduler; ``changes`` by dotted-path-with-two-underscores names."""
    tree = SimpleNamespace(
        ongoing_write_through={}, ongoing_load_back={}, ongoing_prefetch={}, ongoing_backup={}, enable_storage=True,
        buffer_pipeline=None,
    )  # fmt: skip
    made = SimpleNamespace(
        running_batch=SimpleNamespace(reqs=[]), chunked_req=None, last_batch=None, enable_overlap=True, result_queue=[],
        waiting_queue=[], grammar_manager=SimpleNamespace(grammar_queue=[]), tree_cache=tree, mm_receiver=None,
        dllm_manager=SimpleNamespace(any_staging_reqs=lambda: False), disaggregation_mode=SimpleNamespace(value="null"),
        enable_hierarchical_cache=True, _engine_paused=False, _deferred_input_requests=[],
        _pp_microbatches_drained=lambda: True, is_fully_idle=lambda: True,
    )  # fmt: skip
    for path, value in changes.items():
        *owners, name = path.split("__")
        target: Any = made
        for owner in owners:
            target = getattr(target, owner)
        setattr(target, name, value)
    return made


def blocking(report: IdleReport) -> dict[str, int]:
    return {name: count for name, count in report.counters.items() if count}


def test_an_idle_scheduler_reports_every_mandatory_counter() -> None:
    """F2: one that is missing would count as an error, not as idle."""
    report = idle_report(scheduler(), Threads())
    assert set(MANDATORY_COUNTERS) <= set(report.counters)
    assert blocking(report) == {}
    assert report.hopeless == ""


def test_requests_that_are_held_are_told_and_block_nobody() -> None:
    """Rule 12."""
    report = idle_report(scheduler(), Threads(), 3)
    assert report.held == 3
    assert blocking(report) == {}


@pytest.mark.parametrize(
    ("change", "value", "name"),
    [
        ("running_batch__reqs", [1, 2], "running_batch"),
        ("chunked_req", object(), "chunked_prefill"),
        ("last_batch", SimpleNamespace(reqs=[1]), "last_batch"),
        ("result_queue", [1], "overlap_results"),
        ("_pp_microbatches_drained", lambda: False, "pp_microbatches"),
        ("waiting_queue", [1], "waiting_queue"),
        ("grammar_manager__grammar_queue", [1], "grammar_queue"),
        ("dllm_manager__any_staging_reqs", lambda: True, "dllm_staging"),
        ("tree_cache__ongoing_write_through", {1: 1}, "ongoing_write_through"),
        ("tree_cache__ongoing_load_back", {1: 1}, "ongoing_load_back"),
        ("tree_cache__ongoing_prefetch", {1: 1}, "ongoing_prefetch"),
        ("tree_cache__ongoing_backup", {1: 1}, "ongoing_backup"),
        ("tree_cache__buffer_pipeline", SimpleNamespace(is_idle=lambda: False), "buffer_pipeline"),
        ("_deferred_input_requests", [1], "deferred_input"),
        ("mm_receiver", SimpleNamespace(waiting_list=[1]), "encoder_waiting"),
        ("is_fully_idle", lambda: False, "engine_verdict"),
    ],
)
def test_each_predicate_blocks_by_its_own_name(change: str, value: Any, name: str) -> None:
    """F1."""
    report = idle_report(scheduler(**{change: value}), Threads())
    assert list(blocking(report)) == [name]


def test_storage_threads_and_queues_block_although_the_engine_says_idle() -> None:
    """F11: a terminated prefetch leaves its thread inside the store."""
    report = idle_report(scheduler(), Threads(calls=1, queued=2))
    assert blocking(report) == {"storage_calls": 1, "storage_queues": 2}


def test_disaggregation_queues() -> None:
    queue = SimpleNamespace(queue=[1], retracted_queue=[1, 2], has_pending_deferred_releases=lambda: True)
    decode = scheduler(
        disaggregation_mode=SimpleNamespace(value="decode"),
        disagg_decode_prealloc_queue=queue,
        disagg_decode_transfer_queue=queue,
        decode_offload_manager=SimpleNamespace(ongoing_offload=[1]),
    )
    assert blocking(idle_report(decode, Threads())) == {
        "disagg_prealloc_queue": 1, "disagg_retracted_queue": 2, "disagg_transfer_queue": 1,
        "disagg_deferred_releases": 1, "disagg_offload": 1,
    }  # fmt: skip
    prefill = scheduler(
        disaggregation_mode=SimpleNamespace(value="prefill"),
        disagg_prefill_bootstrap_queue=queue,
        disagg_prefill_inflight_queue=[1, 2],
    )
    assert blocking(idle_report(prefill, Threads())) == {
        "disagg_bootstrap_queue": 1, "disagg_inflight_queue": 2,
    }  # fmt: skip


def test_parts_that_not_every_engine_has() -> None:
    """Sparse staging; and the cache that stands in the hierarchical one's place."""
    sparse = scheduler(enable_hisparse=True, hisparse_coordinator=SimpleNamespace(has_ongoing_staging=lambda: True))
    assert blocking(idle_report(sparse, Threads())) == {"hisparse_staging": 1}
    lmcache = scheduler(enable_hierarchical_cache=False, enable_lmcache=True)
    lmcache.tree_cache = SimpleNamespace(has_pending_cache_operations=lambda: True)
    assert blocking(idle_report(lmcache, Threads())) == {"lmcache_operations": 1}


def test_a_paused_engine_with_running_requests_is_refused_by_name() -> None:
    """It will not get idle by waiting: a drain must not wait for it. Paused with nothing to do is idle."""
    paused = scheduler(_engine_paused=True, running_batch__reqs=[1])

    class Adapter:
        def identity(self) -> RankIdentity:
            return RankIdentity()

        def idle_report(self) -> IdleReport:
            return idle_report(paused, Threads())

    gate = IdleGate(Adapter())  # type: ignore[arg-type]
    refusal = gate.refusal()
    assert refusal is not None
    assert (refusal.code, refusal.details["reason"]) == ("unsupported_by_engine", "engine_paused")
    paused.running_batch.reqs = []
    assert gate.refusal() is None


def test_an_engine_that_lacks_a_predicate_is_not_idle() -> None:
    """F2."""
    broken = scheduler()
    del broken.grammar_manager
    with pytest.raises(AttributeError):
        idle_report(broken, Threads())
