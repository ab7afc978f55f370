"""The link's agent against a plain ROUTER, over real ipc sockets."""

import errno
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from tests.hooks.driver import FILE
from tests.hooks.router import Router
from tests.rigs.light_rank import LightRank

from hicache_hooks.faults import Faults
from hicache_hooks.queries import MAX_HELPERS
from hicache_proto.errors import InvalidRequest
from hicache_proto.hooklink import (
    MAX_LINK_BYTES,
    Answer,
    AskReport,
    Bypass,
    Call,
    ClearNamespace,
    Commit,
    Describe,
    Finalize,
    Freeze,
    Goodbye,
    Hold,
    Prepare,
    RankHello,
    Refused,
    Rehello,
    Release,
    SetView,
    Validate,
    WatchIdle,
    encode,
)
from hicache_proto.model import EffectiveState, RankIdentity, TargetState

MakeRank = Callable[..., LightRank]


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/hooks.sock"


@pytest.fixture
def make(endpoint: str) -> Iterator[MakeRank]:
    ranks: list[LightRank] = []

    def build(**options: object) -> LightRank:
        rank = LightRank(endpoint, **{"incarnation": "i1", **options})  # type: ignore[arg-type]
        ranks.append(rank)
        return rank

    yield build
    for rank in ranks:
        rank.close()
    left = [t.name for t in threading.enumerate() if t.name.startswith("hicache-agent")]
    assert left == [], "every agent thread ends with its rank"


def counted(rank: LightRank, name: str, at_least: int = 1) -> int:
    """A counter of the agent, once it has got there; the agent runs on its own thread."""
    limit = time.monotonic() + 5
    while (count := rank.hook.agent.counts[name]) < at_least and time.monotonic() < limit:
        threading.Event().wait(0.005)
    return count


def test_hello_welcome_and_heartbeats(endpoint: str, make: MakeRank) -> None:
    with Router(endpoint, heartbeat_s=0.05) as sidecar:
        rank = make(identity=RankIdentity(dp_rank=1, dp_size=2), epoch=3)
        hello = sidecar.welcome()
        assert (hello.engine_id, hello.incarnation, hello.epoch) == ("light", "i1", 3)
        assert hello.identity.dp_rank == 1
        assert hello.report.idle.counters["waiting_queue"] == 0
        first, second = sidecar.beat(), sidecar.beat()
        assert first.session == second.session == hello.session == rank.hook.agent.session
        assert rank.hook.agent.connected


def test_a_whole_operation_over_the_link(endpoint: str, make: MakeRank) -> None:
    with Router(endpoint) as sidecar:
        make()
        sidecar.welcome()
        for body, phase in (
            (Prepare(target=FILE, prepared_s=30), "prepared"),
            (Freeze(round=1, freeze_s=5), "frozen"),
            (Commit(in_doubt_s=10), "switched"),
            (Finalize(), "none"),
        ):
            answer = sidecar.ask(body, 1)
            assert answer.ok, answer
            assert answer.report.op_phase == phase
        assert answer.report.op_ended == "final"
        assert answer.report.state.backend == "file"
        assert answer.report.state.revision == 1


def test_a_change_of_state_is_told_at_once(endpoint: str, make: MakeRank) -> None:
    """The next regular heartbeat is a minute away. An answer that says it already is not followed by a heartbeat."""
    with Router(endpoint, heartbeat_s=60) as sidecar:
        rank = make()
        rank.adapter.build_gate = threading.Event()
        sidecar.welcome()
        call = sidecar.call(Prepare(target=FILE, prepared_s=30), 1)
        sidecar.beat(op_phase="preparing")
        rank.adapter.build_gate.set()
        assert sidecar.expect(Answer, call=call.call).report.op_phase == "prepared"
        assert sidecar.ask(Freeze(round=1, freeze_s=5), 1).report.holds == ["operation-1"]
        assert sidecar.ask(AskReport()).report.op_phase == "frozen"


