"""F85: degraded states are first class. Every call is defined in every state, and none is an internal error.

The table is what operators get: ``ok``, or code and reason of the refusal.
"""

from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial

import msgspec
import pytest
import trio
from tests.protocol.support import endpoint, rig, sidecar, stub_sees
from tests.rigs.stub_engine import StubEngine
from tests.rigs.stub_link import NEVER

from hicache_proto import api
from hicache_proto.errors import HicacheError
from hicache_proto.failover import FailoverPolicy
from hicache_proto.model import State
from hicache_proto.transaction import RankPhase

ATTACH = api.AttachRequest(hicache_storage_backend="file")
CALLS = {
    "status": api.StatusRequest(fresh=True),
    "failover": api.SetFailoverRequest(policies={"file": FailoverPolicy(action="bypass")}),
    "clear": api.ClearRequest(confirm="ns-a"),
    "drain": api.DrainRequest(timeout_s=0.5, hold_s=5),
    "attach": ATTACH,
    "swap": api.AttachRequest(hicache_storage_backend="mem", swap=True),
    "detach": api.DetachRequest(),
}
BUSY = "operation_in_progress"
ILL = "quarantined rank_quarantined"
NOBODY = "no_engine no_rank"
OK = "ok"
#                status failover clear                      drain  attach  swap    detach
TABLE = {
    "detached": (OK, OK, "invalid_request detached", OK, OK, OK, OK),
    "attaching": (OK, OK, BUSY, BUSY, BUSY, BUSY, BUSY),
    "attached": (OK, OK, OK, OK, OK, OK, OK),
    "bypassed": (OK, OK, OK, OK, OK, OK, OK),
    "draining": (OK, OK, OK, OK, OK, OK, OK),
    "detaching": (OK, OK, BUSY, BUSY, BUSY, BUSY, BUSY),
    "quarantined": (OK, OK, OK, OK, ILL, ILL, ILL),
    "split": (OK, OK, "invalid_request detached", OK, "already_attached needs_swap", OK, OK),
    "engine_down": (OK, OK, NOBODY, NOBODY, NOBODY, NOBODY, NOBODY),
}


async def script(stub, rank, **changes):
    """Change what one rank does."""
    await trio.to_thread.run_sync(partial(stub.ranks[rank].set, **changes))


@asynccontextmanager
async def split(root):
    """First contact with ranks that disagree: nothing is touched."""

    def disagree(engine):
        state = engine.ranks[1].state
        engine.ranks[1].state = msgspec.structs.replace(state, backend="mem", config_digest="d")

    async with sidecar(root) as side:
        with StubEngine(endpoint(root), dp=2, before=disagree):
            await side.until(lambda: bool(side.coordinator.ctx.split))
            yield side


@asynccontextmanager
async def in_state(root, state):
    """A sidecar whose status says ``state``."""
    async with AsyncExitStack() as stack:
        if state == "engine_down":
            yield await stack.enter_async_context(sidecar(root))
            return
        if state == "split":
            yield await stack.enter_async_context(split(root))
            return
        side, stub = await stack.enter_async_context(rig(root, dp=2))
        nursery = await stack.enter_async_context(trio.open_nursery())

        async def run(request):
            with suppress(HicacheError):
                await side.ask(request)

        if state not in ("detached", "attaching"):
            await side.attach()
        if state == "bypassed":
            await side.ask(api.BypassRequest(enabled=True))
        elif state == "draining":
            await side.ask(api.DrainRequest(timeout_s=5, hold_s=30))
        elif state == "attaching":
            await script(stub, 1, build_delay_s=NEVER)
            nursery.start_soon(run, ATTACH)
            await stub_sees(stub, lambda: stub.ranks[1].rec.phase == "preparing")
        elif state == "detaching":
            await script(stub, 0, counters={"running_batch": 1})
            nursery.start_soon(run, api.DetachRequest(wait_timeout_s=20))
            await stub_sees(stub, lambda: ("watch_idle", 0) in stub.ranks[0].log)
        elif state == "quarantined":

            def spoil():  # as an undo that failed leaves a rank
                rank = stub.ranks[1]
                rank.quarantine, rank.rec = "why", msgspec.structs.replace(rank.rec, phase=RankPhase.QUARANTINED)
                rank.heartbeat()

            stub.do(spoil)
            await side.until(lambda: bool(side.coordinator.registry.live[1].report.quarantine))
        yield side
        nursery.cancel_scope.cancel()


async def said(side, call):
    """``ok``, or what the refusal says."""
    try:
        await side.ask(CALLS[call])
    except HicacheError as error:
        return f"{error.code} {error.details.get('reason', '')}".strip()
    return OK


@pytest.mark.parametrize("state", [each.value for each in State])
async def test_every_call_in_every_state(tmp_path, state):
    """Calls that change nothing first; one that changes the state is made in an engine of its own."""
    expected = dict(zip(CALLS, TABLE[state], strict=True))
    found = {}
    left = list(CALLS)
    for number in range(len(CALLS)):
        root = tmp_path / str(number)
        root.mkdir()
        async with in_state(root, state) as side:
            while left:
                got = (await side.status(fresh=False)).state
                if got != state:
                    assert found, f"{got} is not {state}"
                    break
                call = left.pop(0)
                found[call] = await said(side, call)
        if not left:
            break
    assert found == expected
