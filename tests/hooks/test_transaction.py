"""The executor of the rank's table, on the test's own thread and clock; builders and closers are real threads."""

import math
import threading

import pytest
from tests.hooks.driver import FILE, Driver

from hicache_hooks.gate import operation_hold
from hicache_hooks.waiting import MAX_WAITING
from hicache_proto.errors import ErrorBody
from hicache_proto.hooklink import Answer, Commit, Freeze, Prepare, Undo
from hicache_proto.model import TargetState
from hicache_proto.transaction import RankPhase

DETACHED = TargetState()
OTHER = TargetState(backend="file", extra_config='{"path": "/b"}')


def scripted(**script: object) -> TargetState:
    pairs = ", ".join(f'"{key}": {str(value).lower()}' for key, value in script.items())
    return TargetState(backend="file", extra_config="{" + pairs + "}")


def error_of(answer: Answer) -> ErrorBody:
    assert not answer.ok
    assert answer.error is not None
    return answer.error


def test_an_attach_a_swap_and_a_detach() -> None:
    rank = Driver()
    rank.move(1)
    assert rank.backend == "file"
    assert rank.adapter.effective().backend == "file"
    assert rank.hook.report().state.revision == 1
    rank.move(2, OTHER)
    assert rank.hook.report().state.revision == 2
    rank.move(3, DETACHED)
    assert rank.backend is None
    rank.settle()
    assert rank.closed() == [1, 1]
    assert rank.adapter.ledger.owners() == {}
    assert rank.hook.gate.is_open
    assert rank.adapter.published == [("file", 1), ("file", 2), (None, 3)]


def test_publication_is_the_last_act_and_the_swap_comes_after_the_back_fill() -> None:
    """F14, F117: build, back-fill, swap; only FINALIZE publishes, after admission is open."""
    rank = Driver()
    rank.prepare(1, scripted(backfill_slices=5))
    assert rank.adapter.slices == 5
    assert rank.adapter.calls == ["build"]
    rank.freeze(1)
    rank.commit(1)
    assert rank.adapter.calls == ["build", "swap"]
    open_at_publish: list[bool] = []
    publish = rank.adapter.publish
    rank.adapter.publish = lambda *a: (open_at_publish.append(rank.hook.gate.is_open), publish(*a))[1]  # type: ignore[method-assign,func-returns-value]
    rank.finalize(1)
    assert open_at_publish == [True]
    assert "publish" in rank.adapter.calls


def test_a_publication_that_fails_is_told_and_paid_by_the_next_finalize() -> None:
    """F117: the rank is on B, says so, and names the layer that is behind."""
    rank = Driver()
    rank.prepare(1, scripted(publish_error=1))
    rank.freeze(1)
    rank.commit(1)
    answer = rank.finalize(1)
    assert error_of(answer).details["reason"] == "publish_failed"
    assert answer.report.op_ended == "final"
    assert "publish" in answer.report.layers
    assert rank.finalize(1).ok
    assert "publish" not in rank.hook.report().layers
    assert rank.adapter.published == [("file", 1)]


@pytest.mark.parametrize("step", ["build", "backfill", "swap"])
def test_a_failure_at_any_step_leaves_the_old_state_and_no_set(step: str) -> None:
    """F14: after the fault everything is closed exactly once, threads are gone, and a new attach works."""
    baseline = {t.name for t in threading.enumerate()}
    rank = Driver()
    if step == "build":
        assert error_of(rank.prepare(1, scripted(build_error=1))).code == "invalid_config"
    elif step == "backfill":
        good = rank.adapter.backfill_slice
        rank.adapter.backfill_slice = lambda _: 1 // 0  # type: ignore[method-assign,assignment,return-value]
        assert error_of(rank.prepare(1)).details["reason"] == "backfill"
        rank.adapter.backfill_slice = good  # type: ignore[method-assign]
    else:
        rank.prepare(1, scripted(swap_error=1))
        rank.freeze(1)
        assert error_of(rank.commit(1)).details["reason"] == "swap_failed"
        assert rank.phase is RankPhase.FROZEN
        assert rank.undo(1).ok
    assert rank.ended == "undone"
    assert rank.backend is None
    assert rank.hook.gate.is_open
    rank.settle()
    assert rank.closed() == ([] if step == "build" else [1])
    rank.move(2)
    rank.move(3, DETACHED)
    rank.settle()
    rank.until(lambda: {t.name for t in threading.enumerate()} <= baseline)