def test_stateless_calls(endpoint: str, make: MakeRank) -> None:
    with Router(endpoint) as sidecar:
        rank = make()
        sidecar.welcome()
        rank.set_counters(future_thing=1)
        assert sidecar.ask(AskReport()).report.idle.counters["future_thing"] == 1
        plan = sidecar.ask(Validate(target=FILE)).plan
        assert plan is not None
        assert plan.relation == "attach"
        unknown = sidecar.ask(Validate(target=TargetState(backend="nope")))
        assert unknown.error is not None
        assert unknown.error.code == "unknown_backend"
        backends = sidecar.ask(Describe()).data
        assert backends is not None
        assert {"file", "light"} <= {b["name"] for b in backends["backends"]}
        assert sidecar.ask(Bypass(enabled=True)).data == {"was": False}
        assert sidecar.ask(AskReport()).report.state.bypass
        assert sidecar.ask(Bypass(enabled=False)).data == {"was": True}
        assert sidecar.ask(Hold(name="drain", hold_s=60)).report.holds == ["drain"]
        assert sidecar.ask(Release(name="drain")).data == {"released": True}
        assert sidecar.ask(Release(name="drain")).data == {"released": False}
        assert sidecar.ask(AskReport()).report.holds == []
        missing = sidecar.ask(ClearNamespace(namespace="light")).error
        assert missing is not None
        assert missing.code == "not_found"
        view = sidecar.ask(SetView(target=TargetState())).error
        assert view is not None
        assert view.code == "unsupported_by_engine"


def test_slow_queries_do_not_stop_the_heart(endpoint: str, make: MakeRank) -> None:
    """``clear`` hangs in the store; heartbeats and answers go on, and the number of hung threads is bounded (F46)."""
    go = threading.Event()
    with Router(endpoint, heartbeat_s=0.05) as sidecar:
        rank = make()
        rank.adapter.clear = lambda _: (go.wait(30), 7)[1]  # type: ignore[method-assign]
        sidecar.welcome()
        hung = [sidecar.call(ClearNamespace(namespace="light")) for _ in range(MAX_HELPERS)]
        sidecar.beat()
        assert sidecar.ask(AskReport()).ok
        refused = sidecar.ask(ClearNamespace(namespace="light")).error
        assert refused is not None
        assert refused.details["reason"] == "helpers_busy"
        go.set()
        for call in hung:
            assert sidecar.expect(Answer, call=call.call).data == {"deleted": 7}


def test_messages_of_another_session_are_dropped_and_counted(endpoint: str, make: MakeRank) -> None:
    """Rule 5: a stale FREEZE does nothing, and nobody answers it."""
    with Router(endpoint) as sidecar:
        rank = make()
        sidecar.welcome()
        stale = sidecar.call(Hold(name="drain", hold_s=60), session="another")
        assert sidecar.ask(AskReport()).report.holds == []
        assert rank.hook.agent.counts["foreign"] == 1
        assert rank.hook.gate.is_open
        assert not any(isinstance(m, Answer) and m.call == stale.call for _, m in sidecar.kept)


def test_random_bytes_are_dropped_and_counted(endpoint: str, make: MakeRank) -> None:
    """F95: garbage, wrong shapes, several frames, a body that does not fit its phase. The agent lives."""
    chance = random.Random(7)
    with Router(endpoint) as sidecar:
        rank = make()
        sidecar.welcome()
        good = encode(Call(session=sidecar.session, n=0, phase="report", call=99, body=AskReport()))
        bad: list[list[bytes]] = [
            [b""],
            [b"\x80\x04\x95"],
            [good, good],
            [good[:-1]],
            [msgspec.msgpack.encode({"type": "call"})],
            [b"\x91" * 5000],
            [encode(Call(session=sidecar.session, n=0, phase="undo", call=1, body=AskReport()))],
            [encode(Call(session=sidecar.session, n=-1, phase="report", call=1, body=AskReport()))],
        ]
        bad += [[chance.randbytes(chance.randrange(1, 200))] for _ in range(2000)]
        for index, frames in enumerate(bad):
            sidecar.raw(*frames)
            if index % 200 == 0:  # a ROUTER drops what is over its high-water mark
                assert sidecar.ask(AskReport()).ok
        assert sidecar.ask(AskReport()).ok
        assert rank.hook.agent.counts["malformed"] == len(bad)
        assert rank.hook.agent.counts["troubles"] == 0


