"""Rule 4 at the last moment: B is not written once the sidecar's clock cannot vouch for the leases any more."""

import pytest
import trio
from tests.protocol.support import rig

from hicache_proto.errors import RolledBack
from hicache_sidecar.engine import drive
from hicache_sidecar.engine.decide import write_in_time


@pytest.mark.parametrize("mode", ["strict", "drain", "hot"])
async def test_too_late_to_decide_is_a(tmp_path, monkeypatch, mode):
    """Every rank switched, then the sidecar stood still: nothing of B is on record, and all are on A again."""

    async def stood_still(write, _until):
        return await write_in_time(write, trio.current_time())

    async with rig(tmp_path, dp=2) as (side, stub):
        await side.attach()
        monkeypatch.setattr(drive, "write_in_time", stood_still)
        with pytest.raises(RolledBack) as failed:
            await side.attach("mem", swap=True, mode=mode)
        assert "stood still" in failed.value.message
        assert failed.value.details["rolled_back"] is True
        assert [row.result for row in side.journal.history] == ["adopted", "committed", "rolled_back"]
        assert {rank.opened[-1] for rank in stub.ranks.values()} == {"file"}
        assert all(rank.admission.count("close") == rank.admission.count("open") for rank in stub.ranks.values())
        document = await side.status()
        assert (document.state, document.drift) == ("attached", [])
        monkeypatch.undo()
        assert (await side.attach("mem", swap=True, mode=mode)).changed


async def test_the_write_is_the_last_thing(autojump_clock):
    """In time it is called, and what it raises goes up; too late it is not called."""
    calls = []
    assert await write_in_time(lambda: calls.append(1), trio.current_time() + 0.1)
    assert not await write_in_time(lambda: calls.append(2), trio.current_time())
    assert calls == [1]
    with pytest.raises(ZeroDivisionError):
        await write_in_time(lambda: 1 // 0, trio.current_time() + 1)