def test_prepare_is_answered_when_built_and_every_repeat_too() -> None:
    rank = Driver()
    rank.adapter.build_gate = threading.Event()
    calls = [rank.send(Prepare(target=FILE, prepared_s=30), 1) for _ in range(3)]
    assert rank.turn() == []
    assert rank.phase is RankPhase.PREPARING
    rank.adapter.build_gate.set()
    answers = [rank.answer_to(call) for call in calls]
    assert all(a.ok and a.report.op_phase == "prepared" for a in answers)
    assert rank.adapter.calls.count("build") == 1


def test_a_busy_engine_refuses_freeze_and_keeps_what_was_prepared() -> None:
    """Strict: at once, with the blockers; admission is open again in the same pass."""
    rank = Driver()
    rank.prepare(1)
    rank.adapter.counters["ongoing_backup"] = 1
    answer = rank.freeze(1)
    assert error_of(answer).code == "not_idle"
    assert error_of(answer).details["blocked_by"] == [{"rank": 0, "name": "ongoing_backup", "count": 1}]
    assert answer.report.op_phase == "prepared"
    assert rank.hook.gate.is_open
    rank.adapter.counters["ongoing_backup"] = 0
    assert error_of(rank.freeze(1)).code == "not_idle", "a round that was thawed never freezes again"
    assert rank.hook.gate.is_open
    assert rank.freeze(1, round=2).ok
    assert not rank.hook.gate.is_open


def test_an_incomplete_idle_report_is_an_error_in_a_drain_too() -> None:
    """F2: waiting would never end."""
    rank = Driver()
    rank.prepare(1)
    del rank.adapter.counters["ongoing_prefetch"]
    assert error_of(rank.freeze(1, drain=True)).details["reason"] == "incomplete_idle_report"
    assert rank.hook.gate.is_open


def test_a_drain_holds_tests_every_pass_and_answers_all_calls() -> None:
    rank = Driver()
    rank.prepare(1)
    rank.adapter.counters["running_batch"] = 2
    calls = [rank.send(Freeze(round=1, freeze_s=5, drain=True), 1)]
    assert rank.turn() == []
    assert not rank.hook.gate.is_open
    rank.clock.forward(4)
    calls.append(rank.send(Freeze(round=1, freeze_s=5, drain=True), 1))
    rank.turn()
    rank.clock.forward(4)  # over the first lease, inside the renewed one
    assert rank.hook.pending, "while it drains every scheduler pass looks"
    assert rank.turn() == []
    assert rank.phase is RankPhase.DRAINING
    rank.adapter.counters["running_batch"] = 0
    answers = rank.turn()
    assert sorted(a.call for a in answers) == [c.call for c in calls]
    assert all(a.ok and a.report.op_phase == "frozen" for a in answers)


def test_pages_that_came_in_since_prepare_are_back_filled_before_frozen() -> None:
    """COMMIT computes no hashes: FROZEN means idle and nothing left to do."""
    rank = Driver()
    rank.prepare(1)
    rank.adapter._slices_left = 3
    call = rank.send(Freeze(round=1, freeze_s=5), 1)
    assert rank.turn() == []
    assert rank.answer_to(call).ok


