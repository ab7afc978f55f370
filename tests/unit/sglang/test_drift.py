"""The engine's own storage calls behind the sidecar's back are noticed, and refused while an operation holds."""

from types import SimpleNamespace
from typing import Any

import pytest

from hicache_hooks.sglang.drift import watched
from hicache_hooks.sglang.ours import ours
from hicache_proto.model import EffectiveState, RankReport
from hicache_proto.transaction import RankPhase, RankRecord


class Engine:
    """A scheduler's state, its handler, and the hook that looks at it."""

    def __init__(self) -> None:
        self.state = EffectiveState()
        self.transaction = SimpleNamespace(record=RankRecord())
        self.notices: list[str] = []
        self.handled = 0
        self.success = True
        self.next = EffectiveState(backend="file")

    def report(self) -> RankReport:
        return RankReport(state=self.state)

    def note_drift(self, detail: str) -> None:
        self.notices.append(detail)

    def handle(self, request: Any) -> Any:
        self.handled += 1
        if self.success:
            self.state = self.next
        return SimpleNamespace(success=self.success)

    def call(self, what: str = "attach") -> Any:
        refused = None if what == "clear" else SimpleNamespace
        return watched(self.handle, what, self, refused)("request")


def test_a_change_is_told_once() -> None:
    engine = Engine()
    assert engine.call().success
    assert engine.call().success  # the same again: nothing changed
    assert engine.notices == ["the engine's own attach: storage backend none -> file"]


def test_a_policy_update_over_ours_is_told() -> None:
    engine = Engine()
    engine.state = EffectiveState(backend="file", prefetch_policy="timeout")
    engine.next = EffectiveState(backend="file", prefetch_policy="best_effort")
    engine.call()
    assert engine.notices == ["the engine's own attach changed policies or options of file"]


def test_a_refused_call_is_no_drift() -> None:
    engine = Engine()
    engine.success = False
    assert not engine.call("detach").success
    assert not engine.call("clear").success
    assert engine.notices == []


def test_a_clear_is_told() -> None:
    engine = Engine()
    engine.call("clear")
    assert engine.notices == ["the engine's own clear deleted the attached store's pages"]


def test_ours_is_no_drift() -> None:
    engine = Engine()
    with ours():
        engine.call()
    assert engine.handled == 1
    assert engine.notices == []


@pytest.mark.parametrize("phase", list(RankPhase))
def test_refused_only_in_phases_that_a_world_shares(phase: RankPhase) -> None:
    """A phase that ranks enter one by one must not decide: a one-sided attach hangs the engine."""
    engine = Engine()
    engine.transaction.record = RankRecord(n=7, phase=phase)
    answer = engine.call()
    if phase in (RankPhase.DRAINING, RankPhase.FROZEN, RankPhase.SWITCHED):
        assert (answer.success, engine.handled) == (False, 0)
        assert answer.message == "Reject attach: operation 7 of hicache-sidecar is in progress"
    else:
        assert (answer.success, engine.handled) == (True, 1)
    assert engine.call("clear").success


def test_a_broken_report_breaks_nothing() -> None:
    engine = Engine()
    engine.report = lambda: 1 / 0  # type: ignore[assignment, return-value]
    assert engine.call().success
    assert engine.notices == ["the engine's own attach: storage backend unknown -> unknown"]
