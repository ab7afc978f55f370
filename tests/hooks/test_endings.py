"""How operations end badly on one rank: leases, late builders, stuck threads, failed swaps back."""

import threading

import pytest
from tests.hooks.driver import FILE, Driver

from hicache_proto.errors import ErrorBody
from hicache_proto.hooklink import Answer, Commit, Finalize, Freeze, Prepare, Undo
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


@pytest.mark.parametrize("reached", ["preparing", "prepared", "draining", "frozen", "switched"])
def test_the_end_of_a_lease_is_undo_from_every_phase(reached: str) -> None:
    """F36, rules 2 and 3: nobody renews, so the rank is on A again, open, with B closed, and says ``expired``."""
    rank = Driver()
    rank.move(1)
    rank.adapter.build_gate = threading.Event()
    waiting = rank.send(Prepare(target=OTHER, prepared_s=30), 2)
    rank.turn()
    if reached != "preparing":
        rank.adapter.build_gate.set()
        rank.answer_to(waiting)
    if reached == "draining":
        rank.adapter.counters["running_batch"] = 1
        waiting = rank.send(Freeze(round=1, freeze_s=5, drain=True), 2)
        rank.turn()
    if reached in ("frozen", "switched"):
        rank.freeze(2)
    if reached == "switched":
        rank.commit(2)
    assert rank.phase == reached
    rank.clock.forward(31)
    rank.hook.pending = True  # as the agent's timer does
    rank.turn()
    assert rank.ended == "expired"
    assert rank.hook.gate.is_open
    assert rank.adapter.installed.state.extra_config == FILE.extra_config
    assert [n.kind for n in rank.notices] == ["lease_end"]
    if reached in ("preparing", "draining"):
        answer = rank.answer_to(waiting)
        assert error_of(answer).details["reason"] == "expired", "a deferred call is answered at lease end"
    rank.adapter.build_gate.set()
    rank.settle()
    for body in (Freeze(round=2, freeze_s=5), Commit(in_doubt_s=10), Finalize(), Prepare(target=OTHER, prepared_s=30)):
        answer = rank.ask(body, 2)
        assert error_of(answer).details["reason"] == "expired"
        assert answer.report.op_ended == "expired"
    assert rank.hook.gate.is_open


def test_a_commit_that_comes_after_the_lease_is_expired() -> None:
    """Rule 2: the lease must be alive when COMMIT runs, not when it arrives."""
    rank = Driver()
    rank.prepare(1)
    rank.freeze(1)
    call = rank.send(Commit(in_doubt_s=10), 1)
    rank.clock.forward(5.1)
    assert error_of(rank.answer_to(call)).details["reason"] == "expired"
    assert rank.backend is None
    assert "swap" not in rank.adapter.calls


def test_admission_looks_at_the_lease_itself() -> None:
    """Rule 8: with the agent thread dead, the next request opens the gate and swaps back."""
    rank = Driver()
    rank.prepare(1)
    rank.freeze(1)
    rank.commit(1)
    assert not rank.hook.admit()
    rank.clock.forward(10)
    assert rank.hook.admit()
    assert rank.backend is None


def test_what_a_late_builder_made_is_closed() -> None:
    """Rule 9: UNDO while building; the set is closed once, and the next operation waits for the builder."""
    rank = Driver()
    rank.adapter.build_gate = threading.Event()
    waiting = rank.send(Prepare(target=FILE, prepared_s=30), 1)
    rank.turn()
    assert rank.undo(1).ok
    assert error_of(rank.answer_to(waiting)).details["reason"] == "undone"
    refused = error_of(rank.ask(Prepare(target=OTHER, prepared_s=30), 2))
    assert (refused.code, refused.details["reason"]) == ("prepare_failed", "builder_busy")
    assert rank.undo(2).ok
    rank.adapter.build_gate.set()
    rank.until(lambda: rank.hook.transaction._builder.busy is None)
    rank.settle()
    assert rank.closed() == [1]
    rank.move(3, OTHER)


def test_undo_while_back_filling_closes_the_set() -> None:
    rank = Driver()
    rank.send(Prepare(target=scripted(backfill_slices=1000), prepared_s=30), 1)
    rank.until(lambda: rank.hook.transaction.slicing)
    assert rank.undo(1).ok
    rank.settle()
    assert rank.closed() == [1]
    assert rank.adapter.ledger.owners() == {}


