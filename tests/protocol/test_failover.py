"""Failover with real ZMQ, a real journal and STUB(n): from a guard's report to an ordinary operation, and back."""

import json
from functools import partial

import msgspec
import pytest
import trio
from tests.protocol.support import ADMIN, OPERATOR, Side, endpoint, rig, sidecar, stub_sees
from tests.rigs.stub_engine import StubEngine

from hicache_proto import api
from hicache_proto.errors import (
    Forbidden,
    HicacheError,
    InvalidConfig,
    InvalidRequest,
    OperationInProgress,
    UnknownBackend,
)
from hicache_proto.failover import FailoverDocument, FailoverPolicy, FailoverRequest, SetFailoverRequest, Spare
from hicache_sidecar.core.actor import Actor, Role

QUICK = {"confirm_s": 0.05, "min_stay_s": 0.0, "steady_s": 0.3, "backoff_s": 0.2, "backoff_max_s": 0.4, "wait_s": 2.0}
MEM = Spare(hicache_storage_backend="mem", hicache_storage_backend_extra_config_json='{"a": 1}')
VIEWER = Actor(name="viewer", role=Role.VIEWER, uid=1001)


def quick(action: str, **fields: object) -> FailoverPolicy:
    return FailoverPolicy(action=action, **{**QUICK, **fields})  # type: ignore[arg-type]


async def show(side: Side) -> FailoverDocument:
    document: FailoverDocument = await side.ask(FailoverRequest(), VIEWER)
    return document


async def follow(side: Side, **policies: FailoverPolicy) -> FailoverDocument:
    document: FailoverDocument = await side.ask(SetFailoverRequest(policies=dict(policies)))
    return document


async def make_sick(stub: StubEngine, *backends: str, ranks: tuple[int, ...] = ()) -> None:
    """These stores' breakers are open, on some ranks (default: all); every other store is well."""
    for rank in ranks or stub.ranks:
        change = partial(stub.ranks[rank].set, sick=dict.fromkeys(backends, "open"))
        await trio.to_thread.run_sync(change)


def bypassed(stub: StubEngine) -> set[bool]:
    return {rank.state.bypass for rank in stub.ranks.values()}


def steps(side: Side) -> list[str]:
    return [row.step for row in side.coordinator.failover.steps]


async def test_bypass_on_all_ranks_for_one_sick_rank_and_back(tmp_path):
    """F77, F78: under permanent load; the desired state stays, no operation is needed."""
    async with rig(tmp_path, dp=2) as (side, stub):
        await side.attach()
        await follow(side, file=quick("bypass"))
        for rank in stub.ranks.values():
            await trio.to_thread.run_sync(partial(rank.set, counters={"running_batch": 3}))
        revision = side.journal.desired
        await make_sick(stub, "file", ranks=(1,))
        await stub_sees(stub, lambda: bypassed(stub) == {True})
        await side.until(lambda: side.coordinator.failover.machine.state == "bypassed")
        document = await show(side)
        assert (document.state, document.backend, document.home.hicache_storage_backend) == ("bypassed", "file", "file")
        assert [(r.rank, r.condition) for r in document.ranks] == [(0, "well"), (1, "sick")]
        assert "rank 1: breaker open" in document.reason
        status = await side.status()
        assert status.state == "bypassed"
        assert any(text.startswith("failover from file: bypassed: rank 1: breaker open") for text in status.warnings)
        assert side.journal.desired == revision
        await make_sick(stub)
        await stub_sees(stub, lambda: bypassed(stub) == {False})
        await side.until(lambda: "recovered" in steps(side))
        assert (await show(side)).state == "watching"
        assert steps(side) == ["bypass", "unbypass", "recovered"]
        told = [event.data for event in side.coordinator.ctx.hub._ring if event.kind == "failover"]
        assert [data["step"] for data in told] == steps(side), "every step is an event"
        assert [bool(data["reason"]) for data in told] == [True] * 3
        assert "rank 1: breaker open" in told[0]["reason"]
        assert (await side.status()).warnings == []


