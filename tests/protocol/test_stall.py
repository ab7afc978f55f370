"""Ranks that are ready and do not switch: found by the clock, named, and everybody is back in time (F114)."""

from contextlib import aclosing

import pytest
import trio
from tests.protocol.support import rig

from hicache_proto.errors import RolledBack


async def test_liar_is_found_by_the_clock(tmp_path):
    """F114: a rank that is frozen and then does not enter COMMIT: all go back before any lease could matter, and the
    answer and an event name it."""
    async with rig(tmp_path, tp=4) as (side, stub):
        stub.ranks[2].set(silent=frozenset({"commit"}))
        before = side.coordinator.ctx.hub.last_id
        with pytest.raises(RolledBack) as failed:
            await side.attach(timeout_s=20)
        assert failed.value.details["rolled_back"] is True
        assert failed.value.details["reason"] == "collective_stall"
        assert failed.value.details["silent_ranks"] == [2]
        assert "rank 2: no reply (back on the old state)" in failed.value.message
        assert stub.backends == dict.fromkeys(range(4))
        assert stub.settled()
        with trio.fail_after(5):
            async with aclosing(side.coordinator.ctx.hub.follow(dict, before)) as events:
                async for event in events:
                    if event.kind == "collective_stall":
                        break
        assert (event.data["ranks"], event.data["operation_id"]) == ([2], failed.value.operation_id)


async def test_a_rank_that_stands_alone_stalls_nobody(tmp_path):
    """The same with replicas of one rank each: none waits for it inside anything."""
    async with rig(tmp_path, dp=2) as (side, stub):
        stub.ranks[1].set(silent=frozenset({"commit"}))
        with pytest.raises(RolledBack) as failed:
            await side.attach(timeout_s=20)
        assert failed.value.details["reason"] == "no_reply"
        assert failed.value.details["silent_ranks"] == [1]
        assert stub.settled()
