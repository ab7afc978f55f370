"""Failover beside an operator, on real ZMQ: who acts first, who lets go, and what an answer "success" is worth."""

import threading
import time
from functools import partial

import pytest
import trio
from tests.protocol.support import Side, endpoint, rig, sidecar, stub_sees
from tests.protocol.test_failover import MEM, bypassed, follow, make_sick, quick, steps
from tests.rigs.stub_engine import StubEngine

from hicache_proto import api
from hicache_proto.errors import DeadlineExceeded

FOR_LONG = {"backoff_s": 300.0, "backoff_max_s": 300.0}


def state(side: Side) -> str:
    return side.coordinator.failover.machine.state


def told(stub: StubEngine, rank: int = 0) -> int:
    """How often a rank was told of a bypass."""
    return [phase for phase, _ in stub.ranks[rank].log].count("bypass")


async def script(stub: StubEngine, rank: int, **changes: object) -> None:
    await trio.to_thread.run_sync(partial(stub.ranks[rank].set, **changes))


async def in_episode(side: Side, stub: StubEngine, where: str) -> None:
    """Bring a failover to ``where``; both ranks then answer bypass, rank 1 a quarter of a second late."""
    await side.attach()
    spares = [MEM] if where == "on_spare" else []
    action = "spares" if spares else "bypass"
    pauses = {"steady_s": 300.0} if where == "trial" else FOR_LONG
    await follow(side, file=quick(action, spares=spares, **pauses))
    await make_sick(stub, "file")
    if where == "trial":
        await side.until(lambda: state(side) == "bypassed")
        await make_sick(stub)
    await side.until(lambda: state(side) == where)
    await stub_sees(stub, lambda: bypassed(stub) == {where == "bypassed"})
    await script(stub, 1, answer_delay_s={"bypass": 0.25})


@pytest.mark.parametrize(("where", "enabled"), [("on_spare", True), ("trial", True), ("bypassed", False)])
async def test_an_operators_bypass_stands_from_its_first_answer_on(tmp_path, where, enabled):
    """The first rank's report woke the failover, which took the switch for a left-over and undid it."""
    async with rig(tmp_path, dp=2) as (side, stub):
        await in_episode(side, stub, where)
        before, so_far = told(stub), len(steps(side))
        answer = await side.ask(api.BypassRequest(enabled=enabled))
        assert answer.success
        assert side.coordinator.failover.machine.episode is None
        assert side.journal.settings["failover"]["episode"] is None  # durable when answered
        await side.status()  # whatever was still on its way to the ranks is there
        assert bypassed(stub) == {enabled}
        assert told(stub) == before + 1
        await side.until(lambda: steps(side)[so_far:])  # told by the driver, a turn after the answer
        assert steps(side)[so_far:] == ["ended"]


@pytest.mark.parametrize(("where", "enabled"), [("on_spare", True), ("bypassed", False)])
async def test_an_operators_bypass_stands_where_one_rank_could_not_be_told(tmp_path, where, enabled):
    async with rig(tmp_path, dp=2) as (side, stub):
        await in_episode(side, stub, where)
        await script(stub, 1, silent=frozenset({"bypass"}))
        before = told(stub)
        with pytest.raises(DeadlineExceeded):
            await side.ask(api.BypassRequest(enabled=enabled))
        await side.status()
        assert side.coordinator.failover.machine.episode is None
        assert (stub.ranks[0].state.bypass, told(stub)) == (enabled, before + 1)


async def test_an_operators_detach_has_ended_it_before_anybody_is_woken(tmp_path):
    """A return that fell due while the DELETE ran, which changed nothing, was made in the moment of its end."""
    async with rig(tmp_path) as (side, stub):
        await side.attach()
        await follow(side, file=quick("detach", **FOR_LONG))
        await make_sick(stub, "file")
        await side.until(lambda: state(side) == "detached")
        seen: list[object] = []
        side.coordinator.ctx.on_end.append(lambda _: seen.append(side.coordinator.failover.machine.episode))
        assert (await side.detach()).changed is False
        assert seen == [None]


async def test_an_operators_change_that_lost_its_client_counts(tmp_path):
    """The operation goes on, and so does what it means."""
    async with rig(tmp_path) as (side, stub):
        await side.attach()
        await follow(side, file=quick("detach", **FOR_LONG))
        await make_sick(stub, "file")
        await side.until(lambda: state(side) == "detached")
        await script(stub, 0, answer_delay_s={"validate": 0.2})
        with trio.move_on_after(0.05):
            await side.detach()
        await side.until(lambda: side.coordinator.failover.machine.episode is None)


async def test_a_repeated_request_id_is_no_new_word_of_an_operator(tmp_path):
    async with rig(tmp_path) as (side, stub):
        first = await side.attach(request_id="once")
        await follow(side, file=quick("detach", **FOR_LONG))
        await make_sick(stub, "file")
        await side.until(lambda: state(side) == "detached")
        again = await side.attach(request_id="once")
        assert again.operation_id == first.operation_id
        assert side.coordinator.failover.machine.episode is not None
        assert "ended" not in steps(side)


async def test_a_move_is_decided_again_after_the_journal_was_written(tmp_path, monkeypatch):
    """An operator's change during the fsync of the decision ends the episode: the operation must not begin."""
    async with rig(tmp_path) as (side, stub):
        await side.attach()
        write, writing, go_on = side.journal.set, threading.Event(), threading.Event()

        def slow(name: str, value: dict[str, object]) -> None:
            episode = value["episode"]
            if isinstance(episode, dict) and episode["moving"]:
                writing.set()
                go_on.wait(10.0)
            write(name, value)

        monkeypatch.setattr(side.journal, "set", slow)
        await follow(side, file=quick("detach", **FOR_LONG))
        await make_sick(stub, "file")
        try:
            assert await trio.to_thread.run_sync(writing.wait, 10.0)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(side.ask, api.BypassRequest(enabled=False))
                await side.until(lambda: side.coordinator.failover.machine.episode is None)
                go_on.set()
        finally:
            go_on.set()
        await side.until(lambda: side.journal.settings["failover"]["episode"] is None)  # the driver went on
        assert [job.kind for job in side.coordinator.ctx.jobs.values()] == ["attach"]
        assert (stub.backends, bypassed(stub)) == ({0: "file"}, {False})


async def test_the_earliest_return_is_kept_on_the_wall_clock(tmp_path):
    """F84: min_stay_s outlives the sidecar; a process's own clock does not."""
    async with sidecar(tmp_path) as side:
        with StubEngine(endpoint(tmp_path)) as stub:
            await side.ready()
            await side.attach()
            await follow(side, file=quick("detach", min_stay_s=200.0))
            await make_sick(stub, "file")
            await side.until(lambda: state(side) == "detached")
            kept = side.journal.settings["failover"]["return_at"]
            assert 150.0 < kept - time.time() < 201.0
            side.journal.set("failover", side.journal.settings["failover"] | {"return_at": kept - 100.0})
            side.scope.cancel()
            await trio.lowlevel.checkpoint_if_cancelled()
    async with sidecar(tmp_path) as side:
        left_s = side.coordinator.failover.machine.pace.not_before - trio.current_time()
        assert 50.0 < left_s < 101.0
