"""All ranks end on the new state, or all on the old one, whatever one of them does."""

import pytest
import trio
from tests.protocol.support import endpoint, fast, rig, sidecar, stub_sees
from tests.rigs.stub_engine import StubEngine
from tests.rigs.stub_link import NEVER

from hicache_proto import api
from hicache_proto.errors import (
    AlreadyAttached,
    DeadlineExceeded,
    HicacheError,
    Inconsistent,
    NoEngine,
    PrepareFailed,
    Quarantined,
    RolledBack,
    UnknownBackend,
    UnsupportedByEngine,
)
from hicache_proto.model import Capabilities

PUT, OTHER = '{"path": "/a", "prefetch_threshold": 256}', '{"path": "/b", "prefetch_threshold": 256}'


async def test_rank_that_left_idle_rolls_all_back(tmp_path):
    """F11: rank 2 gets a request between FREEZE and COMMIT: all end with the old backend, opened for nothing."""
    async with rig(tmp_path, dp=4) as (side, stub):
        stub.ranks[2].set(busy_at_commit=True)
        with pytest.raises(RolledBack) as failed:
            await side.attach()
        assert failed.value.details["rank"] == 2
        assert failed.value.details["rolled_back"] is True
        assert stub.backends == dict.fromkeys(range(4))
        assert stub.ranks[2].opened == []
        assert [r["rank"] for r in failed.value.details["ranks"]] == [0, 1, 2, 3]
        for rank in stub.ranks.values():
            assert rank.admission.count("close") == rank.admission.count("open")


async def test_unsupported_engine_hears_nothing(tmp_path):
    """F12: capability attach=false: 422 with version and tree; no command reached the hook."""
    can = Capabilities(engine="stub", engine_version="0.9", tree="hybrid", attach=False)
    async with rig(tmp_path) as (side, stub):
        stub.ranks[0].set(capabilities=can)
        stub.do(stub.ranks[0].hello)
        await side.until(lambda: side.coordinator.registry.ranks[0].hello.capabilities == can)
        stub.ranks[0].log.clear()
        with pytest.raises(UnsupportedByEngine) as refused:
            await side.attach()
        assert "0.9" in refused.value.message
        assert "hybrid" in refused.value.message
        assert refused.value.details["tree"] == "hybrid"
        assert stub.ranks[0].log == []


async def test_builder_that_never_ends(tmp_path):
    """F17: rank 3 never gets ready: the deadline names it, ranks 0 to 2 return to detached, nothing hangs."""
    async with rig(tmp_path, dp=4) as (side, stub):
        stub.ranks[3].set(build_delay_s=NEVER)
        with pytest.raises(DeadlineExceeded) as late:
            await side.attach(timeout_s=0.8)
        assert "rank 3: no reply" in late.value.message
        assert "rank 2: no reply" not in late.value.message
        assert stub.backends == dict.fromkeys(range(4))
        assert stub.settled()
        assert (await side.status()).state == "detached"


async def test_same_backend_compares_configs(tmp_path):
    """F20: equal is a no-op, live keys are applied and named, other keys need a swap and change nothing."""
    async with rig(tmp_path, dp=2) as (side, _stub):
        await side.attach(config=PUT)
        revision = (await side.status()).revision
        again = await side.attach(config=PUT)
        assert (again.success, again.changed, again.revision) == (True, False, revision)
        live = await side.attach(config='{"path": "/a", "prefetch_threshold": 64}')
        assert live.changed_keys == ["prefetch_threshold"]
        assert [r.prefetch_knobs["prefetch_threshold"] for r in (await side.status()).ranks] == [64, 64]
        before = await side.status()
        with pytest.raises(AlreadyAttached) as refused:
            await side.attach(config='{"path": "/b", "prefetch_threshold": 64}')
        assert refused.value.details["reason"] == "needs_swap"
        assert refused.value.details["changed_keys"] == ["path"]
        after = await side.status()
        assert after.hicache_storage_backend_extra_config == before.hicache_storage_backend_extra_config
        assert (await side.attach(config=OTHER, swap=True)).changed
        assert all("/b" in r.hicache_storage_backend_extra_config for r in (await side.status()).ranks)


