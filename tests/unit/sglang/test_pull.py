"""The pull hook with a real ``RankHook``: the gate, commands on the broadcast, and that nothing reaches the engine."""

import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.rigs.light_adapter import LightAdapter
from tests.unit.sglang.test_held import Abort, Engine, Work
from tests.unit.sglang.test_wake import LONG_MS, Sleeper

from hicache_hooks.hook import RankHook
from hicache_hooks.sglang import pull as pulling
from hicache_hooks.sglang.held import Held
from hicache_hooks.sglang.pull import Pull
from hicache_hooks.sglang.quiet import Quiet
from hicache_hooks.sglang.wake import Pulse, Waker
from hicache_hooks.sglang.world import BroadcastWorld, HookCommand
from hicache_hooks.world import WorldCommand, decode
from hicache_proto.hooklink import Call, Freeze, Hold, Prepare, Release, Undo, phase_of
from hicache_proto.model import RankIdentity, TargetState
from hicache_proto.transaction import RankPhase


class Dispatcher:
    """The engine's request dispatcher."""

    def __init__(self) -> None:
        self._mapping: dict[type, Any] = {}


class Scheduler:
    """The engine's loop, as far as requests go."""

    def __init__(self, leader: bool = True, ranks: int = 1, sleeper: Any = None) -> None:
        self._request_dispatcher = Dispatcher()
        identity = RankIdentity(tp_rank=0 if leader else 1, tp_size=ranks)
        self.world = BroadcastWorld(leader=leader, ranks=ranks)
        self.quiet = Quiet()
        self.hook = RankHook(
            LightAdapter(identity),
            "ipc:///nowhere",
            engine_id="e",
            incarnation="i",
            injector=self.world,
            postpone=self.quiet.postpone,
            start=False,
        )
        self.engine = Engine()
        self.repaired = threading.Event()
        self.waker = Waker(sleeper, self.quiet.end)
        held = Held(self.engine)
        self.pull = Pull(self.hook, self.world, held, self.waker, self.repaired.set, self.quiet)
        self.world.bind(self, self.execute)
        pulling.install(self.pull)
        self.ran: list[Any] = []
        self._calls = 0

    def execute(self, command: WorldCommand) -> None:
        self.hook.execute_injected(command)
        self.pull.executed()

    def loop(self, *pulled: Any) -> list[Any]:
        """One iteration; returns what the engine got to run."""
        requests = pulling.on_pull(list(pulled))
        requests = list(pulled) if requests is None else requests
        out = []
        for request in requests:
            if isinstance(request, HookCommand):
                assert self._request_dispatcher._mapping[HookCommand](request) is None
            else:
                out.append(request)
        return out

    def send(self, body: Any, n: int = 0) -> None:
        self._calls += 1
        self.hook.deliver(Call("", n, phase_of(body), self._calls, body))


@pytest.fixture
def scheduler() -> Iterator[Scheduler]:
    made = Scheduler()
    yield made
    made.hook.close()
    pulling.install(None)


def prepared(scheduler: Scheduler, n: int = 1) -> None:
    scheduler.send(Prepare(TargetState(backend="file"), prepared_s=30), n)
    for _ in range(1000):
        scheduler.loop()
        if scheduler.hook.transaction.record.phase is RankPhase.PREPARED:
            return
        threading.Event().wait(0.002)
    raise AssertionError("not prepared")


def test_an_idle_pass_changes_nothing(scheduler: Scheduler) -> None:
    """The pulled list itself goes on: None tells the engine's registry to keep it."""
    assert pulling.on_pull([Work("a")], object()) is None
    assert pulling.on_pull(None) is None


