"""The facade: nothing raises into the scheduler, sleeping and waking, leaving, and forked children."""

import os
import threading
from typing import Any

import pytest
from tests.hooks.driver import FILE, Driver
from tests.rigs.light_adapter import LightAdapter

from hicache_hooks.closer import Closer
from hicache_hooks.faults import Faults
from hicache_hooks.hook import BUSY_SLEEP_S, RankHook
from hicache_hooks.world import WorldCommand
from hicache_proto.hooklink import AskReport, Freeze, Hold, Prepare, WatchIdle
from hicache_proto.transaction import RankPhase


def test_an_idle_hook_has_nothing_pending() -> None:
    rank = Driver()
    assert rank.hook.pending is False
    rank.send(AskReport())
    assert rank.hook.pending is False, "answered without the scheduler"
    rank.send(Hold(name="drain", hold_s=1))
    assert rank.hook.pending is True
    assert rank.woken.is_set()
    rank.turn()
    assert rank.hook.pending is False


class Broken(LightAdapter):
    """Everything that an adapter may be asked raises."""

    def __getattribute__(self, name: str) -> Any:
        plain = ("identity", "capabilities", "counters", "_identity", "caps", "__class__")
        if name in plain or name.startswith("__"):
            return super().__getattribute__(name)
        raise RuntimeError(f"adapter.{name} is broken")


def test_nothing_raises_into_the_scheduler() -> None:
    """Every adapter method raises; the scheduler sees nothing of it, the report names it, admission stays open."""
    rank = Driver()
    rank.adapter.__class__ = Broken
    hook = rank.hook
    for body in (
        Prepare(target=FILE, prepared_s=30),
        Freeze(round=1, freeze_s=5),
        WatchIdle(for_s=5),
        Hold(name="x", hold_s=5),
    ):
        rank.send(body, 1)
        hook.run_pending()
        hook.admit()
        hook.note_idle()
        hook.sleep_s()
    hook.execute_injected(WorldCommand("nonsense", 1))
    hook.execute_injected(WorldCommand("commit", 1, lease_s=-1.0))
    report = hook.report()
    assert "report.effective" in report.layers
    assert "is broken" in report.layers["report.usage"]
    rank.clock.forward(6)
    assert hook.admit()
    hook.close()


def test_a_step_that_fails_in_an_unforeseen_way_is_logged_not_raised(caplog: pytest.LogCaptureFixture) -> None:
    rank = Driver()

    def explode(*_: object) -> None:
        raise ZeroDivisionError

    rank.hook.transaction.on_call = explode  # type: ignore[method-assign]
    rank.hook.transaction.tick = explode  # type: ignore[method-assign]
    rank.send(Prepare(target=FILE, prepared_s=30), 1)
    rank.hook.run_pending()
    assert "step failed" in caplog.text
    assert rank.hook.admit()


def test_how_long_the_scheduler_may_sleep() -> None:
    rank = Driver()
    hook = rank.hook
    assert hook.sleep_s() is None
    assert hook.sleep_s(1.0) == 1.0
    rank.send(Hold(name="drain", hold_s=0.5))
    assert hook.sleep_s(1.0) == 0.0, "something is in the inbox"
    rank.turn()
    assert hook.sleep_s(1.0) == pytest.approx(0.5), "until the hold ends"
    rank.adapter.counters["running_batch"] = 1
    rank.send(WatchIdle(for_s=60))
    rank.turn()
    assert hook.sleep_s(1.0) == BUSY_SLEEP_S
    rank.clock.forward(61)
    rank.turn()
    assert hook.sleep_s(1.0) == 1.0
    rank.send(Prepare(target=FILE, prepared_s=30), 1)
    rank.until(lambda: rank.phase is RankPhase.PREPARED)
    assert hook.sleep_s(100.0) == pytest.approx(30.0)


def test_an_idle_moment_is_told_when_the_scheduler_notes_it() -> None:
    rank = Driver()
    rank.adapter.counters["running_batch"] = 1
    rank.send(WatchIdle(for_s=60))
    rank.turn()
    assert rank.hook.pending, "asked on every pass while it is busy"
    rank.adapter.counters["running_batch"] = 0
    rank.hook.note_idle()
    rank.read()
    assert [n.kind for n in rank.notices] == ["idle"]
    assert not rank.hook.pending


def test_what_a_builder_makes_after_leaving_is_closed() -> None:
    """Rule 9 at the end of the process: nobody takes it, so the hook closes it."""
    rank = Driver()
    rank.adapter.build_gate = threading.Event()
    rank.send(Prepare(target=FILE, prepared_s=30), 1)
    rank.turn()
    rank.hook.close()
    rank.adapter.build_gate.set()
    builder = next(t for t in threading.enumerate() if t.name == "hicache-build-1")
    builder.join(10)
    assert rank.closed() == [1]
    assert rank.adapter.ledger.owners() == {}


def test_drift_is_a_notice() -> None:
    rank = Driver()
    rank.hook.note_drift("PUT on the engine's own route")
    rank.read()
    assert [(n.kind, n.detail) for n in rank.notices] == [("drift", "PUT on the engine's own route")]


def test_a_forked_child_has_an_inert_hook() -> None:
    """F104: no thread, no socket of its own; admission is open and nothing is sent or waited for."""
    rank = Driver()
    rank.prepare(1)
    rank.freeze(1)
    rank.hook.pending = True
    child = os.fork()
    if child == 0:
        ok = not rank.hook.pending and rank.hook.admit() and rank.hook.gate.is_open
        rank.hook.run_pending()
        rank.hook.note_drift("unheard")
        rank.hook.close()
        os._exit(0 if ok and not rank.hook.pending else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert rank.hook.pending
    assert not rank.hook.gate.is_open
    assert rank.undo(1).ok


def test_bad_fault_specifications_stop_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HICACHE_FAULTS", "no.such=thing")
    with pytest.raises(ValueError, match="fault"):
        RankHook(LightAdapter(), "ipc:///nowhere", engine_id="e", incarnation="i", start=False)


def test_a_backend_that_raises_in_close_is_told_and_not_retried() -> None:
    """F28: its threads have ended; closing twice could free twice."""
    adapter = LightAdapter()
    adapter.close = lambda parked, timeout_s: 1 // 0  # type: ignore[method-assign,assignment,return-value]
    done: list[Any] = []
    closer = Closer(adapter, done.append, Faults())
    closer.close(object())
    closer.stop(10)
    assert [(c.stuck, "ZeroDivisionError" in c.error) for c in done] == [((), True)]


def test_a_close_that_did_not_begin_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was touched: the set is open and said to be so until the next try. Found by the crash matrix."""
    monkeypatch.setattr("hicache_hooks.closer.RETRY_FIRST_S", 0.01)
    adapter = LightAdapter()
    closed = threading.Event()
    adapter.close = lambda parked, timeout_s: closed.set() or []  # type: ignore[method-assign,func-returns-value]
    done: list[Any] = []
    closer = Closer(adapter, done.append, Faults("close.before_apply=error"))
    closer.close(object())
    assert closed.wait(10)
    closer.stop(10)
    assert [c.stuck for c in done] == [("close_not_begun",), ()]
