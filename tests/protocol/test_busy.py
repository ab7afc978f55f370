"""A busy engine: refused at once with every blocker, or waited for on the server's side."""

import pytest
import trio
from tests.protocol.support import rig, stub_sees

from hicache_proto import api
from hicache_proto.errors import (
    DeadlineExceeded,
    HicacheError,
    Inconsistent,
    InvalidRequest,
    NotIdle,
    OperationInProgress,
)
from hicache_sidecar.engine import idle


async def test_transfers_block_detach(tmp_path):
    """F1: no requests, but a backup in flight: busy, named, nothing stopped; at zero the detach succeeds."""
    async with rig(tmp_path) as (side, stub):
        await side.attach()
        stub.ranks[0].set(counters={"ongoing_backup": 1})
        stub.ranks[0].log.clear()
        with pytest.raises(NotIdle) as refused:
            await side.detach()
        assert refused.value.message.startswith(
            "Reject detach: scheduler is not idle. #queue-req=0 #running-req=0; blocked by ongoing_backup=1 (rank 0)"
        )
        assert stub.backends == {0: "file"}
        assert {phase for phase, _ in stub.ranks[0].log} <= {"validate", "report"}
        stub.ranks[0].set(counters={"ongoing_backup": 0})
        answer = await side.detach()
        assert answer.changed
        assert stub.backends == {0: None}


async def test_unknown_counter_blocks(tmp_path):
    """F2: a counter that nobody here knows still blocks, and is named."""
    async with rig(tmp_path) as (side, stub):
        stub.ranks[0].set(counters={"future_thing": 1})
        with pytest.raises(NotIdle) as refused:
            await side.attach()
        assert "future_thing=1" in refused.value.message
        assert stub.backends == {0: None}


async def test_missing_counter_is_an_error(tmp_path):
    """F2: a mandatory counter that is missing is an error, never "idle"."""
    async with rig(tmp_path) as (side, stub):
        stub.ranks[0].set(omit=("ongoing_prefetch",))
        with pytest.raises(Inconsistent) as refused:
            await side.attach()
        assert "incomplete idle report" in refused.value.message
        assert refused.value.details["missing"] == ["ongoing_prefetch"]
        document = await side.ask(api.IdleRequest())
        assert not document.idle
        assert document.ranks[0].missing_counters == ["ongoing_prefetch"]


async def test_blocked_by_is_structured(tmp_path):
    """F3: exactly one entry per blocker, with rank, name and count; requests are counted as the spec says."""
    async with rig(tmp_path, dp=2) as (side, stub):
        stub.ranks[1].set(counters={"grammar_queue": 3})
        with pytest.raises(NotIdle) as refused:
            await side.attach()
        assert refused.value.details["blocked_by"] == [{"rank": 1, "name": "grammar_queue", "count": 3}]
        assert refused.value.status == 400
        assert "#queue-req=3 #running-req=0" in refused.value.message
        stub.ranks[0].set(counters={"running_batch": 2})
        with pytest.raises(NotIdle) as refused:
            await side.attach()
        assert "#queue-req=3 #running-req=2" in refused.value.message
        assert len(refused.value.details["blocked_by"]) == 2


async def test_strict_refusal_is_fast_and_touches_nothing(tmp_path):
    """F5: wait 0 refuses within 100 ms, and only stateless questions reach the ranks."""
    async with rig(tmp_path, dp=2) as (side, stub):
        stub.ranks[0].set(counters={"waiting_queue": 1})
        for rank in stub.ranks.values():
            rank.log.clear()
        took = []
        for _ in range(5):
            started = trio.current_time()
            with pytest.raises(NotIdle):
                await side.attach()
            took.append(trio.current_time() - started)
        assert min(took) < 0.1
        for rank in stub.ranks.values():
            assert {phase for phase, _ in rank.log} <= {"validate", "report"}
        assert side.journal.pending is None
        assert side.journal.last_n <= 1


async def test_wait_timeout_waits_for_the_idle_moment(tmp_path):
    """F5: with time to wait the server waits, admission open, and goes on as soon as the rank is idle."""
    async with rig(tmp_path, dp=2) as (side, stub):
        stub.ranks[1].set(counters={"running_batch": 1})
        done = {}

        async def attach():
            done["answer"] = await side.attach(wait_timeout_s=8.0)
            done["at"] = trio.current_time()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(attach)
            await stub_sees(stub, lambda: ("watch_idle", 0) in stub.ranks[1].log)
            assert not stub.ranks[1]._held()
            assert "answer" not in done
            idle_at = trio.current_time()
            await trio.to_thread.run_sync(lambda: stub.ranks[1].set(counters={"running_batch": 0}))
        assert done["answer"].changed
        assert done["at"] - idle_at < 1.0
        assert stub.backends == {0: "file", 1: "file"}


async def test_wait_that_runs_out_names_the_last_blockers(tmp_path):
    """F5: when the wait runs out: 400 with the blockers, everything as before."""
    async with rig(tmp_path, dp=2) as (side, stub):
        stub.ranks[1].set(counters={"running_batch": 1})
        started = trio.current_time()
        with pytest.raises(NotIdle) as refused:
            await side.attach(wait_timeout_s=0.7)
        assert 0.6 < trio.current_time() - started < 3.0
        assert refused.value.details["blocked_by"][0]["name"] == "running_batch"
        assert stub.backends == {0: None, 1: None}
        await stub_sees(stub, stub.settled)
        for rank in stub.ranks.values():
            assert rank.admission.count("close") == rank.admission.count("open")


