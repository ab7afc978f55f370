"""A link that is cut while VALIDATE is on its way: a rank that is back within its grace costs nobody a refusal."""

from dataclasses import replace
from functools import partial

import pytest
import trio
from tests.protocol.support import FAST, Side, rig, stub_sees
from tests.rigs.stub_engine import StubEngine

from hicache_proto.errors import NoEngine

# The stub's socket may need its second hello, 1 s after the first.
PATIENT = replace(FAST, reconnect_grace_s=8.0, liveness_s=9.0, validate_s=10.0)


async def unheard(side: Side, stub: StubEngine) -> None:
    """Rank 1 takes no VALIDATE; returns once it has let its question pass, and will take the next one."""
    await stub_sees(stub, lambda: ("validate", 0) in stub.ranks[0].log and "validate" in stub.ranks[1].ignored)
    await trio.to_thread.run_sync(partial(stub.ranks[1].set, silent=frozenset()))


async def test_a_rank_that_reconnects_in_validate_is_asked_again(tmp_path):
    """F32: it was refused with no_engine, although nothing was wrong a moment later."""
    async with rig(tmp_path, PATIENT, dp=2) as (side, stub):
        await trio.to_thread.run_sync(partial(stub.ranks[1].set, silent=frozenset({"validate"})))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(side.attach)
            await unheard(side, stub)
            stub.do(stub.ranks[1].connect)
        assert stub.backends == {0: "file", 1: "file"}
        assert [phase for phase, _ in stub.ranks[0].log].count("validate") == 1  # who answered is not asked again


async def test_a_rank_that_cannot_be_reached_for_a_moment_is_waited_for(tmp_path):
    async with rig(tmp_path, PATIENT, dp=2) as (side, stub):
        registry = side.coordinator.registry
        session = registry.live[1]

        def cut() -> None:
            stub.ranks[1].socket.close(linger=0)
            stub.ranks[1].socket = None

        stub.do(cut)
        with trio.fail_after(5.0):
            while registry.link.reachable(session.id, registry._welcome(session)):  # noqa: ASYNC110
                await trio.sleep(0.01)  # libzmq does not say whose connection broke
        assert session.alive
        async with trio.open_nursery() as nursery:
            nursery.start_soon(side.attach)
            await stub_sees(stub, lambda: ("validate", 0) in stub.ranks[0].log)
            stub.do(stub.ranks[1].connect)
        assert stub.backends == {0: "file", 1: "file"}


async def test_another_process_in_its_place_is_not_asked_for_it(tmp_path):
    async with rig(tmp_path, PATIENT, dp=2) as (side, stub):
        await trio.to_thread.run_sync(partial(stub.ranks[1].set, silent=frozenset({"validate"})))
        async with trio.open_nursery() as nursery:

            async def refused() -> None:
                with pytest.raises(NoEngine):
                    await side.attach()

            nursery.start_soon(refused)
            await unheard(side, stub)
            await trio.to_thread.run_sync(lambda: stub.replace(1))


async def test_a_rank_that_stays_away_is_refused_after_its_grace(tmp_path):
    async with rig(tmp_path, dp=2) as (side, stub):
        await trio.to_thread.run_sync(partial(stub.ranks[1].set, silent=frozenset({"validate"})))
        async with trio.open_nursery() as nursery:

            async def refused() -> None:
                with pytest.raises(NoEngine) as said:
                    await side.attach()
                assert said.value.details["missing_ranks"] == [1]

            nursery.start_soon(refused)
            await unheard(side, stub)
            await trio.to_thread.run_sync(lambda: stub.kill(1))