async def test_detach_under_load_is_an_ordinary_operation_and_so_is_the_way_back(tmp_path):
    """F77, F78: history and desired state show it, with the actor ``failover`` and the reason."""
    async with rig(tmp_path, dp=2) as (side, stub):
        await side.attach(config='{"password": "hush-hush-1"}', hicache_write_policy="write_back")
        await follow(side, file=quick("detach"))
        for rank in stub.ranks.values():
            await trio.to_thread.run_sync(partial(rank.set, counters={"running_batch": 3}))
        await make_sick(stub, "file")
        await stub_sees(stub, lambda: set(stub.backends.values()) == {None})
        await side.until(lambda: (side.journal.desired[0].backend, side.coordinator.ctx.running) == (None, None))
        row = (await side.ask(api.HistoryRequest())).revisions[-1]
        assert (row.kind, row.actor, row.result) == ("failover", "failover", "committed")
        assert "breaker open" in row.reason
        await side.until(lambda: "failed" in steps(side))  # a try to go back, while it is down
        assert set(stub.backends.values()) == {None}
        await make_sick(stub)
        await side.until(lambda: "recovered" in steps(side))
        assert set(stub.backends.values()) == {"file"}
        assert bypassed(stub) == {False}
        desired = side.journal.desired[0]
        assert (desired.backend, desired.extra_config) == ("file", '{"password": "hush-hush-1"}')
        assert desired.write_policy == "write_back"
        assert "hush-hush-1" not in json.dumps(msgspec.to_builtins(await show(side)))


async def test_a_spare_in_hot_mode_and_its_secret_is_nowhere(tmp_path):
    """F94: kept as desired states are, redacted everywhere."""
    secret = Spare(
        hicache_storage_backend="mem", hicache_storage_backend_extra_config_json='{"access_key": "hush-hush-2"}'
    )
    async with rig(tmp_path, dp=2) as (side, stub):
        await side.attach()
        answer = await follow(side, file=quick("spares", spares=[secret]))
        await make_sick(stub, "file")
        await side.until(lambda: "spare" in steps(side))
        assert set(stub.backends.values()) == {"mem"}
        assert side.journal.desired[0].extra_config == '{"access_key": "hush-hush-2"}'
        await side.until(lambda: side.coordinator.failover.machine.state == "on_spare")
        assert bypassed(stub) == {False}  # the stub keeps it over a swap; it must not outlive the store that was left
        shown = [answer, await show(side), await side.status(), await side.ask(api.HistoryRequest()),
                 await side.ask(api.OperationsRequest()), list(side.coordinator.ctx.hub._ring)]  # fmt: skip
        text = msgspec.json.encode(shown).decode()
        assert "mem" in text
        assert "hush-hush-2" not in text
        assert side.coordinator.ctx.jobs[next(reversed(side.coordinator.ctx.jobs))].mode == "hot"


async def test_a_spare_that_is_down_too_is_passed_over(tmp_path):
    other = Spare(hicache_storage_backend="file", hicache_storage_backend_extra_config_json='{"a": 2}')
    async with rig(tmp_path) as (side, stub):
        await side.attach("mem")
        await follow(side, mem=quick("spares", spares=[Spare(hicache_storage_backend="mem",
                     hicache_storage_backend_extra_config_json='{"b": 1}'), other]))  # fmt: skip
        await make_sick(stub, "mem")
        await side.until(lambda: "spare" in steps(side))
        assert stub.backends == {0: "file"}
        assert steps(side)[:3] == ["bypass", "failed", "spare"]


async def test_an_operation_of_an_operator_goes_first_and_its_outcome_stands(tmp_path):
    """Never beside another operation, never across an operator's later change."""
    async with rig(tmp_path, dp=2) as (side, stub):
        await side.attach()
        await follow(side, file=quick("detach"))
        await trio.to_thread.run_sync(partial(stub.ranks[0].set, build_delay_s=0.5))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(side.attach, "mem", swap=True))
            await stub_sees(stub, lambda: stub.ranks[0].rec.phase == "preparing")
            await make_sick(stub, "file")
        assert set(stub.backends.values()) == {"mem"}
        assert steps(side) == []
        assert (await show(side)).state == "off"  # no policy for mem


async def test_an_operators_detach_while_detached_ends_it(tmp_path):
    """It changes nothing, and still says what the operator wants."""
    async with rig(tmp_path) as (side, stub):
        await side.attach()
        await follow(side, file=quick("detach", backoff_s=30.0, backoff_max_s=30.0))
        await make_sick(stub, "file")
        await side.until(lambda: side.coordinator.failover.machine.state == "detached")
        answer = await side.detach()
        assert answer.changed is False
        assert (await show(side)).home is None
        assert side.coordinator.failover.machine.episode is None
        await side.until(lambda: "ended" in steps(side))  # told by the driver, a turn after the answer