async def test_policy_is_a_live_change(tmp_path):
    """Policies alone: applied on every rank, listed, the config kept with its secrets."""
    async with rig(tmp_path, dp=2) as (side, stub):
        await side.attach(config='{"path": "/a", "password": "hunter22"}')
        answer = await side.ask(
            api.PolicyRequest(hicache_storage_prefetch_policy="wait_complete", knobs={"prefetch_threshold": 32})
        )
        assert answer.changed_keys == ["hicache_storage_prefetch_policy", "prefetch_threshold"]
        assert {s.state.prefetch_policy for s in stub.ranks.values()} == {"wait_complete"}
        assert {s.state.knobs["prefetch_threshold"] for s in stub.ranks.values()} == {32}
        assert side.journal.desired[0].extra_config == '{"path": "/a", "password": "hunter22"}'
        assert "hunter22" not in str(await side.status())


async def test_failed_build_compensates(tmp_path):
    """F30: rank 2 fails to build: every rank is undone and detached, 502, four entries, rolled back."""
    async with rig(tmp_path, dp=4) as (side, stub):
        stub.ranks[2].set(build_error=PrepareFailed("cannot write /x", details={"reason": "not_writable"}))
        with pytest.raises(PrepareFailed) as failed:
            await side.attach()
        assert failed.value.status == 502
        assert "rank 2" in failed.value.message
        assert failed.value.details["reason"] == "not_writable"
        assert failed.value.details["rolled_back"] is True
        assert len(failed.value.details["ranks"]) == 4
        assert stub.backends == dict.fromkeys(range(4))
        n = stub.ranks[0].rec.n
        assert [("undo", n) in stub.ranks[r].log for r in (0, 1, 3)] == [True, True, True]
        assert all("freeze" not in {p for p, _ in s.log} for s in stub.ranks.values())


async def test_failed_compensation_is_split(tmp_path):
    """F30: rank 1 also fails to go back: never called rolled back; status says split and names it."""
    async with rig(tmp_path, dp=4) as (side, stub):
        stub.ranks[2].set(swap_error=True)
        stub.ranks[1].set(undo_fails=True)
        with pytest.raises(Inconsistent) as failed:
            await side.attach()
        assert failed.value.details["rolled_back"] is False
        assert "rank 1" in failed.value.message
        document = await side.status()
        assert document.state == "split"
        assert document.ranks[1].state == "quarantined"
        assert document.ranks[1].bypass
        assert {r.hicache_storage_backend for r in document.ranks if r.rank != 1} == {None}
        with pytest.raises(HicacheError) as blocked:
            await side.attach()
        assert blocked.value.code == "quarantined"


async def test_a_set_that_does_not_close_is_no_split(tmp_path):
    """F30: rank 1 is on A, only threads of B do not end there: rolled back; from then on 409, until they end."""
    async with rig(tmp_path, dp=2) as (side, stub):
        stuck = stub.ranks[1]
        stub.ranks[0].set(swap_error=True)
        stuck.set(close_stuck=True)
        with pytest.raises(RolledBack) as failed:
            await side.attach()
        assert failed.value.details["rolled_back"] is True
        await side.until(lambda: bool(side.coordinator.registry.ranks[1].report.quarantine))
        stub.ranks[0].set(swap_error=False)
        stuck.log.clear()
        with pytest.raises(Quarantined) as refused:
            await side.attach()
        assert refused.value.details["reason"] == "threads_stuck"
        assert "prepare" not in {phase for phase, _ in stuck.log}
        stuck.set(close_stuck=False)
        await side.until(lambda: not side.coordinator.registry.ranks[1].report.quarantine)
        assert (await side.attach()).changed


async def test_late_answer_counts_for_nothing(tmp_path):
    """F31: rank 1 answers operation 1 after its deadline: 504; operation 2 takes only its own replies."""
    async with rig(tmp_path, dp=2) as (side, stub):
        counters = side.coordinator.counters
        stub.ranks[1].set(answer_delay_s={"prepare": 1.2}, build_delay_s=1.0)
        with pytest.raises(DeadlineExceeded):
            await side.attach(timeout_s=0.5)
        stale = counters.stale_replies
        stub.ranks[1].set(answer_delay_s={}, build_delay_s=0.0)
        answer = await side.attach("mem", config='{"path": "/second"}', timeout_s=10)
        assert answer.changed
        await side.until(lambda: counters.stale_replies > stale)
        assert counters.stale_replies == stale + 1
        assert stub.backends == {0: "mem", 1: "mem"}
        assert (await side.status()).revision == answer.revision


