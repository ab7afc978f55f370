"""Hello and liveness, through the whole engine side: who is refused, who may come back, who follows."""

import secrets

import pytest
import trio
from tests.protocol.support import ADMIN, WAIT_S, dealer, endpoint, receive, rig, stub_sees

from hicache_proto import api
from hicache_proto.hooklink import Notice, RankHello, encode
from hicache_proto.model import EffectiveState, RankIdentity
from hicache_proto.version import PROTOCOL_VERSION


def hello(**changes):
    fields = {
        "protocol": PROTOCOL_VERSION,
        "engine_id": "stub",
        "session": secrets.token_hex(8),
        "role": "rank",
        "identity": RankIdentity(),
        "pid": 1,
        "incarnation": "other",
        "epoch": 1,
    }
    return RankHello(**(fields | changes))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"protocol": PROTOCOL_VERSION + 1}, "protocol_version"),
        ({"protocol": PROTOCOL_VERSION - 2}, "protocol_version"),
        ({"engine_id": "another"}, "engine_id"),
        ({"role": "spectator"}, "role"),
        ({"identity": RankIdentity(dp_rank=3, dp_size=2)}, "topology"),
        ({"incarnation": "other"}, "rank_in_use"),
        ({"session": ""}, "session"),
    ],
)
async def test_refused_hellos(tmp_path, changes, reason):
    """Another engine, another version, a second live engine: refused with a reason, counted; the first serves on."""
    async with rig(tmp_path, dp=2) as (side, stub):
        with dealer(endpoint(tmp_path)) as sock:
            sock.send(encode(hello(**changes)))
            refused = await receive(sock)
            assert refused.error.details["reason"] == reason
            assert side.coordinator.counters.hellos_refused[reason] == 1
        assert (await side.attach()).changed
        assert stub.backends == {0: "file", 1: "file"}


async def test_a_refusal_is_logged_once_per_process(tmp_path, caplog):
    """An operator who started an engine twice finds it in the sidecar's log, and the log does not fill with it."""
    async with rig(tmp_path) as (side, _stub):
        with dealer(endpoint(tmp_path)) as sock:
            for pid in (1, 1, 2):
                sock.send(encode(hello(pid=pid)))
                await receive(sock)
        assert side.coordinator.counters.hellos_refused["rank_in_use"] == 3
    said = [record.getMessage() for record in caplog.records if "is refused" in record.getMessage()]
    assert [text.partition(",")[0] for text in said] == ["hello of process 1", "hello of process 2"]
    assert "rank_in_use" in said[0]


async def test_version_one_older_is_understood(tmp_path):
    """A hook one version older works, and is answered in its version."""
    async with rig(tmp_path, protocol=PROTOCOL_VERSION - 1) as (side, _stub):
        assert side.coordinator.registry.ranks[0].hello.protocol == PROTOCOL_VERSION - 1
        assert (await side.attach()).changed


async def test_sizes_must_agree(tmp_path):
    """Ranks of one launch that disagree about its sizes: the second is refused."""
    async with rig(tmp_path, dp=2) as (_side, stub):
        with dealer(endpoint(tmp_path)) as sock:
            sock.send(encode(hello(incarnation=stub.incarnation, identity=RankIdentity(0, 0, 0, 3, 1, 1), epoch=9)))
            assert (await receive(sock)).error.details["reason"] == "topology"


async def test_goodbye_and_return(tmp_path):
    """A rank that leaves is missing at once; the same rank may come back."""
    async with rig(tmp_path, dp=2) as (side, stub):
        stub.leave(1, "rolling restart")
        await side.until(lambda: side.coordinator.registry.missing_ranks == [1])
        document = await side.status(fresh=False)
        assert document.missing_ranks == [1]
        assert [r.connected for r in document.ranks] == [True, False]
        await trio.to_thread.run_sync(lambda: stub.ranks[1].set(muted=False))
        stub.do(stub.ranks[1].hello)
        await side.ready()


async def test_frontend_is_no_rank_and_follows(tmp_path):
    """A frontend counts as no rank; it is told what the ranks run when it comes and after FINALIZE, without secrets."""
    async with rig(tmp_path, dp=1, frontends=1) as (side, stub):
        await side.until(lambda: len(side.coordinator.registry.frontends) == 1)
        assert side.coordinator.registry.expected == 1
        front = stub.frontends[0]
        await stub_sees(stub, lambda: [view.backend for view in front.views] == [None])
        await side.attach(config='{"path": "/a", "password": "hunter22"}')
        await stub_sees(stub, lambda: [view.backend for view in front.views] == [None, "file"])
        assert "hunter22" not in (front.views[1].extra_config or "")
        assert front.log == [("set_view", 0)] * 2


async def test_a_frontend_follows_the_ranks_not_the_operations(tmp_path):
    """One that comes late, or a change that the engine made by itself: the view is what the ranks run."""
    async with rig(tmp_path, dp=2, frontends=1) as (side, stub):
        front = stub.frontends[0]
        await stub_sees(stub, lambda: len(front.views) == 1)
        for rank in stub.ranks.values():
            rank.state = EffectiveState(backend="dynamic", prefetch_policy="timeout")  # a plain store, read later
            await side.status()
        await stub_sees(stub, lambda: [view.backend for view in front.views] == [None, "dynamic"])
        assert front.views[1].prefetch_policy == "timeout"
        stub.do(front.hello)
        await stub_sees(stub, lambda: [view.backend for view in front.views] == [None, "dynamic", "dynamic"])


async def test_drift_that_a_rank_noticed_is_an_event(tmp_path):
    """The engine's own admin call behind our back: said at once, by the rank that saw it."""
    async with rig(tmp_path, dp=2) as (side, stub):
        stream = side.coordinator.watch(api.WatchRequest(), ADMIN)
        assert (await anext(stream)).kind == "snapshot"
        rank = stub.ranks[1]
        detail = "the engine's own attach: none -> file"
        stub.do(lambda: rank.send(Notice(session=rank.session, kind="drift", report=rank.report(), detail=detail)))
        with trio.fail_after(WAIT_S):
            event = await anext(stream)
        await stream.aclose()
        assert (event.kind, event.data) == ("drift", {"rank": 1, "detail": detail})


async def test_a_thread_that_hangs_in_a_store_is_an_event(tmp_path):
    """F39: status, the log and the events name it; so is its end."""
    async with rig(tmp_path, dp=2) as (side, stub):
        await side.attach()
        stream = side.coordinator.watch(api.WatchRequest(), ADMIN)
        assert (await anext(stream)).kind == "snapshot"
        await trio.to_thread.run_sync(lambda: stub.ranks[1].set(stuck=("backup-0",)))
        with trio.fail_after(WAIT_S):
            event = await anext(stream)
            assert (event.kind, event.data) == ("storage_stuck", {"rank": 1, "threads": ["backup-0"]})
            assert "rank 1: stuck inside the store: backup-0" in (await side.status()).warnings
            await trio.to_thread.run_sync(lambda: stub.ranks[1].set(stuck=()))
            event = await anext(stream)
        await stream.aclose()
        assert (event.kind, event.data) == ("storage_unstuck", {"rank": 1})