async def test_policies_and_the_episode_outlive_the_sidecar(tmp_path):
    """In the journal, so that a crash at any moment leaves one truth (design.md, rule 7)."""
    async with sidecar(tmp_path) as side:
        with StubEngine(endpoint(tmp_path), dp=2) as stub:
            await side.ready()
            await side.attach(config='{"password": "hush-hush-3"}')
            await follow(side, file=quick("detach"))
            await make_sick(stub, "file")
            await side.until(lambda: side.coordinator.failover.machine.state == "detached")
            side.scope.cancel()
            await trio.lowlevel.checkpoint_if_cancelled()
    async with sidecar(tmp_path) as side:
        with StubEngine(endpoint(tmp_path), dp=2) as stub:
            await side.ready()
            document = await show(side)
            assert document.policies["file"].action == "detach"
            assert document.home is None or "hush" not in str(msgspec.to_builtins(document))
            await side.until(lambda: "recovered" in steps(side))
            assert set(stub.backends.values()) == {"file"}
            assert side.journal.desired[0].extra_config == '{"password": "hush-hush-3"}'


async def test_a_rank_that_restarts_while_bypassed_is_bypassed_again(tmp_path):
    async with rig(tmp_path, dp=2) as (side, stub):
        await side.attach()
        await follow(side, file=quick("bypass", reconnect=False))
        await make_sick(stub, "file")
        await stub_sees(stub, lambda: bypassed(stub) == {True})
        await trio.to_thread.run_sync(lambda: stub.replace(1))
        await stub_sees(stub, lambda: stub.ranks[1].state.backend == "file")
        await stub_sees(stub, lambda: bypassed(stub) == {True})


async def test_a_rank_that_is_missing_stops_the_failover_not_the_sidecar(tmp_path):
    async with rig(tmp_path, dp=2) as (side, stub):
        await side.attach()
        await follow(side, file=quick("detach"))
        await trio.to_thread.run_sync(lambda: stub.kill(1))
        await side.until(lambda: bool(side.coordinator.registry.missing_ranks))
        await make_sick(stub, "file", ranks=(0,))
        await side.until(lambda: side.coordinator.failover.machine.reason == "ranks are missing")
        assert steps(side) == []


async def test_flapping_is_held_and_released_by_hand(tmp_path):
    """F84."""
    async with rig(tmp_path) as (side, stub):
        await side.attach()
        await follow(side, file=quick("bypass", flap_limit=3, confirm_s=0.0, backoff_s=0.01, steady_s=60.0))
        for _ in range(6):
            await make_sick(stub, "file")
            await side.until(lambda: side.coordinator.failover.machine.state in ("bypassed", "held"))
            await make_sick(stub)
            await side.until(lambda: side.coordinator.failover.machine.state in ("trial", "held"))
        document = await show(side)
        assert (document.state, document.transitions <= 3) == ("held", True)
        assert bypassed(stub) == {True}
        await side.ask(SetFailoverRequest(release=True))
        await side.until(lambda: side.coordinator.failover.machine.state == "trial")
        await side.until(lambda: "release" in steps(side))


async def test_what_put_refuses(tmp_path):
    """Nothing is kept of a refused request; a redacted secret is not taken for one (it would be lost)."""
    async with rig(tmp_path) as (side, _):
        with pytest.raises(InvalidRequest):
            await side.ask(SetFailoverRequest())
        with pytest.raises(InvalidRequest):
            await follow(side, file=quick("spares"))
        with pytest.raises(InvalidRequest):
            await follow(side, file=quick("bypass", spares=[MEM]))
        with pytest.raises(InvalidRequest):
            await follow(side, file=quick("bypass", backoff_max_s=0.1))
        with pytest.raises(UnknownBackend) as unknown:
            await follow(side, file=quick("spares", spares=[Spare(hicache_storage_backend="nope")]))
        assert unknown.value.message.startswith("spare 0 of 'file':")
        with pytest.raises(InvalidConfig):
            bad = Spare(hicache_storage_backend="mem", hicache_storage_backend_extra_config_json='{"password": "***"}')
            await follow(side, file=quick("spares", spares=[bad]))
        dynamic = Spare(hicache_storage_backend="dynamic")
        with pytest.raises(Forbidden):
            policies = {"file": quick("spares", spares=[dynamic])}
            await side.ask(SetFailoverRequest(policies=policies), OPERATOR)
        with pytest.raises(Forbidden):
            await side.ask(SetFailoverRequest(release=True), VIEWER)
        assert (await show(side)).policies == {}
        assert "failover" not in side.journal.settings