def test_a_message_over_the_limit_costs_only_the_connection(endpoint: str, make: MakeRank) -> None:
    """libzmq drops the peer that sends more than MAXMSGSIZE; the rank says hello again."""
    with Router(endpoint) as sidecar:
        make()
        first = sidecar.welcome()
        sidecar.raw(b"\x00" * (MAX_LINK_BYTES + 1))
        assert sidecar.welcome().session != first.session
        assert sidecar.ask(AskReport()).ok


def test_an_answer_that_cannot_be_sent_becomes_an_error(endpoint: str, make: MakeRank) -> None:
    with Router(endpoint) as sidecar:
        rank = make()
        sidecar.welcome()
        rank.adapter.describe_backends = lambda: [{"name": "x" * (MAX_LINK_BYTES + 1)}]  # type: ignore[method-assign]
        for _ in range(2):
            error = sidecar.ask(Describe()).error
            assert error is not None
            assert error.details["reason"] == "unsendable"
            rank.adapter.describe_backends = lambda: [{"name": object()}]  # type: ignore[method-assign]
        assert sidecar.ask(AskReport()).ok


def test_rehello_starts_a_fresh_session_at_once(endpoint: str, make: MakeRank) -> None:
    with Router(endpoint) as sidecar:
        make()
        first = sidecar.welcome()
        sidecar.send(Rehello(session=first.session))
        second = sidecar.welcome(timeout_s=1.0)
        assert second.session != first.session
        assert sidecar.ask(AskReport()).ok


def test_refused_comes_back_after_the_time_it_was_told(endpoint: str, make: MakeRank) -> None:
    with Router(endpoint) as sidecar:
        make()
        first = sidecar.expect(RankHello)
        error = InvalidRequest("another engine's id").body()
        started = time.monotonic()
        sidecar.send(Refused(session=first.session, error=error, retry_s=0.3))
        second = sidecar.welcome()
        assert time.monotonic() - started >= 0.29
        assert second.session != first.session


def test_a_sidecar_that_never_welcomes_is_asked_again(endpoint: str, make: MakeRank) -> None:
    with Router(endpoint) as sidecar:
        rank = make()
        first = sidecar.expect(RankHello)
        assert sidecar.expect(RankHello).session != first.session
        assert rank.hook.agent.counts["no_welcome"] == 1


def test_a_new_sidecar_on_the_same_path_gets_a_fresh_hello(endpoint: str, make: MakeRank) -> None:
    """F102: the old peer is gone with its stale socket file; the handshake takes less than 2 s."""
    with Router(endpoint) as old:
        rank = make()
        first = old.welcome()
        assert old.ask(Hold(name="drain", hold_s=60)).ok
    Path(endpoint.removeprefix("ipc://")).touch()
    started = time.monotonic()
    with Router(endpoint) as new:
        hello = new.welcome()
        assert time.monotonic() - started < 2.0
        assert hello.session != first.session
        assert hello.report.holds == ["drain"], "the hello carries the full state"
        assert new.ask(AskReport()).ok
        assert rank.hook.agent.counts["disconnects"] == 1


def test_an_engine_without_a_sidecar_serves(endpoint: str, make: MakeRank) -> None:
    """No sidecar at all: admission is open, nothing piles up, leaving is quick; it connects when one comes."""
    rank = make()
    rank.hook.note_drift("somebody used the engine's own route")
    rank.request(3)
    with Router(endpoint) as sidecar:
        sidecar.welcome()
        assert sidecar.ask(AskReport()).ok
        assert rank.facts()["admitted"] == 3
        assert not any(not isinstance(m, RankHello) for _, m in sidecar.kept)
    started = time.monotonic()
    rank.close()
    assert time.monotonic() - started < 2.0


def test_jobs_run_without_a_socket_too(endpoint: str, make: MakeRank, monkeypatch: pytest.MonkeyPatch) -> None:
    """No descriptor is left for a socket: the closer that would free some must be started all the same."""

    def no_descriptors(_context: object) -> object:
        raise zmq.ZMQError(errno.EMFILE)

    ran = threading.Event()
    with monkeypatch.context() as patched:
        patched.setattr("hicache_hooks.agent.AgentSocket", no_descriptors)
        rank = make()
        assert counted(rank, "troubles") >= 1
        rank.hook.agent.run_soon(ran.set)
        assert ran.wait(5)
    with Router(endpoint) as sidecar:
        sidecar.welcome()
        assert sidecar.ask(AskReport()).ok


