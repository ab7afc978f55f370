"""F70 in the sidecar: ranks that found their store emptied, STUB(2), real ZMQ. News, and never a failure."""

from functools import partial
from typing import Any

import pytest
import trio
from tests.protocol.support import Side, endpoint, rig, sidecar
from tests.rigs.stub_engine import StubEngine

from hicache_proto.failover import FailoverPolicy, SetFailoverRequest
from hicache_proto.model import EpochChange


def events(side: Side) -> list[dict[str, Any]]:
    return [event.data for event in side.coordinator.ctx.hub._ring if event.kind == "store_epoch_changed"]


async def found_empty(stub: StubEngine, rank: int, n: int, **fields: Any) -> None:
    change = EpochChange(n=n, old=fields.pop("old", "1"), new=fields.pop("new", "2"), **fields)
    await trio.to_thread.run_sync(partial(stub.ranks[rank].set, epoch_change=change))


async def test_one_event_per_rank_and_change_and_no_failover(tmp_path):
    """F70: old and new epoch and the rank, a warning in status, the store stays, no error, no failover."""
    async with rig(tmp_path, dp=2) as (side, stub):
        await side.attach()
        policy = FailoverPolicy(action="detach", confirm_s=0.0, min_stay_s=0.0)
        await side.ask(SetFailoverRequest(policies={"file": policy}))
        await found_empty(stub, 1, 1)
        await side.until(lambda: len(events(side)) == 1)
        await found_empty(stub, 0, 1, how="inferred")
        await side.until(lambda: len(events(side)) == 2)
        assert events(side) == [
            {"rank": 1, "backend": "file", "old": "1", "new": "2", "how": "said"},
            {"rank": 0, "backend": "file", "old": "1", "new": "2", "how": "inferred"},
        ]
        status = await side.status()
        assert status.state == "attached"
        assert status.hicache_storage_backend == "file"
        assert [text.split(":")[0] for text in status.warnings] == ["store_epoch_changed"] * 2
        assert "rank 1: file lost what it held 0 s ago (epoch 1 -> 2, said)" in status.warnings[1]
        driver = side.coordinator.failover
        assert (driver.machine.state, list(driver.steps)) == ("watching", [])
        assert {r.guard.epoch_change.new for r in status.ranks if r.guard and r.guard.epoch_change} == {"2"}


async def test_told_once_over_reports_connections_and_other_stores(tmp_path):
    """The number counts over all stores of a process, so that neither a new session nor a swap hides or repeats one."""
    async with rig(tmp_path) as (side, stub):
        await side.attach()
        await found_empty(stub, 0, 1)
        await side.until(lambda: len(events(side)) == 1)
        session = side.coordinator.registry.ranks[0].id
        stub.do(stub.ranks[0].connect)
        await side.until(lambda: side.coordinator.registry.ranks[0].id != session)
        await side.attach("mem", swap=True)
        assert len(events(side)) == 1
        await found_empty(stub, 0, 2, old="a", new="b")
        await side.until(lambda: len(events(side)) == 2)
        assert events(side)[-1] == {"rank": 0, "backend": "mem", "old": "a", "new": "b", "how": "said"}


async def test_what_happened_before_we_met_is_status_alone(tmp_path):
    """A sidecar that restarts does not tell it again; the status still has it."""
    with StubEngine(endpoint(tmp_path)) as stub:
        async with sidecar(tmp_path) as side:
            await side.ready()
            await side.attach()
            await found_empty(stub, 0, 1)
            await side.until(lambda: len(events(side)) == 1)
        async with sidecar(tmp_path) as side:
            await side.ready()
            assert events(side) == []
            (rank,) = (await side.status()).ranks
            assert rank.guard is not None
            assert rank.guard.epoch_change is not None
            await found_empty(stub, 0, 2, old="2", new="3")
            await side.until(lambda: len(events(side)) == 1)


@pytest.mark.parametrize(("ago_s", "warns"), [(599.0, True), (600.0, False)])
async def test_the_warning_ends_and_the_fact_stays(tmp_path, ago_s, warns):
    async with rig(tmp_path) as (side, stub):
        await side.attach()
        await found_empty(stub, 0, 1, ago_s=ago_s)
        await side.until(lambda: len(events(side)) == 1)
        assert bool((await side.status()).warnings) is warns
