"""F58 in the rank's transaction: PREPARED and FROZEN mean that the checkpoint is complete; else nothing is let go."""

from tests.hooks.driver import Driver
from tests.rigs.light_adapter import LightAdapter

from hicache_hooks.adapter import Checkpoints
from hicache_proto.errors import PrepareFailed
from hicache_proto.hooklink import Freeze, Prepare, Thaw
from hicache_proto.model import TargetState
from hicache_proto.transaction import RankPhase

MEM = TargetState(backend="light")


class Saving(LightAdapter):
    """A store that needs ``left`` more passes, or a completion (``waiting``), or fails."""

    left = 0
    waiting = False
    error: Exception | None = None
    saved: list[str | None]
    ended = 0

    def checkpoint_slice(self, built: object, budget_s: float) -> bool:
        self.calls.append("save")
        if self.error is not None:
            raise self.error
        if self.waiting:
            return False
        self.left = max(0, self.left - 1)
        return self.left == 0

    def checkpoint_waits(self) -> bool:
        return self.waiting

    def end_checkpoint(self) -> None:
        self.ended += 1


def failed() -> PrepareFailed:
    return PrepareFailed("checkpoint: refused", details={"reason": "checkpoint_failed"})


class Saver(Driver):
    adapter: Saving

    def __init__(self) -> None:
        super().__init__(adapter=Saving)
        assert isinstance(self.adapter, Checkpoints)
        self.move(1)
        self.adapter.calls.clear()

    @property
    def saves(self) -> int:
        return self.adapter.calls.count("save")


def test_a_whole_operation_saves_in_prepare_and_again_in_freeze() -> None:
    rank = Saver()
    assert rank.prepare(2, MEM, checkpoint=True).ok
    assert rank.saves == 1
    assert rank.freeze(2).ok
    assert rank.saves == 2
    assert rank.commit(2).ok
    assert rank.finalize(2).ok
    assert (rank.backend, rank.saves) == ("light", 2)
    assert rank.adapter.ended == 1
    rank.settle()


def test_without_the_option_nothing_is_saved() -> None:
    rank = Saver()
    rank.move(2, MEM)
    assert (rank.saves, rank.adapter.ended) == (0, 0)
    rank.settle()


def test_prepare_is_answered_when_the_store_has_everything() -> None:
    """Slices, one per pass; while the store must answer first, the scheduler sleeps (F4)."""
    rank = Saver()
    rank.adapter.left = 5
    call = rank.send(Prepare(target=MEM, prepared_s=30.0, checkpoint=True), 2)
    rank.until(lambda: rank.saves == 2)
    assert rank.phase is RankPhase.PREPARING
    assert rank.hook.sleep_s(1.0) == 0.0
    rank.adapter.waiting = True
    rank.turn()
    assert rank.hook.pending
    assert 0 < (rank.hook.sleep_s(1.0) or 0) <= 0.02
    rank.adapter.waiting = False
    assert rank.answer_to(call).ok
    assert rank.undo(2).ok
    assert rank.adapter.ended == 1
    rank.settle()


def test_a_checkpoint_that_fails_in_prepare_ends_the_operation_on_the_old_store() -> None:
    rank = Saver()
    rank.adapter.error = failed()
    answer = rank.prepare(2, MEM, checkpoint=True)
    assert answer.error is not None
    assert (answer.error.code, answer.error.details["reason"]) == ("prepare_failed", "checkpoint_failed")
    assert (rank.backend, rank.phase, rank.hook.gate.is_open) == ("file", RankPhase.NONE, True)
    assert rank.adapter.ended == 1
    rank.settle()
    rank.adapter.error = None
    rank.move(3, MEM)
    rank.settle()


def test_a_defect_of_the_engine_is_a_failure_like_any_other() -> None:
    rank = Saver()
    rank.adapter.error = KeyError("x")
    answer = rank.prepare(2, MEM, checkpoint=True)
    assert answer.error is not None
    assert answer.error.code == "prepare_failed"
    assert rank.backend == "file"
    rank.settle()