def test_a_prepare_right_after_such_an_undo_is_refused_aloud() -> None:
    """One builder at a time: the built set is not given back yet, and silence would cost a third of the lease."""
    rank = Driver()
    rank.send(Prepare(target=scripted(backfill_slices=1000), prepared_s=30), 1)
    rank.until(lambda: rank.hook.transaction.slicing)
    rank.send(Undo(), 1)
    refused = error_of(rank.ask(Prepare(target=OTHER, prepared_s=30), 2))
    assert (refused.details["reason"], refused.details["running"]) == ("builder_busy", 1)
    rank.settle()
    assert rank.closed() == [1]
    rank.move(3, OTHER)


def test_undo_of_an_unknown_operation_is_remembered() -> None:
    rank = Driver()
    assert rank.undo(7).ok
    answer = rank.ask(Prepare(target=FILE, prepared_s=30), 7)
    assert error_of(answer).details["reason"] == "undone"
    assert "build" not in rank.adapter.calls


def test_one_operation_at_a_time_and_old_numbers_are_stale() -> None:
    """Rule 6."""
    rank = Driver()
    rank.prepare(5)
    assert error_of(rank.ask(Prepare(target=OTHER, prepared_s=30), 6)).code == "operation_in_progress"
    assert error_of(rank.ask(Prepare(target=OTHER, prepared_s=30), 4)).details["reason"] == "stale"
    assert error_of(rank.ask(Commit(in_doubt_s=10), 4)).details["reason"] == "stale"
    assert rank.phase is RankPhase.PREPARED
    assert rank.undo(5).ok
    rank.settle()


def test_stuck_threads_keep_the_old_backend_open_and_quarantine_is_told() -> None:
    """F23, F117, F28: B serves, A's backend is not closed under a live thread, retry after it ends clears it."""
    rank = Driver()
    rank.move(1, scripted(close_stuck=1))
    stuck = rank.adapter.installed
    rank.prepare(2, DETACHED)
    rank.freeze(2)
    rank.commit(2)
    answer = rank.finalize(2)
    error = error_of(answer)
    assert (error.code, error.details["reason"]) == ("quarantined", "threads_stuck")
    assert error.details["threads"] == [f"light-worker-{stuck.name}"]
    assert answer.report.op_ended == "final"
    assert stuck.closed == 0
    assert "threads_stuck" in answer.report.quarantine
    assert rank.hook.gate.is_open
    refused = error_of(rank.ask(Prepare(target=OTHER, prepared_s=30), 3))
    assert refused.code == "quarantined"
    stuck.script.clear()  # the thread comes back from its call
    rank.until(lambda: rank.hook.report().quarantine == "")
    assert stuck.closed == 1
    assert rank.finalize(2).ok
    rank.move(4, OTHER)


def test_a_failed_swap_back_quarantines_the_rank() -> None:
    """F28: thaw anyway, bypass on, close neither set; nothing more runs here until the engine restarts."""
    rank = Driver()
    rank.move(1)
    rank.prepare(2, scripted(swap_back_error=1))
    rank.freeze(2)
    rank.commit(2)
    closed_before = [s.closed for s in rank.adapter.sets]
    answer = rank.undo(2)
    assert error_of(answer).details["reason"] == "undo_failed"
    assert answer.report.op_phase == "quarantined"
    assert "undo_failed" in answer.report.quarantine
    assert rank.hook.gate.is_open
    assert rank.adapter.bypass
    assert [s.closed for s in rank.adapter.sets] == closed_before
    assert error_of(rank.ask(Prepare(target=OTHER, prepared_s=30), 3)).code == "quarantined"
    assert rank.adapter.calls.count("build") == 2


@pytest.mark.parametrize("boundary", ["before_apply", "after_apply"])
@pytest.mark.parametrize("phase", ["prepare", "freeze", "commit"])
def test_a_step_that_raises_is_answered_and_undone(phase: str, boundary: str) -> None:
    """Nothing raises into the scheduler; the operation can always be undone."""
    rank = Driver(faults=f"{phase}.{boundary}=error")
    answers = []
    for step in (rank.prepare, rank.freeze, rank.commit):
        answers.append(step(1))
        if not answers[-1].ok:
            break
    assert error_of(answers[-1]).details["reason"] == "step_failed"
    assert answers[-1].phase == phase
    assert rank.undo(1).ok
    rank.until(lambda: rank.hook.transaction._builder.busy is None)
    rank.turn()
    rank.settle()
    assert rank.backend is None
    assert rank.hook.gate.is_open
    assert rank.adapter.ledger.owners() == {}
    rank.move(2)