def test_watch_idle_tells_the_next_idle_moment_once(endpoint: str, make: MakeRank) -> None:
    with Router(endpoint) as sidecar:
        rank = make()
        sidecar.welcome()
        rank.set_counters(running_batch=1)
        assert sidecar.ask(WatchIdle(for_s=60)).ok
        assert rank.hook.gate.is_open, "admission stays open"
        sidecar.ask(AskReport())
        assert not any(getattr(m, "kind", "") == "idle" for _, m in sidecar.kept)
        rank.set_counters(running_batch=0)
        assert sidecar.notice("idle").report.idle.counters["running_batch"] == 0
        sidecar.ask(AskReport())
        assert not any(getattr(m, "kind", "") == "idle" for _, m in sidecar.kept)


def test_a_lease_end_wakes_a_sleeping_scheduler(endpoint: str, make: MakeRank) -> None:
    """F36: nobody renews; the agent's timer wakes the scheduler and the sidecar is told."""
    with Router(endpoint) as sidecar:
        make()
        sidecar.welcome()
        assert sidecar.ask(Prepare(target=FILE, prepared_s=0.2), 1).ok
        notice = sidecar.notice("lease_end")
        assert notice.report.op_ended == "expired"
        assert notice.report.state == EffectiveState(
            prefetch_policy="best_effort", write_policy="write_through", revision=0
        )


def test_a_manual_hold_ends_by_itself_and_held_requests_go_on(endpoint: str, make: MakeRank) -> None:
    with Router(endpoint) as sidecar:
        rank = make()
        sidecar.welcome()
        assert sidecar.ask(Hold(name="drain", hold_s=0.3)).report.holds == ["drain"]
        rank.request(2)
        assert "hold drain" in sidecar.notice("lease_end").detail
        assert sidecar.beat(holds=[]).report.idle.counters["waiting_queue"] == 0
        assert rank.hook.gate.is_open


@pytest.mark.parametrize("name", ["operation-1", "", "x" * 65])
def test_bad_hold_names_are_refused(endpoint: str, make: MakeRank, name: str) -> None:
    with Router(endpoint) as sidecar:
        make()
        sidecar.welcome()
        answer = sidecar.ask(Hold(name=name, hold_s=1))
        assert not answer.ok
        assert answer.report.holds == []


def test_a_cut_link_comes_back_with_the_same_state(endpoint: str, make: MakeRank) -> None:
    with Router(endpoint) as sidecar:
        make(faults=Faults("freeze.recv=cut,commit.before_send=error"))
        sidecar.welcome()
        assert sidecar.ask(Prepare(target=FILE, prepared_s=30), 1).ok
        sidecar.call(Freeze(round=1, freeze_s=5), 1)
        hello = sidecar.welcome()
        assert (hello.report.op_n, hello.report.op_phase) == (1, "prepared")
        assert sidecar.ask(Freeze(round=1, freeze_s=5), 1).ok
        lost = sidecar.call(Commit(in_doubt_s=10), 1)
        sidecar.beat(op_phase="switched")
        assert sidecar.ask(Commit(in_doubt_s=10), 1).ok, "a repeat reads the present state"
        assert not any(isinstance(m, Answer) and m.call == lost.call for _, m in sidecar.kept)


def test_goodbye_is_said(endpoint: str, make: MakeRank) -> None:
    with Router(endpoint) as sidecar:
        rank = make()
        hello = sidecar.welcome()
        rank.close()
        assert sidecar.expect(Goodbye).session == hello.session


def test_answers_of_an_ended_session_are_not_sent(endpoint: str, make: MakeRank) -> None:
    with Router(endpoint) as sidecar:
        rank = make()
        rank.adapter.build_gate = threading.Event()
        first = sidecar.welcome()
        old = sidecar.call(Prepare(target=FILE, prepared_s=30), 1)
        sidecar.beat(op_phase="preparing")
        sidecar.send(Rehello(session=first.session))
        sidecar.welcome()
        rank.adapter.build_gate.set()
        assert sidecar.ask(Prepare(target=FILE, prepared_s=30), 1).report.op_phase == "prepared"
        assert counted(rank, "stale_answers") == 1
        assert not any(
            isinstance(m, Answer) and m.call == old.call and m.session == first.session for _, m in sidecar.kept
        )