async def test_dead_rank_ends_the_operation_quickly(tmp_path):
    """F32: rank 3 dies while preparing: failure within two heartbeats and the grace, the others compensated."""
    async with rig(tmp_path, dp=4) as (side, stub):
        for rank in stub.ranks.values():
            rank.set(build_delay_s=NEVER)
        caught: list[HicacheError] = []

        async def attach():
            with pytest.raises(PrepareFailed) as failed:
                await side.attach(timeout_s=20)
            caught.append(failed.value)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(attach)
            await stub_sees(stub, lambda: all(s.rec.phase == "preparing" for s in stub.ranks.values()))
            killed_at = trio.current_time()
            await trio.to_thread.run_sync(stub.kill, 3)
        assert trio.current_time() - killed_at < 1.5
        assert "rank 3 lost" in caught[0].message
        assert caught[0].details["reason"] == "rank_lost"
        assert [stub.ended(r) for r in (0, 1, 2)] == ["undone"] * 3


async def test_silent_rank_ends_the_operation_too(tmp_path):
    """F32: a stopped process keeps its connection; the heartbeat limit finds it."""
    async with rig(tmp_path, dp=2) as (side, stub):
        stub.ranks[0].set(build_delay_s=NEVER)
        stub.ranks[1].set(build_delay_s=NEVER)

        async def attach():
            with pytest.raises(PrepareFailed) as failed:
                await side.attach(timeout_s=20)
            assert "rank 1 lost: silent" in failed.value.message

        async with trio.open_nursery() as nursery:
            nursery.start_soon(attach)
            await stub_sees(stub, lambda: all(s.rec.phase == "preparing" for s in stub.ranks.values()))
            await trio.to_thread.run_sync(lambda: stub.ranks[1].set(muted=True))
        assert stub.ended(0) == "undone"


async def test_no_commit_before_every_local_verdict(tmp_path):
    """F114: rank 2's local build fails: nothing that all ranks must enter is ever sent; heartbeats go on."""
    async with rig(tmp_path, tp=4) as (side, stub):
        stub.ranks[2].set(build_error=PrepareFailed("no such mount"))
        with pytest.raises(PrepareFailed):
            await side.attach()
        for rank in stub.ranks.values():
            assert not {"freeze", "commit", "finalize"} & {phase for phase, _ in rank.log}
        before = side.coordinator.registry.ranks[0].report_at
        await side.until(lambda: side.coordinator.registry.ranks[0].report_at > before)


async def test_missing_rank_refuses(tmp_path):
    """F115: topology says 8, 7 are connected: refused with the missing rank's number."""
    async with sidecar(tmp_path) as side:
        with StubEngine(endpoint(tmp_path), dp=2, pp=2, tp=2, absent=(5,)):
            await side.until(lambda: len(side.coordinator.registry.live) == 7)
            with pytest.raises(NoEngine) as refused:
                await side.attach()
            assert refused.value.details["missing_ranks"] == [5]
            assert "missing 5 of 8" in refused.value.message
            document = await side.status()
            assert document.missing_ranks == [5]
            assert "rank 5 is not connected" in document.warnings
            assert side.coordinator.ready()[0] is False


async def test_inner_rank_failure_is_seen(tmp_path):
    """F115: all 8 here, rank 6 (not the first of its replica) fails: 502 names it, the others are compensated."""
    async with rig(tmp_path, dp=2, pp=2, tp=2) as (side, stub):
        stub.ranks[6].set(build_error=PrepareFailed("disk full"))
        with pytest.raises(PrepareFailed) as failed:
            await side.attach()
        assert "rank 6: disk full" in failed.value.message
        assert stub.backends == dict.fromkeys(range(8))
        assert (await side.status()).ranks[6].dp_rank == 1


async def test_the_only_rank_dies(tmp_path):
    """Nobody is left to undo anything: still the loss is the cause, and not an inconsistency. F35: the sidecar stays,
    status says ``engine_down``, and the operation shows at which step it was."""
    async with rig(tmp_path, dp=1) as (side, stub):
        stub.ranks[0].set(build_delay_s=NEVER)

        async def attach():
            with pytest.raises(PrepareFailed) as failed:
                await side.attach(timeout_s=20)
            assert failed.value.details["reason"] == "rank_lost"

        async with trio.open_nursery() as nursery:
            nursery.start_soon(attach)
            await stub_sees(stub, lambda: stub.ranks[0].rec.phase == "preparing")
            await trio.to_thread.run_sync(stub.kill, 0)
        assert (await side.status(fresh=False)).state == "engine_down"
        shown = (await side.ask(api.OperationsRequest())).operations[-1]
        assert (shown.done, shown.error.details["phase"]) == (True, "prepare")


