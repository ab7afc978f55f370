"""Who restarts, and what is true afterwards: the sidecar, the engine, one rank; first contact, drift."""

import contextlib

import msgspec
import pytest
import trio
from tests.protocol.support import endpoint, fast, rig, sidecar, stub_sees
from tests.rigs.stub_engine import StubEngine
from tests.rigs.stub_link import NEVER

from hicache_proto import api
from hicache_proto.errors import HicacheError, InvalidRequest

# The sidecar's death in these tests is the end of its tasks without a word to any rank, which is what a rank sees
# of SIGKILL; the crash matrix does the same with real processes.


@pytest.mark.parametrize("phase", ["preparing", "frozen"])
async def test_sidecar_dies_before_commit(tmp_path, phase):
    """F36: killed before COMMIT: after the lease every rank is old and open; the next start finds that, logs it."""
    async with sidecar(tmp_path, fast(prepared_s=1.0)) as first:
        with StubEngine(endpoint(tmp_path), dp=2) as stub:
            await first.ready()
            if phase == "preparing":
                stub.ranks[1].set(build_delay_s=NEVER)
            else:
                stub.ranks[1].set(silent=frozenset({"freeze"}))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_ignore_end, first)
                await stub_sees(stub, lambda: stub.ranks[1 if phase == "preparing" else 0].rec.phase == phase)
                nursery.cancel_scope.cancel()
            n = first.coordinator.ctx.running.n
            first.scope.cancel()
            await _shielded(stub_sees, stub, stub.settled)
            assert stub.backends == {0: None, 1: None}
            assert {stub.ended(0), stub.ended(1)} <= {"expired", ""}
            assert all(s.admission.count("close") == s.admission.count("open") for s in stub.ranks.values())
    stub_args = {"dp": 2}
    async with rig(tmp_path, **stub_args) as (second, _stub):
        assert second.journal.pending is None
        rows = (await second.ask(api.HistoryRequest())).revisions
        assert (rows[-1].revision, rows[-1].result) == (1, "rolled_back")
        assert n == second.journal.last_n
        assert (await second.attach()).changed


async def _ignore_end(side):
    with contextlib.suppress(HicacheError):
        await side.attach(timeout_s=30)


async def _shielded(fn, *args):
    with trio.CancelScope(shield=True):
        await fn(*args)


async def test_sidecar_dies_in_doubt_and_returns_in_time(tmp_path):
    """Rule 1: every rank switched, no outcome on disk, leases alive: the next start decides B and finalises."""
    settings = fast(in_doubt_s=8.0, freeze_s=1.0)
    with StubEngine(endpoint(tmp_path), dp=2, before=_no_answer_to("commit")) as stub:
        async with sidecar(tmp_path, settings) as first:
            await first.ready()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_ignore_end, first)
                await stub_sees(stub, lambda: all(s.rec.phase == "switched" for s in stub.ranks.values()))
                nursery.cancel_scope.cancel()
        for rank in stub.ranks.values():
            rank.set(answer_delay_s={})
        async with sidecar(tmp_path, settings) as second:
            await second.ready()
            await stub_sees(stub, stub.settled)
            assert stub.backends == {0: "file", 1: "file"}
            assert [stub.ended(0), stub.ended(1)] == ["final", "final"]
            document = await second.status()
            assert (document.state, document.desired.hicache_storage_backend) == ("attached", "file")
            assert document.drift == []


async def test_sidecar_dies_in_doubt_and_one_rank_did_not_switch(tmp_path):
    """Rule 1: one participant is not SWITCHED: A, and the others swap back."""
    settings = fast(in_doubt_s=8.0, freeze_s=1.0, prepared_s=8.0)

    def script(engine):
        engine.ranks[0].script.answer_delay_s = {"commit": 60.0}
        engine.ranks[1].script.silent = frozenset({"commit"})

    with StubEngine(endpoint(tmp_path), dp=2, before=script) as stub:
        async with sidecar(tmp_path, settings) as first:
            await first.ready()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_ignore_end, first)
                await stub_sees(stub, lambda: stub.ranks[0].rec.phase == "switched")
                nursery.cancel_scope.cancel()
        async with sidecar(tmp_path, settings) as second:
            await second.ready()
            await stub_sees(stub, stub.settled)
            assert stub.backends == {0: None, 1: None}
            assert second.journal.pending is None
            assert (await second.status()).state == "detached"


def _no_answer_to(phase):
    def script(engine):
        for rank in engine.ranks.values():
            rank.script.answer_delay_s = {phase: 60.0}

    return script


