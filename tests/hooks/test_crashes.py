"""Real processes on both ends: whoever dies or stops, the rank ends on one whole state with admission open."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.hooks.driver import FILE
from tests.hooks.router import Router
from tests.rigs.light_rank import LightRank
from tests.rigs.rank_process import ROOT, RankProcess

from hicache_proto.hooklink import Commit, Finalize, Freeze, Prepare, Undo
from hicache_proto.model import TargetState

LEASE_S = 0.6


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/hooks.sock"


@pytest.fixture
def rank(endpoint: str) -> Iterator[LightRank]:
    made = LightRank(endpoint)
    yield made
    made.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("phase", ["prepare", "freeze", "drain", "commit", "hold"])
def test_a_dead_or_stopped_sidecar_costs_only_the_lease(
    rank: LightRank, endpoint: str, phase: str, how: signal.Signals
) -> None:
    """F36: back on the old state, open, within the lease and a margin; held requests go on; nothing is left."""
    if phase == "drain":
        rank.set_counters(running_batch=1)
    peer = subprocess.Popen(
        [sys.executable, "-m", "tests.hooks.peer", endpoint, phase, str(LEASE_S)], stdout=subprocess.PIPE, cwd=ROOT
    )
    try:
        assert peer.stdout is not None
        assert peer.stdout.readline() == b"reached\n"
        started = time.monotonic()
        peer.send_signal(how)
        if phase != "prepare":
            rank.request(3)
        ended = until(lambda: open_and_old(rank))
        assert ended - started < LEASE_S + 1.0
        facts = rank.facts()
        assert facts["admitted"] == (0 if phase == "prepare" else 3)
        assert facts["held"] == 0
        assert facts["report"]["op_ended"] == ("" if phase == "hold" else "expired")
        until(lambda: rank.facts()["pages"] == {})
    finally:
        peer.kill()
        peer.wait()
        peer.stdout.close()
    with Router(endpoint) as sidecar:  # and the next sidecar finds a rank that works
        sidecar.welcome()
        rank.set_counters(running_batch=0)
        for body in (
            Prepare(target=FILE, prepared_s=30),
            Freeze(round=1, freeze_s=5),
            Commit(in_doubt_s=10),
            Finalize(),
        ):
            assert sidecar.ask(body, 2).ok


def open_and_old(rank: LightRank) -> bool:
    facts = rank.facts()
    report = facts["report"]
    return facts["open"] and report["op_phase"] == "none" and report["state"]["backend"] is None and not facts["held"]


def until(done: object, timeout_s: float = 10.0) -> float:
    """Look until ``done()``; when it was. The rank's own threads get there, nothing here helps them."""
    assert callable(done)
    limit = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < limit, "not reached"
        time.sleep(0.01)
    return time.monotonic()


@pytest.mark.parametrize("point", ["prepare.recv", "build.before_apply", "freeze.after_apply", "commit.before_send"])
def test_a_rank_that_is_killed_starts_fresh(endpoint: str, point: str) -> None:
    """The process dies at a fault point; the next one says hello with a higher epoch, no operation, the old state."""
    with Router(endpoint) as sidecar:
        with RankProcess(endpoint, "--incarnation", "i1", faults=f"{point}=kill") as rank:
            first = sidecar.welcome()
            for body in (Prepare(target=FILE, prepared_s=30), Freeze(round=1, freeze_s=5), Commit(in_doubt_s=10)):
                call = sidecar.call(body, 1)
                if call.phase == point.split(".")[0] or point.startswith("build"):
                    break
                assert sidecar.wait_for(lambda m, c=call: getattr(m, "call", 0) == c.call)  # type: ignore[misc]
            assert rank.wait_end() == -signal.SIGKILL
        with RankProcess(endpoint, "--incarnation", "i1", "--epoch", "1"):
            second = sidecar.welcome()
    assert second.epoch == first.epoch + 1
    assert second.incarnation == first.incarnation
    assert (second.report.op_n, second.report.state.backend) == (0, None)


def test_a_rank_that_dies_in_its_canary(endpoint: str) -> None:
    """F19: a native crash while building ends the process, not the sidecar's socket."""
    target = TargetState(backend="file", extra_config=f'{{"die": {int(signal.SIGSEGV)}}}')
    with Router(endpoint) as sidecar:
        with RankProcess(endpoint) as rank:
            sidecar.welcome()
            sidecar.call(Prepare(target=target, prepared_s=30), 1)
            assert rank.wait_end() == -signal.SIGSEGV
        with RankProcess(endpoint, "--epoch", "1"):
            assert sidecar.welcome().report.op_n == 0


def test_a_rank_that_was_stopped_past_its_lease_refuses_commit(endpoint: str) -> None:
    """Rule 2: the lease is looked at when COMMIT runs. SIGSTOP longer than the lease, then COMMIT is waiting."""
    with Router(endpoint) as sidecar, RankProcess(endpoint) as rank:
        sidecar.welcome()
        assert sidecar.ask(Prepare(target=FILE, prepared_s=30), 1).ok
        assert sidecar.ask(Freeze(round=1, freeze_s=0.5), 1).ok
        rank.signal(signal.SIGSTOP)
        stopped = time.monotonic()
        call = sidecar.call(Commit(in_doubt_s=10), 1)
        until(lambda: time.monotonic() > stopped + 0.8)
        rank.signal(signal.SIGCONT)
        answer = sidecar.wait_for(lambda m: getattr(m, "call", 0) == call.call)
        assert getattr(answer, "ok", True) is False
        facts = rank.facts()
        assert facts["open"]
        assert facts["report"]["op_ended"] == "expired"
        assert facts["report"]["state"]["backend"] is None


def test_a_hanging_builder_holds_up_nobody(endpoint: str) -> None:
    """A store's set-up that hangs for two seconds: requests are admitted all the while, UNDO is answered at once."""
    target = TargetState(backend="file", extra_config='{"build_hang_s": 2.0}')
    with Router(endpoint) as sidecar, RankProcess(endpoint) as rank:
        sidecar.welcome()
        sidecar.call(Prepare(target=target, prepared_s=30), 1)
        sidecar.beat(op_phase="preparing")
        assert rank.command(request=5)[0]["open"]
        until(lambda: rank.facts()["admitted"] == 5)
        undone = sidecar.ask(Undo(), 1)
        assert (undone.ok, undone.report.op_ended) == (True, "undone")
        busy = sidecar.ask(Prepare(target=FILE, prepared_s=30), 2)
        assert busy.error is not None, "all of this took less than the builder's two seconds"
        assert busy.error.details["reason"] == "builder_busy"
        until(lambda: sidecar.ask(Prepare(target=FILE, prepared_s=30), 2).ok)
        assert sidecar.ask(Undo(), 2).ok
        until(lambda: rank.facts()["pages"] == {})


def test_cycles_leave_no_thread_descriptor_or_page(rank: LightRank, endpoint: str) -> None:
    """F43: 100 attaches and detaches over the link."""
    with Router(endpoint) as sidecar:
        sidecar.welcome()
        counts = []
        for cycle in range(100):
            n = 2 * cycle + 1
            for number, target in ((n, FILE), (n + 1, TargetState())):
                for body in (
                    Prepare(target=target, prepared_s=30),
                    Freeze(round=1, freeze_s=5),
                    Commit(in_doubt_s=10),
                    Finalize(),
                ):
                    assert sidecar.ask(body, number).ok
            facts = rank.facts()
            counts.append((len([t for t in facts["threads"] if "light-worker" in t]), facts["fds"]))
            assert facts["pages"] == {}
        assert len(set(counts[10:])) == 1, counts