async def test_policies_are_replaced_or_merged(tmp_path):
    async with rig(tmp_path) as (side, _):
        await side.ask(SetFailoverRequest(policies={"file": quick("bypass"), "mem": quick("detach")}))
        document = await side.ask(SetFailoverRequest(policies={"*": quick("detach")}, keep_others=True))
        assert sorted(document.policies) == ["*", "file", "mem"]
        document = await side.ask(SetFailoverRequest(policies={"mem": None}, keep_others=True))
        assert sorted(document.policies) == ["*", "file"]
        document = await side.ask(SetFailoverRequest(policies={"mem": quick("none")}))
        assert sorted(document.policies) == ["mem"]


async def test_a_stored_policy_of_another_version_is_said_and_never_fatal(tmp_path):
    async with sidecar(tmp_path) as side:
        side.journal.set("failover", {"policies": {"file": {"action": "teleport", "password": "hush-hush-4"}}})
    async with rig(tmp_path) as (side, _):
        document = await show(side)
        assert (document.policies, len(document.warnings)) == ({}, 1)
        assert "hush" not in str(msgspec.to_builtins(document))


async def test_a_failover_that_is_cancelled_is_held(tmp_path):
    """An operator's "stop" says nothing of the place, and lasts: it was tried again after a pause once."""
    async with rig(tmp_path) as (side, stub):
        await side.attach()
        await follow(side, file=quick("spares", spares=[MEM], backoff_s=0.01, backoff_max_s=0.02))
        await trio.to_thread.run_sync(partial(stub.ranks[0].set, build_delay_s=30.0))
        await make_sick(stub, "file")
        await stub_sees(stub, lambda: stub.ranks[0].rec.phase == "preparing")
        running = side.coordinator.ctx.running
        with pytest.raises(OperationInProgress):
            await side.detach()
        await side.ask(api.CancelRequest(operation_id=running.id), ADMIN)
        await side.until(lambda: side.coordinator.failover.machine.state == "held")
        assert (stub.backends, bypassed(stub)) == ({0: "file"}, {True})
        assert steps(side) == ["bypass", "hold"]
        assert "cancelled" in (await show(side)).reason


async def test_policies_can_be_seen_and_set_in_every_state(tmp_path):
    """F85: no state in which the answer is not defined; what cannot be checked now is said."""
    async with sidecar(tmp_path) as side:
        document = await follow(side, file=quick("spares", spares=[MEM]))  # engine down
        assert document.warnings == ["not all ranks are connected: the spares were not checked"]
        with StubEngine(endpoint(tmp_path), dp=2) as stub:
            await side.ready()
            states = [(await side.status()).state]
            await side.attach()
            states.append((await side.status()).state)
            await side.ask(api.BypassRequest(enabled=True))
            states.append((await side.status()).state)
            await side.ask(api.BypassRequest(enabled=False))
            await side.ask(api.DrainRequest(timeout_s=5, hold_s=30))
            states.append((await side.status()).state)
            assert (await follow(side, file=quick("spares", spares=[MEM]))).warnings == []
            await side.ask(api.ResumeRequest())
            await trio.to_thread.run_sync(partial(stub.ranks[1].set, undo_fails=True, busy_at_commit=True))
            await trio.to_thread.run_sync(partial(stub.ranks[0].set, undo_fails=True, swap_error=True))
            with pytest.raises(HicacheError):
                await side.detach()
            states.append((await side.status()).state)
            await make_sick(stub, "file")
            document = await follow(side, file=quick("detach"))
            assert document.policies["file"].action == "detach"
            assert (await show(side)).state in ("watching", "suspect")
        await side.until(lambda: not side.coordinator.registry.live)
        states.append((await side.status(fresh=False)).state)
        assert (await follow(side)).policies == {}
    assert states[:4] == ["detached", "attached", "bypassed", "draining"]
    assert states[-1] == "engine_down"


async def test_a_policy_for_a_backend_that_nobody_knows_is_said(tmp_path):
    """A typing error would be a policy that never acts; it is kept all the same, and ``*`` is every backend."""
    async with rig(tmp_path, dp=1) as (side, stub):
        document = await follow(side, **{"fil": quick("bypass"), "file": quick("bypass"), "*": quick("none")})
        assert document.warnings == ["policies.fil: the engine knows no such backend; did you mean file?"]
        assert sorted(document.policies) == ["*", "fil", "file"]
        await trio.to_thread.run_sync(partial(stub.ranks[0].set, silent=frozenset({"describe"})))
        assert (await follow(side, fil=quick("detach"))).warnings == []