async def test_decided_but_not_finalised(tmp_path):
    """OUTCOME B on disk, FINALIZE lost with the sidecar: sent again by the next start."""
    settings = fast(in_doubt_s=8.0, freeze_s=1.0)

    def script(engine):
        engine.ranks[1].script.finalize_silent = True

    with StubEngine(endpoint(tmp_path), dp=2, before=script) as stub:
        async with sidecar(tmp_path, settings) as first:
            await first.ready()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_ignore_end, first)
                await stub_sees(stub, lambda: ("finalize", stub.ranks[1].rec.n) in stub.ranks[1].log)
                nursery.cancel_scope.cancel()
        stub.ranks[1].set(finalize_silent=False)
        async with sidecar(tmp_path, settings) as second:
            await second.ready()
            await stub_sees(stub, lambda: stub.ended(1) == "final")
            assert (await second.status()).drift == []


async def test_first_contact_adopts(tmp_path):
    """No desired state: what the ranks agree on is revision 1."""
    async with rig(tmp_path, dp=2) as (side, _stub):
        document = await side.status()
        assert (document.revision, document.state, document.drift) == (1, "detached", [])
        assert side.journal.history[-1].result == "adopted"


async def test_first_contact_with_ranks_that_disagree(tmp_path):
    """They disagree: split, nothing touched; reapply has nothing to bring back, an attach with swap ends it."""

    def script(engine):
        state = engine.ranks[1].state
        engine.ranks[1].state = msgspec.structs.replace(state, backend="mem", config_digest="d")

    async with sidecar(tmp_path) as side:
        with StubEngine(endpoint(tmp_path), dp=2, before=script) as stub:
            await side.until(lambda: bool(side.coordinator.ctx.split))
            document = await side.status()
            assert document.state == "split"
            assert document.desired is None
            assert {p for s in stub.ranks.values() for p, _ in s.log} <= {"report"}
            with pytest.raises(InvalidRequest):
                await side.ask(api.ResolveRequest(how="adopt"))
            with pytest.raises(InvalidRequest):
                await side.ask(api.ResolveRequest(how="reapply"))
            assert (await side.attach("file", swap=True)).changed
            assert (await side.status()).state == "attached"
            assert stub.backends == {0: "file", 1: "file"}


async def test_drift_is_shown_and_resolved(tmp_path):
    """Changed behind our back: shown, never repaired by itself; reapply brings back, adopt takes over."""
    async with rig(tmp_path, dp=2) as (side, stub):
        await side.attach(config='{"path": "/a", "password": "hunter22"}')

        def meddle():
            for rank in stub.ranks.values():
                rank.state = msgspec.structs.replace(rank.state, write_policy="write_back")

        stub.do(meddle)
        await side.until(lambda: bool(side.coordinator.ctx.status().drift))
        n = side.journal.last_n
        drift = (await side.status()).drift
        assert [(d.rank, d.field, d.desired, d.reported) for d in drift] == [
            (0, "hicache_write_policy", "write_through", "write_back"),
            (1, "hicache_write_policy", "write_through", "write_back"),
        ]
        assert side.journal.last_n == n
        await side.ask(api.ResolveRequest(how="reapply"))
        assert (await side.status()).drift == []
        assert {s.state.write_policy for s in stub.ranks.values()} == {"write_through"}
        stub.do(meddle)
        await side.until(lambda: bool(side.coordinator.ctx.status().drift))
        await side.ask(api.ResolveRequest(how="adopt", reason="wanted"))
        document = await side.status()
        assert document.drift == []
        assert document.desired.hicache_write_policy == "write_back"
        assert "hunter22" in side.journal.desired[0].extra_config  # so a restarted rank can be brought there


async def test_adopt_without_drift_changes_nothing(tmp_path):
    """No revision is made, and the config keeps the secrets that a rank does not tell."""
    async with rig(tmp_path, dp=2) as (side, _):
        await side.attach(config='{"path": "/a", "password": "hunter22"}')
        n, rows = side.journal.last_n, len(side.journal.history)
        answer = await side.ask(api.ResolveRequest(how="adopt"))
        assert (answer.success, answer.changed, answer.revision) == (True, False, side.journal.desired[1])
        assert (side.journal.last_n, len(side.journal.history)) == (n, rows)
        assert "hunter22" in side.journal.desired[0].extra_config


async def test_an_engine_met_for_the_first_time_is_no_warning(tmp_path, caplog):
    """A warning is something to look at; a rank that contradicts the journal still is one."""
    caplog.set_level("INFO")
    async with rig(tmp_path, dp=2):
        pass
    told = [record for record in caplog.records if "first contact" in record.getMessage()]
    assert [record.levelname for record in told] == ["INFO"]