async def test_transient_and_permanent_refusals_differ(tmp_path):
    """F6: busy is retryable and says when; a bad policy is neither."""
    async with rig(tmp_path) as (side, stub):
        stub.ranks[0].set(counters={"waiting_queue": 1})
        with pytest.raises(NotIdle) as busy:
            await side.attach()
        with pytest.raises(InvalidRequest) as bad:
            await side.attach(hicache_write_policy="sometimes")
        table = [(e.value.status, e.value.retryable) for e in (busy, bad)]
        assert table == [(400, True), (422, False)]
        assert busy.value.details["retry_after_s"] >= 1


async def test_one_operation_at_a_time(tmp_path):
    """F7: while one waits, others get 409 with its id, which can be polled; afterwards an attach works."""
    async with rig(tmp_path) as (side, stub):
        await side.attach()
        stub.ranks[0].set(counters={"running_batch": 1})
        failures: list[HicacheError] = []

        async def detach():
            failures.append(await _error(side.detach(wait_timeout_s=1.5)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(detach)
            await stub_sees(stub, lambda: ("watch_idle", 0) in stub.ranks[0].log)
            running = side.coordinator.ctx.running
            for request in (side.detach(), side.attach("mem", swap=True)):
                with pytest.raises(OperationInProgress) as second:
                    await request
                assert second.value.operation_id == running.id
                assert second.value.details["since"] == running.started_at
            polled = await side.ask(api.OperationsRequest(operation_id=running.id))
            assert polled.phase == "wait"
            assert polled.blocked_by[0].name == "running_batch"
        assert isinstance(failures[0], NotIdle)
        stub.ranks[0].set(counters={})
        assert (await side.attach("mem", swap=True)).changed


async def _error(awaitable) -> HicacheError:
    try:
        await awaitable
    except HicacheError as exc:
        return exc
    raise AssertionError("it succeeded")


async def test_drain_holds_new_requests_and_finishes(tmp_path):
    """Mode drain: admission closed, running requests finish, then the change is made."""
    async with rig(tmp_path, dp=2) as (side, stub):
        stub.ranks[0].set(counters={"running_batch": 1})
        answers = []

        async def attach():
            answers.append(await side.attach(mode="drain"))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(attach)
            await stub_sees(stub, lambda: all(s._held() for s in stub.ranks.values()))
            assert (await side.status()).state == "draining"
            # Four repeats at a third of the lease each: renewing keeps rank 1 frozen while rank 0 drains.
            await stub_sees(stub, lambda: sum(p == "freeze" for p, _ in stub.ranks[1].log) >= 5)
            await trio.to_thread.run_sync(lambda: stub.ranks[0].set(counters={}))
        assert answers[0].changed
        assert stub.ranks[1].admission == ["close", "open"]
        assert stub.backends == {0: "file", 1: "file"}


async def test_drain_that_runs_out_is_504_and_reopens(tmp_path):
    """A drain that runs out: 504 with the blockers, every rank open and as before."""
    async with rig(tmp_path, dp=2) as (side, stub):
        stub.ranks[0].set(counters={"running_batch": 1})
        with pytest.raises(HicacheError) as late:
            await side.attach(mode="drain", wait_timeout_s=0.6)
        assert late.value.code == "deadline_exceeded"
        assert late.value.details["blocked_by"] == [{"rank": 0, "name": "running_batch", "count": 1}]
        await stub_sees(stub, lambda: not any(s._held() for s in stub.ranks.values()))
        assert stub.backends == {0: None, 1: None}


async def test_hot_needs_no_idle(tmp_path):
    """Mode hot: no freeze, no hold, under load; refused where the engine cannot."""
    async with rig(tmp_path, dp=2) as (side, stub):
        stub.ranks[0].set(counters={"running_batch": 4})
        assert (await side.attach(mode="hot")).changed
        assert stub.ranks[0].admission == []
        assert "freeze" not in {phase for phase, _ in stub.ranks[0].log}


async def test_a_drain_says_stalled_when_nothing_moves(tmp_path, monkeypatch):
    """F4: backups that do not move: the drain's refusal says ``stalled``; ones that do: ``slow``. Live, too."""
    monkeypatch.setattr(idle, "STALLED_S", 0.3)
    async with rig(tmp_path) as (side, stub):
        stub.ranks[0].set(counters={"ongoing_backup": 9})
        seen = []
        with pytest.raises(DeadlineExceeded) as stood:
            await side.ask(api.DrainRequest(timeout_s=1.0), progress=seen.append)
        assert stood.value.details["progress"] == "stalled"
        assert "stalled: ongoing_backup=9 (rank 0)" in stood.value.message
        assert any(row.get("still_s", 0) >= 0.3 for data in seen for row in data["blocked_by"])
        with pytest.raises(DeadlineExceeded) as swap:
            await side.attach(mode="drain", wait_timeout_s=1.0)
        assert swap.value.details["progress"] == "stalled"
        async with trio.open_nursery() as nursery:

            async def work():
                for count in range(1000, 0, -1):
                    await trio.to_thread.run_sync(lambda n=count: stub.ranks[0].set(counters={"ongoing_backup": n}))
                    await trio.sleep(0.05)  # the store's pace

            nursery.start_soon(work)
            with pytest.raises(DeadlineExceeded) as slow:
                await side.ask(api.DrainRequest(timeout_s=1.0))
            nursery.cancel_scope.cancel()
        assert slow.value.details["progress"] == "slow"
        assert "stalled" not in slow.value.message
