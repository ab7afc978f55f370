"""Cancel in every phase: up to the decision all ranks are on the old state, admission open; after it, too late."""

import pytest
import trio
from tests.protocol.support import fast, rig, stub_sees
from tests.rigs.stub_link import NEVER

from hicache_proto import api
from hicache_proto.errors import InvalidRequest, NotFound, RolledBack

BUSY = {"counters": {"running_batch": 1}}
# Phase in which to cancel: what keeps rank 1 there, and the request.
PHASES = {
    "validate": ({"silent": frozenset({"validate"})}, {}),
    "prepare": ({"build_delay_s": NEVER}, {}),
    "wait": (BUSY, {"wait_timeout_s": 60.0}),
    "freeze": (BUSY, {"mode": "drain", "wait_timeout_s": 60.0}),
    "commit": ({"silent": frozenset({"commit"})}, {}),
}
CALM = {"silent": frozenset(), "build_delay_s": 0.0, "counters": {}}


@pytest.mark.parametrize("phase", PHASES)
async def test_cancel_restores_in(tmp_path, phase):
    """At once: a rank that does not answer VALIDATE is not waited for, nor a builder, nor a busy one."""
    script, options = PHASES[phase]
    async with rig(tmp_path, fast(validate_s=30.0, in_doubt_s=30.0, freeze_s=5.0), dp=2) as (side, stub):
        stub.ranks[1].set(**script)

        async def put():
            with pytest.raises(RolledBack) as cancelled:
                await side.attach(**options)
            assert cancelled.value.details["reason"] == "cancelled"

        async with trio.open_nursery() as nursery:
            nursery.start_soon(put)
            with trio.fail_after(10):
                while side.coordinator.ctx.running is None or side.coordinator.ctx.running.phase != phase:
                    await side.coordinator.ctx.registry.changed.park()
            if phase != "wait":
                await stub_sees(stub, lambda: any(said == phase for said, _ in stub.ranks[0].log))
            with trio.fail_after(5):
                document = await side.ask(api.CancelRequest(operation_id=side.coordinator.ctx.running.id))
            assert document.done
            assert document.error.details["reason"] == "cancelled"
        assert stub.backends == {0: None, 1: None}
        await stub_sees(stub, stub.settled)
        assert all(rank.admission.count("close") == rank.admission.count("open") for rank in stub.ranks.values())
        assert (await side.status()).drift == []
        if phase != "prepare":  # that builder never ends, and a rank has one
            stub.ranks[1].set(**CALM)
            assert (await side.attach(mode="drain")).changed


async def test_too_late_after_the_decision(tmp_path):
    """FINALIZE is on its way: refused by name, and the operation ends on the new state."""
    async with rig(tmp_path, dp=2) as (side, stub):
        stub.ranks[1].set(finalize_silent=True)
        answers = []

        async def put():
            answers.append(await side.attach())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(put)
            await stub_sees(stub, lambda: any(said == "finalize" for said, _ in stub.ranks[1].log))
            with pytest.raises(InvalidRequest) as refused:
                await side.ask(api.CancelRequest(operation_id=side.coordinator.ctx.running.id))
            assert refused.value.details == {"reason": "too_late", "phase": "finalize"}
            stub.ranks[1].set(finalize_silent=False)
        assert answers[0].changed
        assert stub.backends == {0: "file", 1: "file"}


async def test_an_operation_of_before_a_restart_is_found_in_the_history(tmp_path):
    """Its client was told to look: what became of it is said where it asks."""
    async with rig(tmp_path, dp=2) as (side, _):
        answer = await side.attach()
        side.coordinator.ctx.jobs.clear()  # as after a restart
        with pytest.raises(NotFound) as unknown:
            await side.ask(api.OperationsRequest(operation_id=answer.operation_id))
        assert unknown.value.hint == f"the history has it: attach committed, revision {answer.revision}"
        with pytest.raises(NotFound, match="since the sidecar started") as unknown:
            await side.ask(api.CancelRequest(operation_id="op-none"))
        assert "or it changed nothing" in unknown.value.hint
