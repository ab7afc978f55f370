"""Scheduler processes: deaths, restarts, stops; nothing is left behind. Real processes and signals."""

import os
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.engine.conftest import SMALL
from tests.e2e.engine.test_front import until_running
from tests.rigs.procs import Engine, Processes, http_json, program


def health(engine: Engine) -> dict[str, Any]:
    return dict(http_json("GET", f"{engine.url}/health")[1])


def alive(pid: int) -> bool:
    """Not a zombie, not gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def until(what: str, true: Any, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, f"no {what} within {timeout_s} s"
        time.sleep(0.02)  # pace of a poll


def asked(engine: Engine, text: str, tokens: int, dp_rank: int) -> tuple[threading.Thread, list[tuple[int, Any]]]:
    """A request in a thread of its own; the list holds its status and answer once it has one."""
    answers: list[tuple[int, Any]] = []
    body = {"text": text, "sampling_params": {"max_new_tokens": tokens}, "dp_rank": dp_rank}
    thread = threading.Thread(target=lambda: answers.append(http_json("POST", f"{engine.url}/generate", body, 60.0)))
    thread.start()
    return thread, answers


def test_a_scheduler_that_dies_is_started_again_and_its_requests_fail(processes: Processes) -> None:
    """kill -9 of replica 1: 503 in JSON for what it owed, replica 0 untouched, the next epoch serves."""
    engine = processes.engine(None, "--dp", "2", *SMALL)
    before = health(engine)["ranks"]
    expected = engine.generate("after the crash as before", 8, dp_rank=1)["output_ids"]
    thread, answers = asked(engine, "owed", 900, 1)
    until_running(engine, {1})
    other, others = asked(engine, "not concerned", 200, 0)
    os.kill(before[1]["pid"], signal.SIGKILL)
    thread.join(10)
    ((status, answer),) = answers
    assert (status, answer["error"]["code"], answer["error"]["retryable"]) == (503, "no_engine", True)
    assert answer["error"]["details"]["reason"] == "rank_lost"
    assert health(engine)["status"] == "starting"
    status, answer = http_json("POST", f"{engine.url}/generate", {"text": "x", "dp_rank": 1})
    assert (status, answer["error"]["details"]["reason"]) == (503, "rank_down")
    assert engine.generate("the other one serves", 2)["meta_info"]["dp_rank"] == 0
    until("restarted scheduler", lambda: health(engine)["status"] == "ok")
    after = health(engine)["ranks"]
    assert [rank["epoch"] for rank in after] == [1, 2]
    assert after[0]["pid"] == before[0]["pid"]
    assert engine.generate("after the crash as before", 8, dp_rank=1)["output_ids"] == expected
    other.join(30)
    assert others[0][0] == 200


def test_sigterm_lets_running_requests_finish_and_leaves_nothing(processes: Processes) -> None:
    engine = processes.engine(None, "--dp", "2", *SMALL, TMPDIR=str(processes.root))
    pids = [rank["pid"] for rank in health(engine)["ranks"]]
    assert list(processes.root.glob("hicache-engine-*")) or os.environ.get("XDG_RUNTIME_DIR")
    thread, answers = asked(engine, "may end", 200, 0)
    until_running(engine, {0})
    engine.process.signal(signal.SIGTERM)
    assert engine.process.wait() == 0
    thread.join(5)
    status, answer = answers[0]
    assert status == 200
    assert len(answer["output_ids"]) == 200
    assert not any(alive(pid) for pid in pids)
    assert not list(processes.root.glob("hicache-engine-*"))
    assert "Traceback" not in engine.process.text()


def test_a_request_that_takes_too_long_does_not_hold_up_the_stop(processes: Processes) -> None:
    engine = processes.engine(None, *SMALL, "--context", "4096", "--stop-timeout", "3")
    thread, answers = asked(engine, "will not end in time", 4000, 0)
    until_running(engine, {0})
    began = time.monotonic()
    engine.process.signal(signal.SIGTERM)
    engine.process.wait()
    assert time.monotonic() - began < 4.0
    thread.join(5)
    assert not answers or answers[0][0] >= 500


def test_schedulers_do_not_outlive_a_killed_parent(processes: Processes) -> None:
    engine = processes.engine(None, "--dp", "2", *SMALL)
    pids = [rank["pid"] for rank in health(engine)["ranks"]]
    engine.process.signal(signal.SIGKILL)
    until("end of the schedulers", lambda: not any(alive(pid) for pid in pids), 12.0)


def test_a_stopped_scheduler_does_not_hold_up_the_stop(processes: Processes) -> None:
    """SIGSTOP: it takes no message and no SIGTERM; the supervisor kills it within the budget."""
    engine = processes.engine(None, "--dp", "2", *SMALL, "--stop-timeout", "3")
    pids = [rank["pid"] for rank in health(engine)["ranks"]]
    os.kill(pids[1], signal.SIGSTOP)
    began = time.monotonic()
    engine.process.signal(signal.SIGTERM)
    assert engine.process.wait() == 1
    assert time.monotonic() - began < 4.5
    assert not any(alive(pid) for pid in pids)


def test_the_terminals_interrupt_stops_it_in_good_order(processes: Processes) -> None:
    """^C goes to the whole process group: the schedulers leave the decision to their parent."""
    engine = processes.engine(None, *SMALL)
    os.killpg(engine.process.pid, signal.SIGINT)
    assert engine.process.wait() == 0
    assert "Traceback" not in engine.process.text()


def test_idle_costs_next_to_nothing(processes: Processes) -> None:
    """F4: nobody spins. CPU time of the scheduler over 3 s of idleness, from /proc."""
    engine = processes.engine(None, *SMALL)
    pid = health(engine)["ranks"][0]["pid"]
    engine.generate("warm", 4)
    engine.flush()

    def cpu_s() -> float:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    before, until_s = cpu_s(), time.monotonic() + 3.0
    threading.Event().wait(until_s - time.monotonic())  # the measured interval itself
    assert cpu_s() - before < 0.1


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--page-size", "0"], "--page-size"),
        (["--heads", "3"], "--heads"),
        (["--layout", "no_such"], "--layout"),
        (["--http", "nowhere"], "HOST:PORT"),
        (["--l1-tokens", "8"], "--l1-tokens"),
        (["--engine-id", ""], "--engine-id"),
        (["--no-such-flag"], "--no-such-flag"),
        (["--stop-timeout", "nan"], "--stop-timeout"),
    ],
)
def test_bad_flags_end_with_2_and_say_which(flags: list[str], said: str) -> None:
    ended = subprocess.run(
        [*program("hicache_hooks.embedded.main"), *flags], capture_output=True, text=True, timeout=30, check=False
    )
    assert ended.returncode == 2
    assert said in ended.stderr


def test_a_taken_address_is_a_clear_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        ended = subprocess.run(
            [*program("hicache_hooks.embedded.main"), "--http", address],
            capture_output=True, text=True, timeout=30, check=False,
        )  # fmt: skip
    assert ended.returncode == 1
    assert f"cannot listen on {address}" in ended.stderr


def test_cuda_without_a_gpu_is_said_plainly(processes: Processes) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("a CUDA device is here: tests/gpu/check.py is the test")
    argv = [*program("hicache_hooks.embedded.main"), "--device", "cuda", "--http", "127.0.0.1:0"]
    process = processes.start("cuda", argv)
    assert process.wait(30.0) == 1
    assert "no CUDA device" in process.text()
    assert "could not be started" in process.text()
