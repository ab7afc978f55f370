"""A clean stop of the sidecar in mid-operation: undone at once and the client told, not left to the leases."""

import signal
import threading
import time

import pytest
import trio
from tests.protocol.support import rig, stub_sees
from tests.rigs.procs import Processes, http_ok
from tests.rigs.rank_process import RankProcess
from tests.rigs.stub_link import NEVER

from hicache_proto import api
from hicache_proto.errors import HicacheError, Internal, OperationInProgress, RolledBack
from hicache_sidecar.client import Client

SOON_S = 0.7


async def begun(side, stub, seen, request=None):
    """Start an operation, stop the coordinator once ``seen()`` holds in the stub; the error, and how long it took."""
    caught = []

    async def ask():
        try:
            caught.append(await side.ask(request or api.AttachRequest(hicache_storage_backend="file")))
        except HicacheError as error:
            caught.append(error)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await stub_sees(stub, seen)
        started = trio.current_time()
        await side.coordinator.leave(SOON_S)
        took_s = trio.current_time() - started
    return caught[0], took_s


@pytest.mark.parametrize("phase", ["prepare", "freeze", "commit"])
async def test_an_operation_in_flight_is_undone(tmp_path, phase):
    """Before the outcome: UNDO to every rank, admission open, nothing left, and nothing new begins."""
    async with rig(tmp_path, dp=2) as (side, stub):
        if phase == "prepare":
            stub.ranks[1].set(build_delay_s=NEVER)
        else:
            stub.ranks[1].set(silent=frozenset({phase}))
        error, took_s = await begun(side, stub, lambda: (phase, 2) in stub.ranks[0].log)
        assert isinstance(error, RolledBack)
        assert error.details["reason"] == "stopping"
        assert error.message.startswith("the sidecar is stopping")
        assert took_s < SOON_S
        await stub_sees(stub, stub.settled)
        assert {stub.ended(0), stub.ended(1)} == {"undone"}
        assert stub.backends == {0: None, 1: None}
        assert [row.result for row in side.journal.history][-1] == "rolled_back"
        with pytest.raises(OperationInProgress) as refused:
            await side.attach()
        assert refused.value.details["reason"] == "stopping"


async def test_a_rank_that_does_not_answer_is_not_waited_for(tmp_path):
    """The stop has an end: the client is told that the outcome is open, and the leases settle the silent rank."""
    async with rig(tmp_path, dp=2) as (side, stub):
        stub.ranks[1].set(build_delay_s=NEVER, silent=frozenset({"undo"}))
        error, took_s = await begun(side, stub, lambda: stub.ranks[1].rec.phase == "preparing")
        assert isinstance(error, Internal)
        assert error.details["reason"] == "stopping"
        assert "settled at its next start" in error.message
        assert SOON_S <= took_s < SOON_S + 1.0
        assert side.journal.pending.n == 2


async def test_what_is_decided_is_finished(tmp_path):
    """After OUTCOME B there is no way back: the stop waits for the last rank and the client reads success."""
    async with rig(tmp_path, dp=2) as (side, stub):
        stub.ranks[1].set(answer_delay_s={"finalize": 0.2})
        answer, _ = await begun(
            side, stub, lambda: stub.ranks[0].state.backend == "file" and stub.ranks[0].rec.revision
        )
        assert not isinstance(answer, HicacheError)
        assert answer.revision == 2
        assert stub.backends == {0: "file", 1: "file"}


async def test_a_drain_opens_again(tmp_path):
    """A drain that waits for idle: admission is open when the sidecar is gone."""
    async with rig(tmp_path) as (side, stub):
        stub.ranks[0].set(counters={"running_batch": 1})
        error, _ = await begun(
            side, stub, lambda: bool(stub.ranks[0].holds), api.DrainRequest(timeout_s=9.0, hold_s=60.0)
        )
        assert isinstance(error, RolledBack)
        assert error.details["reason"] == "stopping"
        await stub_sees(stub, lambda: not stub.ranks[0].holds)


def test_sigterm_undoes_and_answers(tmp_path):
    """The daemon itself, over its socket: SIGTERM while a rank builds; exit 0 within two seconds (F103)."""
    with Processes(tmp_path) as processes:
        sidecar = processes.sidecar()
        with RankProcess(sidecar.endpoint) as rank, Client.connect(sidecar.socket) as client:
            sidecar.process.wait_until("/readyz", lambda: http_ok(f"{sidecar.url}/readyz"), 20)
            caught: list[object] = []

            def attach() -> None:
                try:
                    caught.append(client.attach("light", '{"build_delay_s": 60}'))
                except Exception as error:
                    caught.append(error)

            thread = threading.Thread(target=attach)
            thread.start()
            sidecar.process.wait_until("a builder", lambda: rank.facts()["report"]["op_phase"] == "preparing", 20)
            started = time.monotonic()
            sidecar.process.signal(signal.SIGTERM)
            assert sidecar.process.wait() == 0
            assert time.monotonic() - started < 2.0
            thread.join(20)
            assert isinstance(caught[0], RolledBack), caught
            assert caught[0].details["reason"] == "stopping"
            facts = rank.facts()
            assert (facts["report"]["op_ended"], facts["open"]) == ("undone", True)