def test_a_freeze_holds_and_an_undo_releases_in_order(scheduler: Scheduler) -> None:
    prepared(scheduler)
    scheduler.send(Freeze(round=1, freeze_s=5), 1)
    assert scheduler.loop(Work("before")) == [Work("before")]  # pulled before the command ran
    assert scheduler.hook.transaction.record.phase is RankPhase.FROZEN
    assert scheduler.loop(Work("a"), "flush") == ["flush"]
    assert scheduler.loop(Work("b"), Abort("a")) == [Abort("a")]
    assert scheduler.engine.aborted == ["a"]
    scheduler.send(Undo(), 1)
    assert scheduler.loop(Work("c")) == []  # the undo runs behind what was pulled
    assert scheduler.loop(Work("d")) == [Work("b"), Work("c"), Work("d")]
    assert scheduler.loop(Work("e")) == [Work("e")]


def test_turns_are_short_exactly_while_a_backend_is_built(scheduler: Scheduler) -> None:
    """A builder that computes in Python must not take milliseconds of each pass from the scheduler thread."""
    usual_s = sys.getswitchinterval()
    scheduler.send(Prepare(TargetState(backend="file"), prepared_s=30), 1)
    for _ in range(1000):
        scheduler.loop()
        building = scheduler.hook.transaction.record.phase is RankPhase.PREPARING
        assert (sys.getswitchinterval() < usual_s / 2) == building
        if not building:
            return
        threading.Event().wait(0.002)
    raise AssertionError("not prepared")


def test_a_manual_hold_and_its_release(scheduler: Scheduler) -> None:
    scheduler.send(Hold(name="drain", hold_s=30))
    assert scheduler.loop(Work("a")) == []
    scheduler.send(Release(name="drain"))
    assert scheduler.loop(Work("b")) == [Work("a"), Work("b")]


def test_commands_ride_behind_what_was_pulled(scheduler: Scheduler) -> None:
    scheduler.world.inject(WorldCommand("undo", 1))
    scheduler.hook.pending = True
    requests = pulling.on_pull(["x"])
    assert requests is not None
    assert requests[0] == "x"
    assert decode(requests[1].data) == WorldCommand("undo", 1)
    assert not scheduler.world.waiting


def test_a_rank_that_does_not_pull_gets_no_list() -> None:
    """The engine tells pulling ranks from others by None."""
    scheduler = Scheduler(leader=False, ranks=2)
    scheduler.send(Hold(name="drain", hold_s=30))
    assert pulling.on_pull(None) is None
    scheduler.hook.close()
    pulling.install(None)


def test_a_damaged_command_does_not_end_the_scheduler(scheduler: Scheduler) -> None:
    scheduler._request_dispatcher._mapping[HookCommand](HookCommand(b"\xff"))


def test_a_defect_of_ours_leaves_the_engine_what_it_pulled(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RankHook, "admit", lambda self: 1 // 0)
    scheduler.hook.pending = True
    assert scheduler.loop(Work("a")) == [Work("a")]


def test_dead_threads_are_repaired_on_the_schedulers_thread(scheduler: Scheduler) -> None:
    scheduler.pull.ask_repair()
    assert not scheduler.repaired.is_set()
    scheduler.loop()
    assert scheduler.repaired.is_set()


@pytest.mark.parametrize("leader", [True, False])
def test_a_wake_up_with_nothing_to_do_is_forgotten_at_the_pull(leader: bool) -> None:
    """A descriptor that stays readable in the engine's poller makes a sleeping scheduler spin after an operation."""
    sleeper = Sleeper()
    scheduler = Scheduler(leader=leader, ranks=2, sleeper=sleeper)
    wanted = threading.Event()
    wanted.set()
    pulse = Pulse(scheduler.waker, wanted.is_set)
    pulse.start()
    pulse.kick()
    pulled: list[Any] | None = [] if leader else None
    for _ in range(3):  # PREPARE: passes while the operation is open, and no more than that
        assert sleeper.poller.poll(LONG_MS)
        pulling.on_pull(pulled)
    wanted.clear()
    deadline = time.monotonic() + 10
    while sleeper.poller.poll(200):  # the flag follows the write
        pulling.on_pull(pulled)
        assert time.monotonic() < deadline, "the descriptor stays readable: the scheduler spins"
    scheduler.hook.close()
    pulling.install(None)
