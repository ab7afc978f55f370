"""Two ranks that share one control broadcast: all act in the same iteration, and only the leader's clock counts."""

import threading
from collections import deque
from collections.abc import Iterator

import pytest
from tests.hooks.driver import DEADLINE_S, FILE, Driver, FakeClock

from hicache_hooks.world import WorldCommand, decode, encode
from hicache_proto.hooklink import Answer, Call, CallBody, Commit, Finalize, Freeze, Prepare, Thaw, Undo
from hicache_proto.model import RankIdentity
from hicache_proto.transaction import RankPhase


class Broadcast:
    """An engine's control broadcast: the leader's commands, each to every rank in one iteration.

    ``agree`` is a real collective, so each rank executes on a thread of its own, as the processes of a world do.
    """

    def __init__(self, size: int) -> None:
        self.queue: deque[bytes] = deque()
        self.barrier = threading.Barrier(size)
        self.votes: list[bool] = []
        self.lock = threading.Lock()

    def vote(self, ok: bool) -> bool:
        with self.lock:
            self.votes.append(ok)
        self.barrier.wait(DEADLINE_S)
        agreed = all(self.votes)
        if self.barrier.wait(DEADLINE_S) == 0:
            self.votes.clear()
        self.barrier.wait(DEADLINE_S)
        return agreed


class Port:
    """One rank's Injector."""

    def __init__(self, broadcast: Broadcast, leader: bool, ranks: int) -> None:
        self._broadcast = broadcast
        self.leader = leader
        self.ranks = ranks

    def inject(self, command: WorldCommand) -> None:
        assert self.leader, "only the leader injects"
        self._broadcast.queue.append(encode(command))

    def agree(self, ok: bool) -> bool:
        return self._broadcast.vote(ok)


class World:
    """A world of ``size`` tensor-parallel ranks, each with its own clock."""

    def __init__(self, size: int = 2, faults: tuple[str, ...] = ("", "")) -> None:
        self.broadcast = Broadcast(size)
        self.ranks = [
            Driver(
                identity=RankIdentity(tp_rank=tp, tp_size=size),
                injector=Port(self.broadcast, tp == 0, size),
                clock=FakeClock(),
                faults=faults[tp],
            )
            for tp in range(size)
        ]

    def iterate(self) -> None:
        """One iteration of the world: hooks run, then what was injected is executed everywhere."""
        for rank in self.ranks:
            rank.turn()
        while self.broadcast.queue:
            command = decode(self.broadcast.queue.popleft())
            threads = [threading.Thread(target=r.hook.execute_injected, args=(command,)) for r in self.ranks]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(DEADLINE_S)
                assert not thread.is_alive(), "a rank hangs in the collective"
        for rank in self.ranks:
            rank.turn()

    def ask(self, body: CallBody, n: int) -> list[Answer]:
        """To every rank; all answers."""
        calls = [rank.send(body, n) for rank in self.ranks]
        self.iterate()
        return [rank.answer_to(call) for rank, call in zip(self.ranks, calls, strict=True)]

    def prepared(self, n: int = 1) -> None:
        assert all(a.ok for a in self.ask(Prepare(target=FILE, prepared_s=30), n))

    def frozen(self, n: int = 1) -> None:
        self.prepared(n)
        assert all(a.ok for a in self.ask(Freeze(round=1, freeze_s=5), n))

    @property
    def phases(self) -> list[RankPhase]:
        return [rank.phase for rank in self.ranks]

    @property
    def backends(self) -> list[str | None]:
        return [rank.backend for rank in self.ranks]


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    for rank in made.ranks:
        rank.hook.close()


def test_all_ranks_act_when_the_broadcast_comes_not_when_their_call_does(world: World) -> None:
    world.prepared()
    leader, other = world.ranks
    early: Call = other.send(Freeze(round=1, freeze_s=5), 1)
    assert other.turn() == [], "registered, not applied"
    assert other.hook.gate.is_open
    late = leader.send(Freeze(round=1, freeze_s=5), 1)
    leader.turn()
    assert leader.hook.gate.is_open, "the leader too waits for its own broadcast"
    world.iterate()
    assert world.phases == ["frozen", "frozen"]
    assert other.answer_to(early).ok
    assert leader.answer_to(late).ok


def test_a_call_that_comes_after_the_broadcast_is_answered_from_the_state(world: World) -> None:
    world.prepared()
    leader, other = world.ranks
    call = leader.send(Freeze(round=1, freeze_s=5), 1)
    world.iterate()
    assert leader.answer_to(call).ok
    assert other.ask(Freeze(round=1, freeze_s=5), 1).ok


