"""Status is what the ranks say, not what the sidecar remembers: who differs, who is silent, how old a report is."""

from functools import partial

import trio
from tests.protocol.support import fast, rig
from tests.rigs.stub_engine import StubEngine

from hicache_proto.model import EffectiveState
from hicache_sidecar.engine.coordinator import FRESH_S


def lose_backend(stub: StubEngine, rank: int) -> None:
    """The rank is detached without having been told."""
    stub.do(partial(setattr, stub.ranks[rank], "state", EffectiveState(namespace="ns-a")))
    stub.ranks[rank].set()  # returns when the stub's thread has done what was asked of it before


async def test_a_rank_that_lost_its_backend_by_itself_is_seen(tmp_path):
    """F55: the next status has agreed false, rank 1 detached, desired attached; nothing is repaired behind our back."""
    async with rig(tmp_path, dp=2) as (side, stub):
        answer = await side.attach()
        before = await side.status()
        assert (before.agreed, before.state, before.drift) == (True, "attached", [])
        await trio.to_thread.run_sync(lose_backend, stub, 1)
        after = await side.status()
        assert after.agreed is False
        assert (after.state, after.ranks[0].state, after.ranks[1].state) == ("split", "attached", "detached")
        assert after.desired is not None
        assert after.desired.hicache_storage_backend == "file"
        assert ("hicache_storage_backend", "file", None) in [(d.field, d.desired, d.reported) for d in after.drift]
        assert {d.rank for d in after.drift} == {1}
        assert after.revision == answer.revision
        assert stub.backends == {0: "file", 1: None}


async def test_all_ranks_alike_but_not_as_desired_is_not_agreed(tmp_path):
    """F55: they agree with each other, and not with what was asked for."""
    async with rig(tmp_path, dp=2) as (side, stub):
        await side.attach()
        for rank in (0, 1):
            await trio.to_thread.run_sync(lose_backend, stub, rank)
        status = await side.status()
        assert (status.agreed, status.state) == (False, "detached")
        assert {d.rank for d in status.drift} == {0, 1}


async def test_a_silent_rank_costs_one_short_deadline_and_its_age_is_shown(tmp_path):
    """F55: status asks all ranks with a short deadline; what a rank said earlier is marked with its age."""
    async with rig(tmp_path, fast(liveness_s=30.0), dp=2) as (side, stub):
        await side.attach()
        await trio.to_thread.run_sync(lambda: stub.ranks[1].set(muted=True))
        began = trio.current_time()
        status = await side.status(fresh=True)
        assert FRESH_S <= trio.current_time() - began < FRESH_S + 5
        answered, silent = status.ranks
        assert silent.report_age_ms >= FRESH_S * 1000
        assert answered.report_age_ms < silent.report_age_ms
        assert (silent.connected, silent.hicache_storage_backend) == (True, "file")


async def test_a_missing_rank_is_not_agreed(tmp_path):
    async with rig(tmp_path, dp=2) as (side, stub):
        assert (await side.status()).agreed is True
        await trio.to_thread.run_sync(stub.kill, 1)
        await side.until(lambda: side.coordinator.registry.missing_ranks == [1])
        status = await side.status(fresh=False)
        assert (status.agreed, status.missing_ranks) == (False, [1])