def test_what_came_after_prepare_is_saved_while_admission_is_held() -> None:
    """Its own transfers are no blockers then; idleness is tested once more when they are over."""
    rank = Saver()
    assert rank.prepare(2, MEM, checkpoint=True).ok
    rank.adapter.left = 4
    call = rank.send(Freeze(round=1, freeze_s=5.0), 2)
    rank.turn()
    assert (rank.phase, rank.hook.gate.is_open) == (RankPhase.DRAINING, False)
    assert rank.hook.sleep_s(1.0) == 0.0
    rank.adapter.counters["ongoing_backup"] = 2  # the checkpoint's own
    rank.turn()
    assert rank.phase is RankPhase.DRAINING
    rank.adapter.counters["ongoing_backup"] = 0
    assert rank.answer_to(call).ok
    assert rank.phase is RankPhase.FROZEN
    assert rank.undo(2).ok
    rank.settle()


def test_a_request_that_slipped_in_meanwhile_still_makes_it_not_idle() -> None:
    rank = Saver()
    assert rank.prepare(2, MEM, checkpoint=True).ok
    rank.adapter.left = 3
    call = rank.send(Freeze(round=1, freeze_s=5.0), 2)
    rank.turn()
    rank.adapter.counters["waiting_queue"] = 1
    answer = rank.answer_to(call)
    assert answer.error is not None
    assert answer.error.code == "not_idle"
    assert (rank.phase, rank.hook.gate.is_open) == (RankPhase.PREPARED, True)
    rank.adapter.counters["waiting_queue"] = 0
    assert rank.freeze(2, round=2).ok
    assert rank.undo(2).ok
    rank.settle()


def test_a_busy_engine_is_refused_before_anything_is_saved() -> None:
    rank = Saver()
    assert rank.prepare(2, MEM, checkpoint=True).ok
    saves = rank.saves
    rank.adapter.counters["running_batch"] = 1
    answer = rank.freeze(2)
    assert answer.error is not None
    assert answer.error.code == "not_idle"
    assert rank.saves == saves
    assert rank.undo(2).ok
    rank.settle()


def test_a_checkpoint_that_fails_in_freeze_thaws_and_says_why() -> None:
    """Also in a drain, which waits for nothing but idleness."""
    for drain in (False, True):
        rank = Saver()
        assert rank.prepare(2, MEM, checkpoint=True).ok
        rank.adapter.error = failed()
        answer = rank.freeze(2, drain=drain)
        assert answer.error is not None
        assert (answer.error.code, answer.error.details["reason"]) == ("prepare_failed", "checkpoint_failed")
        assert (rank.phase, rank.hook.gate.is_open) == (RankPhase.PREPARED, True)
        assert rank.undo(2).ok
        assert rank.backend == "file"
        rank.settle()


def test_a_thaw_in_the_middle_begins_with_the_idle_check_again() -> None:
    """Another rank was busy: the coordinator thaws this one while it saves."""
    rank = Saver()
    assert rank.prepare(2, MEM, checkpoint=True).ok
    rank.adapter.left = 100
    rank.send(Freeze(round=1, freeze_s=5.0), 2)
    rank.turn()
    assert rank.phase is RankPhase.DRAINING
    assert rank.ask(Thaw(round=1, prepared_s=30.0), 2).ok
    rank.adapter.counters["running_batch"] = 1
    saves = rank.saves
    assert not rank.freeze(2, round=2).ok
    assert rank.saves == saves
    assert rank.undo(2).ok
    rank.settle()


def test_the_lease_ends_a_checkpoint_as_it_ends_anything() -> None:
    rank = Saver()
    assert rank.prepare(2, MEM, checkpoint=True).ok
    rank.adapter.waiting = True
    rank.send(Freeze(round=1, freeze_s=5.0), 2)
    rank.turn()
    rank.clock.forward(5.1)
    rank.turn()
    assert (rank.phase, rank.ended, rank.hook.gate.is_open) == (RankPhase.NONE, "expired", True)
    assert (rank.backend, rank.adapter.ended) == ("file", 1)
    rank.settle()


def test_an_engine_without_checkpoints_refuses_by_name() -> None:
    rank = Driver()
    rank.move(1)
    answer = rank.prepare(2, MEM, checkpoint=True)
    assert answer.error is not None
    assert (answer.error.code, answer.error.details["reason"]) == ("unsupported_by_engine", "checkpoint")
    assert (rank.phase, rank.backend) == (RankPhase.NONE, "file")
    rank.move(3, MEM)
    rank.settle()