def test_a_whole_operation(world: World) -> None:
    world.frozen()
    assert all(a.ok for a in world.ask(Thaw(round=1, prepared_s=30), 1))
    assert all(a.ok for a in world.ask(Freeze(round=2, freeze_s=5), 1))
    assert all(a.ok for a in world.ask(Commit(in_doubt_s=10), 1))
    assert all(a.ok for a in world.ask(Finalize(), 1))
    assert world.backends == ["file", "file"]
    assert all(rank.hook.gate.is_open for rank in world.ranks)


def test_one_no_and_nobody_begins_to_switch(world: World) -> None:
    """Rule 11, F11, F33: rank 1 got work between FREEZE and COMMIT. A swap may enter the engine's collectives, so the
    leader, which is ready, does not begin one that rank 1 would stay out of."""
    world.frozen()
    world.ranks[1].adapter.counters["ongoing_backup"] = 1
    answers = world.ask(Commit(in_doubt_s=10), 1)
    assert [a.ok for a in answers] == [False, False]
    assert answers[1].error is not None
    assert answers[1].error.code == "not_idle"
    assert answers[0].error is not None
    assert answers[0].error.details["reason"] == "world_not_ready"
    assert world.backends == [None, None]
    assert [rank.adapter.calls.count("swap") for rank in world.ranks] == [0, 0]
    assert all(a.ok for a in world.ask(Undo(), 1))
    for rank in world.ranks:
        rank.settle()


def test_a_swap_that_fails_on_one_rank_swaps_the_other_back() -> None:
    """F33, F114: every rank enters the agreement whatever its own swap did; nobody hangs."""
    world = World()
    world.frozen()
    world.ranks[1].adapter.swap = lambda new: 1 // 0  # type: ignore[method-assign]
    answers = world.ask(Commit(in_doubt_s=10), 1)
    assert [a.ok for a in answers] == [False, False]
    assert answers[1].error is not None
    assert answers[1].error.details["reason"] == "swap_failed"
    assert world.backends == [None, None]
    assert world.ranks[0].adapter.calls.count("swap") == world.ranks[0].adapter.calls.count("swap_back") == 1
    assert all(a.ok for a in world.ask(Undo(), 1))


def test_only_the_leaders_clock_ends_a_freeze(world: World) -> None:
    """F34: rank 1's clock runs away; nothing happens there. The leader's lease ends, and both are back."""
    world.frozen()
    leader, other = world.ranks
    other.clock.forward(1000)
    world.iterate()
    assert world.phases == ["frozen", "frozen"]
    assert all(a.ok for a in world.ask(Commit(in_doubt_s=10), 1))
    leader.clock.forward(11)
    leader.hook.pending = True
    world.iterate()
    assert [rank.ended for rank in world.ranks] == ["expired", "expired"]
    assert world.backends == [None, None]
    assert all(rank.hook.gate.is_open for rank in world.ranks)


def test_the_leaders_lease_decides_about_a_commit(world: World) -> None:
    world.frozen()
    world.ranks[0].clock.forward(6)
    answers = world.ask(Commit(in_doubt_s=10), 1)
    assert all(a.error is not None and a.error.details["reason"] == "expired" for a in answers)
    assert world.backends == [None, None]


def test_a_rank_that_was_never_frozen_still_ends_its_prepared_set(world: World) -> None:
    """The leader never heard of n: the other rank's own lease closes what it built."""
    leader, other = world.ranks
    assert other.prepare(1).ok
    other.clock.forward(31)
    other.hook.pending = True
    world.iterate()
    assert other.ended == "expired"
    assert leader.phase is RankPhase.NONE
    other.settle()


def test_an_operation_that_the_leader_forgot_freezes_nobody(world: World) -> None:
    leader, other = world.ranks
    world.prepared()
    leader.clock.forward(31)
    leader.hook.pending = True
    world.iterate()
    assert (leader.ended, other.phase) == ("expired", "prepared")
    answers = world.ask(Freeze(round=1, freeze_s=5), 1)
    assert [a.ok for a in answers] == [False, True], "rank 1 froze alone, the sidecar hears the no and undoes"
    assert all(a.ok for a in world.ask(Undo(), 1))
    assert all(rank.hook.gate.is_open for rank in world.ranks)


def test_commands_fit_any_channel() -> None:
    command = WorldCommand("freeze", 3, 2, 5.0, drain=True)
    assert decode(encode(command)) == command