async def test_restarted_engine_fails_the_operation(tmp_path):
    """F102: the engine is killed and comes back on the same socket: new handshake < 2 s, the operation fails."""
    async with rig(tmp_path, dp=2) as (side, stub):
        for rank in stub.ranks.values():
            rank.set(build_delay_s=NEVER)

        async def attach():
            with pytest.raises(PrepareFailed) as failed:
                await side.attach(timeout_s=20)
            assert failed.value.details["reason"] in ("engine_restarted", "rank_lost")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(attach)
            await stub_sees(stub, lambda: all(s.rec.phase == "preparing" for s in stub.ranks.values()))
            await trio.to_thread.run_sync(stub.stop)
            killed_at = trio.current_time()
            with StubEngine(endpoint(tmp_path), dp=2, epoch=2) as second:
                await side.until(lambda: side.coordinator.registry.incarnation == second.incarnation)
                assert trio.current_time() - killed_at < 2.0
                await side.ready()
                assert [r.epoch for r in (await side.status()).ranks] == [2, 2]
                await side.until(lambda: side.coordinator.ctx.running is None)
                assert second.backends == {0: None, 1: None}


async def test_unknown_backend_touches_nothing(tmp_path):
    """Refused by every rank's VALIDATE, said once, before anything is built."""
    async with rig(tmp_path, dp=2) as (side, stub):
        with pytest.raises(UnknownBackend) as refused:
            await side.attach("floppy")
        assert refused.value.message == "no backend 'floppy'"
        assert {p for s in stub.ranks.values() for p, _ in s.log} <= {"validate", "report"}


async def test_layers_that_disagree(tmp_path):
    """F24: a rank whose layers disagree after detach is inconsistent, with the per-layer view; never success."""
    async with rig(tmp_path) as (side, stub):
        await side.attach()
        stub.ranks[0].set(layers={"controller": "2 threads alive", "tree": "off"})
        with pytest.raises(Inconsistent) as failed:
            await side.detach()
        assert failed.value.details["layers"] == {"0": {"controller": "2 threads alive", "tree": "off"}}
        assert any("layers disagree" in w for w in (await side.status()).warnings)
        stub.ranks[0].set(layers={})
        assert (await side.detach()).success


async def test_expired_finalize_converges(tmp_path):
    """Rule 3's window: B is decided, rank 1 misses FINALIZE past its lease: brought to B before success is said."""
    async with rig(tmp_path, fast(in_doubt_s=1.2, freeze_s=0.5), dp=2) as (side, stub):
        stub.ranks[1].set(finalize_silent=True)
        answers = []

        async def attach():
            answers.append(await side.attach(timeout_s=20))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(attach)
            await stub_sees(stub, lambda: stub.ended(1) == "expired")
            assert not answers
            await trio.to_thread.run_sync(lambda: stub.ranks[1].set(finalize_silent=False))
        assert answers[0].success
        assert stub.backends == {0: "file", 1: "file"}
        assert (await side.status()).drift == []


async def test_reconnecting_rank_goes_on(tmp_path):
    """A connection that breaks and comes back (same process, new session, still holding n) is no loss."""
    async with rig(tmp_path, fast(reconnect_grace_s=1.5, liveness_s=3.0), dp=2) as (side, stub):
        stub.ranks[1].set(build_delay_s=1.0)
        answers = []

        async def attach():
            answers.append(await side.attach())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(attach)
            await stub_sees(stub, lambda: stub.ranks[1].rec.phase == "preparing")
            stub.do(stub.ranks[1].connect)
        assert answers[0].success
        assert stub.backends == {0: "file", 1: "file"}


async def test_bypass_with_a_rank_missing(tmp_path):
    """Bypass reaches who is there, and says who is not: never a success that hides a rank."""
    async with rig(tmp_path, dp=2) as (side, stub):
        await trio.to_thread.run_sync(stub.kill, 1)
        await side.until(lambda: side.coordinator.registry.missing_ranks == [1])
        answer = await side.ask(api.BypassRequest(enabled=True))
        assert (answer.success, [r.success for r in answer.ranks]) == (False, [True, False])
        assert stub.ranks[0].state.bypass


async def test_resume_with_a_rank_missing(tmp_path):
    """F10: admission of who is there opens, whoever is not."""
    async with rig(tmp_path, dp=2) as (side, stub):
        assert (await side.ask(api.DrainRequest(hold_s=300.0))).success
        await trio.to_thread.run_sync(stub.kill, 1)
        await side.until(lambda: side.coordinator.registry.missing_ranks == [1])
        answer = await side.ask(api.ResumeRequest())
        assert (answer.success, [r.success for r in answer.ranks]) == (False, [True, False])
        assert (stub.ranks[0].admission[-1], stub.ranks[0].holds) == ("open", {})