def test_idle_is_looked_at_again_in_commit() -> None:
    """F11: a request that came in between makes COMMIT a no; the set stays parked until UNDO."""
    rank = Driver()
    rank.prepare(1)
    assert rank.freeze(1).ok
    rank.adapter.counters["waiting_queue"] = 1
    answer = rank.commit(1)
    assert error_of(answer).code == "not_idle"
    assert answer.report.op_phase == "frozen"
    assert rank.backend is None
    assert "swap" not in rank.adapter.calls
    assert rank.undo(1).ok
    rank.settle()


def test_commit_repeated_is_answered_and_swaps_once() -> None:
    rank = Driver()
    rank.prepare(1)
    rank.freeze(1)
    assert rank.commit(1).ok
    rank.clock.forward(6)
    assert rank.commit(1).ok
    assert rank.adapter.calls.count("swap") == 1
    rank.clock.forward(6)  # COMMIT's lease is not renewed by the repeat (phase table: "not renewed")
    rank.hook.pending = True
    rank.turn()
    assert rank.ended == "expired"
    assert rank.backend is None


def test_hot_commits_without_freeze_and_without_idle() -> None:
    rank = Driver()
    rank.adapter.counters["running_batch"] = 5
    rank.prepare(1, hot=True)
    assert rank.commit(1).ok
    assert rank.hook.gate.is_open
    assert rank.finalize(1).ok
    assert rank.backend == "file"


def test_dry_run_is_prepare_and_undo() -> None:
    rank = Driver()
    assert rank.prepare(1).ok
    assert rank.undo(1).ok
    rank.settle()
    assert rank.backend is None
    assert rank.adapter.ledger.owners() == {}


def test_thaw_keeps_the_prepared_set() -> None:
    rank = Driver()
    rank.prepare(1)
    rank.freeze(1)
    assert rank.thaw(1).ok
    assert rank.hook.gate.is_open
    assert rank.freeze(1, round=2).ok
    assert rank.commit(1).ok


def test_every_step_reports_its_stall() -> None:
    rank = Driver()
    answers = [rank.prepare(1), rank.freeze(1), rank.commit(1), rank.finalize(1)]
    assert all(a.stall_us is not None and 0 <= a.stall_us < 1_000_000 for a in answers)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf, 1e9])
def test_a_lease_of_nonsense_is_refused_before_anything_happens(seconds: float) -> None:
    rank = Driver()
    error_of(rank.ask(Prepare(target=FILE, prepared_s=seconds), 1))
    assert rank.adapter.calls == []
    rank.prepare(1)
    error_of(rank.ask(Freeze(round=1, freeze_s=seconds), 1))
    assert rank.hook.gate.is_open
    rank.freeze(1, round=2)
    error_of(rank.ask(Commit(in_doubt_s=seconds), 1))
    assert rank.backend is None


def test_waiting_calls_are_bounded_and_all_answered() -> None:
    rank = Driver()
    rank.adapter.build_gate = threading.Event()
    calls = [rank.send(Prepare(target=FILE, prepared_s=30), 1) for _ in range(MAX_WAITING + 10)]
    rank.turn()
    assert len(rank.answers) == 10
    rank.adapter.build_gate.set()
    rank.until(lambda: len(rank.answers) == len(calls))
    assert len({a.call for a in rank.answers}) == len(calls)


def test_leaving_undoes_what_is_open_and_closes_late_sets() -> None:
    rank = Driver()
    rank.prepare(1)
    rank.freeze(1)
    rank.commit(1)
    rank.hook.close()
    assert rank.backend is None
    assert rank.closed() == [1]
    assert rank.hook.gate.is_open
    rank.hook.close()
    rank.hook.run_pending()


def test_operation_hold_names_are_the_documented_ones() -> None:
    rank = Driver()
    rank.prepare(12)
    rank.freeze(12)
    assert rank.hook.report().holds == [operation_hold(12)] == ["operation-12"]
    assert rank.hook.report().lease_left_s == 5.0
    assert rank.undo(12).ok
    rank.ask(Undo(), 12)