async def test_restarted_rank_is_brought_to_the_desired_state(tmp_path):
    """Rule 13: one fresh rank gets what the others run, secrets and all, by an operation of its own."""
    async with rig(tmp_path, dp=2) as (side, stub):
        config = '{"path": "/a", "password": "hunter22"}'
        await side.attach(config=config)
        new = await trio.to_thread.run_sync(stub.replace, 1)
        await stub_sees(stub, lambda: new.state.backend == "file" and stub.settled())
        assert new.state.extra_config == config
        assert "prepare" not in {p for p, n in stub.ranks[0].log if n == new.rec.n}
        await side.until(lambda: side.coordinator.ctx.running is None)
        assert (await side.status()).drift == []
        kinds = [job.kind for job in side.coordinator.ctx.jobs.values()]
        assert kinds == ["attach", "converge"]


@pytest.mark.parametrize("policy", ["reattach", "leave"])
async def test_restarted_engine(tmp_path, policy):
    """A whole engine comes back fresh: brought to the desired state, or left and shown as drift, as configured."""
    async with sidecar(tmp_path, fast(on_engine_restart=policy)) as side:
        with StubEngine(endpoint(tmp_path), dp=2) as stub:
            await side.ready()
            await side.attach()
        await side.until(lambda: not side.coordinator.registry.live)
        assert (await side.status()).state == "engine_down"
        with StubEngine(endpoint(tmp_path), dp=2, epoch=2) as stub:
            await side.ready()
            if policy == "reattach":
                await stub_sees(stub, lambda: stub.backends == {0: "file", 1: "file"} and stub.settled())
            else:
                document = await side.status()
                assert len(document.drift) == 2
                assert stub.backends == {0: None, 1: None}
                assert side.coordinator.ctx.running is None


async def test_config_that_kills_the_engine_is_quarantined(tmp_path):
    """F19: the process died while a config was attached: not tried again by itself, refused without force."""
    config = '{"path": "/deadly"}'
    async with sidecar(tmp_path) as side:
        with StubEngine(endpoint(tmp_path), dp=1) as stub:
            await side.ready()
            stub.ranks[0].set(build_delay_s=NEVER)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_attach_fails, side, config)
                await stub_sees(stub, lambda: stub.ranks[0].rec.phase == "preparing")
                await trio.to_thread.run_sync(stub.kill, 0)
        with StubEngine(endpoint(tmp_path), dp=1, epoch=2):
            await side.ready()
            await side.until(lambda: bool(side.journal.quarantined))
            with pytest.raises(HicacheError) as refused:
                await side.attach(config=config)
            assert refused.value.code == "quarantined"
            assert (await side.attach(config='{"path": "/harmless"}')).changed
            await side.detach()
            assert (await side.attach(config=config, force=True)).changed


async def _attach_fails(side, config):
    with pytest.raises(HicacheError):
        await side.attach(config=config)


async def test_sidecar_restart_is_unnoticed(tmp_path):
    """The sidecar restarts, the engine stays: rehello, same state, no operation on any rank."""
    with StubEngine(endpoint(tmp_path), dp=2) as stub:
        async with sidecar(tmp_path) as first:
            await first.ready()
            answer = await first.attach(config='{"path": "/a"}')
        welcomes = stub.ranks[0].welcomes
        for rank in stub.ranks.values():
            rank.log.clear()
        async with sidecar(tmp_path) as second:
            await second.ready()
            document = await second.status()
            assert (document.state, document.revision, document.drift) == ("attached", answer.revision, [])
            assert stub.ranks[0].welcomes > welcomes
            assert {p for s in stub.ranks.values() for p, _ in s.log} <= {"report"}
            again = await second.attach(config='{"path": "/a"}')
            assert again.changed is False


async def test_a_successor_that_is_faster_than_the_failed_attempt_is_judged_too(tmp_path):
    """F19: the new process says hello while the attempt that killed the old one still ends."""
    async with rig(tmp_path) as (side, stub):
        stub.ranks[0].set(build_delay_s=NEVER)
        async with trio.open_nursery() as nursery:

            async def put():
                with pytest.raises(HicacheError):
                    await side.attach()

            nursery.start_soon(put)
            await stub_sees(stub, lambda: stub.ranks[0].rec.phase == "preparing")
            await trio.to_thread.run_sync(lambda: stub.replace(0))
        await side.until(lambda: bool(side.journal.quarantined))
        await side.ready()
        with pytest.raises(HicacheError) as refused:
            await side.attach()
        assert refused.value.code == "quarantined"
