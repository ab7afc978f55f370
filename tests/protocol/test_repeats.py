"""Idempotency keys (rule 15): a repeat gets the first answer, and a refusal before anything began binds nothing."""

import pytest
import trio
from tests.protocol.support import rig, stub_sees

from hicache_proto.errors import (
    InvalidRequest,
    NotIdle,
    PrepareFailed,
)


async def test_repeat_by_request_id(tmp_path):
    """A repeat gets the first answer; the same id with another body is refused; a failure is repeated as it was."""
    async with rig(tmp_path, dp=2) as (side, stub):
        first = await side.attach(request_id="r1")
        assert await side.attach(request_id="r1") == first
        assert side.journal.last_n == first.revision
        with pytest.raises(InvalidRequest) as other:
            await side.attach("mem", request_id="r1")
        assert other.value.details["reason"] == "idempotency_mismatch"
        stub.ranks[1].set(build_error=PrepareFailed("no"))
        failures = []
        for _ in range(2):
            with pytest.raises(PrepareFailed) as failed:
                await side.attach("mem", swap=True, request_id="r2")
            failures.append(failed.value)
        assert failures[0].operation_id == failures[1].operation_id
        assert failures[0].message == failures[1].message


async def test_a_repeat_of_what_changed_nothing_undoes_nobody(tmp_path):
    """The answer was lost on its way, somebody detached since: the repeat is the first answer, no new attachment."""
    async with rig(tmp_path, dp=2) as (side, stub):
        await side.attach()
        first = await side.attach(request_id="r1")
        assert not first.changed
        await side.detach()
        assert await side.attach(request_id="r1") == first
        assert stub.backends == {0: None, 1: None}
        with pytest.raises(InvalidRequest):
            await side.attach("mem", request_id="r1")


async def test_repeat_joins_the_running_operation(tmp_path):
    """A repeat while the first still runs waits for the same end."""
    async with rig(tmp_path) as (side, stub):
        stub.ranks[0].set(build_delay_s=0.4)
        answers = []

        async def put():
            answers.append(await side.attach(request_id="r1"))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(put)
            await stub_sees(stub, lambda: stub.ranks[0].rec.phase == "preparing")
            nursery.start_soon(put)
        assert answers[0].operation_id == answers[1].operation_id


async def test_repeat_after_a_restart(tmp_path):
    """The first answer is in the journal: a repeat after the sidecar's restart gets it."""
    async with rig(tmp_path) as (side, _stub):
        first = await side.attach(request_id="r1")
    async with rig(tmp_path) as (side, _stub):
        again = await side.attach(request_id="r1")
        assert again.operation_id == first.operation_id
        assert again.revision == first.revision


async def test_refusals_bind_nothing(tmp_path):
    """A refusal before BEGIN does not use up the request id."""
    async with rig(tmp_path) as (side, stub):
        stub.ranks[0].set(counters={"running_batch": 1})
        with pytest.raises(NotIdle):
            await side.attach(request_id="r1")
        stub.ranks[0].set(counters={})
        assert (await side.attach(request_id="r1")).changed
