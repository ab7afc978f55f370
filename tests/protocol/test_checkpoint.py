"""F58 in the coordinator, STUB(n): who is asked, what is refused, and what a failure is called."""

from functools import partial

import msgspec
import pytest
import trio
from tests.protocol.support import Side, rig
from tests.rigs.stub_engine import StubEngine
from tests.rigs.stub_link import CAPABLE, NEVER

from hicache_proto import api
from hicache_proto.errors import DeadlineExceeded, HicacheError, InvalidRequest, PrepareFailed, UnsupportedByEngine

CAN = msgspec.structs.replace(CAPABLE, checkpoint=True)


def able(stub: StubEngine) -> None:
    """Every rank can."""
    for rank in stub.ranks.values():
        rank.script.capabilities = CAN


def swap(**fields: object) -> api.AttachRequest:
    return api.AttachRequest(hicache_storage_backend="mem", swap=True, checkpoint=True, **fields)  # type: ignore[arg-type]


async def told(stub: StubEngine, rank: int, **changes: object) -> None:
    await trio.to_thread.run_sync(partial(stub.ranks[rank].set, **changes))


async def refused(side: Side, request: api.ApiRequest) -> HicacheError:
    with pytest.raises(HicacheError) as caught:
        await side.ask(request)
    return caught.value


@pytest.mark.parametrize(
    "request_",
    [
        swap(mode="hot"),
        api.DetachRequest(mode="hot", checkpoint=True),
        swap(dry_run=True),
        api.AttachRequest(hicache_storage_backend="mem", checkpoint=True),
    ],
)
async def test_what_makes_no_sense_is_refused_by_its_field(tmp_path, request_):
    async with rig(tmp_path, before=able) as (side, stub):
        await side.attach()
        error = await refused(side, request_)
        assert isinstance(error, InvalidRequest)
        assert error.details == {"field": "checkpoint"}
        assert stub.backends == {0: "file"}


@pytest.mark.parametrize("request_", [swap(), api.DetachRequest(checkpoint=True)])
async def test_an_engine_that_cannot_is_refused_by_name_before_anything(tmp_path, request_):
    """F12: SGLang, say. No rank hears of it."""
    async with rig(tmp_path, dp=2) as (side, stub):
        await side.attach()
        for rank in stub.ranks.values():
            rank.log.clear()
        error = await refused(side, request_)
        assert isinstance(error, UnsupportedByEngine)
        assert error.details["reason"] == "checkpoint"
        assert "store its tree before it lets a store go" in error.message
        assert [rank.log for rank in stub.ranks.values()] == [[], []]


async def test_every_rank_is_asked_and_the_answer_says_what_was_written(tmp_path):
    async with rig(tmp_path, dp=2, before=able) as (side, stub):
        await side.attach()
        assert [rank.checkpoints for rank in stub.ranks.values()] == [[False], [False]]
        for rank, pages in zip(stub.ranks.values(), (3, 4), strict=True):
            rank.script.checkpoint_pages = pages
        answer = await side.ask(swap())
        assert answer.notes == ["checkpoint: 7 pages were missing and are written"]
        assert [rank.checkpoints[-1] for rank in stub.ranks.values()] == [True, True]
        answer = await side.detach(checkpoint=True)
        assert (answer.success, set(stub.backends.values())) == (True, {None})
        answer = await side.detach(checkpoint=True)
        assert (answer.changed, answer.notes) == (False, ["checkpoint: no store is let go, so none was taken"])


async def test_a_failure_on_one_rank_keeps_the_store_on_all(tmp_path):
    """F58: fail closed, by name; in PREPARE nothing was frozen."""
    async with rig(tmp_path, dp=2, before=able) as (side, stub):
        await side.attach()
        why = PrepareFailed("checkpoint: the store took 3 of 4", details={"reason": "checkpoint_failed"})
        await told(stub, 1, build_error=why)
        error = await refused(side, api.DetachRequest(checkpoint=True))
        assert isinstance(error, PrepareFailed)
        assert error.details["reason"] == "checkpoint_failed"
        assert error.details["rolled_back"] is True
        assert "the store took 3 of 4" in error.message
        assert set(stub.backends.values()) == {"file"}
        assert (await side.status()).state == "attached"


async def test_a_failure_in_freeze_is_no_roll_back(tmp_path):
    async with rig(tmp_path, dp=2, before=able) as (side, stub):
        await side.attach()
        await told(stub, 0, freeze_error=PrepareFailed("checkpoint: no", details={"reason": "checkpoint_failed"}))
        error = await refused(side, swap(mode="drain"))
        assert (error.code, error.details["reason"]) == ("prepare_failed", "checkpoint_failed")
        assert set(stub.backends.values()) == {"file"}


async def test_the_deadline_is_the_operations_and_says_what_was_late(tmp_path):
    async with rig(tmp_path, dp=2, before=able) as (side, stub):
        await side.attach()
        await told(stub, 1, build_delay_s=NEVER)
        error = await refused(side, api.DetachRequest(checkpoint=True, timeout_s=0.5))
        assert isinstance(error, DeadlineExceeded)
        assert error.details["reason"] == "checkpoint_late"
        assert error.details["silent_ranks"] == [1]
        assert "nothing was cleared" in error.message
        assert set(stub.backends.values()) == {"file"}
