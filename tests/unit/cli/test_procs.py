"""The process rig itself: a rig that hides failures would make every test behind it worthless."""

import signal
import sys
from pathlib import Path

import pytest
from tests.rigs.procs import Process, Processes, ProcessFailed, accepts, http_json


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_children_are_gone_after_the_block(tmp_path: Path) -> None:
    code = "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
    with Processes(tmp_path) as processes:
        process = processes.start("parent", python(code + "print('up', flush=True); p.wait()"))
        process.wait_until("line", lambda: "up" in process.text(), 20)
        assert len(process.leftovers()) == 2
    assert process.leftovers() == []


def test_a_child_that_outlives_its_parent_is_killed_too(tmp_path: Path) -> None:
    code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    with Processes(tmp_path) as processes:
        process = processes.start("parent", python(code))
        assert process.wait(20) == 0
        assert len(process.leftovers()) == 1
        process.stop()
    assert process.leftovers() == []


def test_a_process_that_ends_too_early_is_reported_with_its_log(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        process = processes.start("dies", python("print('the reason', flush=True); raise SystemExit(3)"))
        with pytest.raises(ProcessFailed, match=r"(?s)ended with 3 before socket.*the reason"):
            process.wait_until("socket", lambda: False, 20)


def test_a_process_that_never_gets_ready_is_reported(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        process = processes.start("slow", python("import time; time.sleep(600)"))
        with pytest.raises(ProcessFailed, match="no socket within"):
            process.wait_until("socket", lambda: accepts(str(tmp_path / "absent")), 0.1)


def test_a_stopped_and_a_deaf_process_still_end(tmp_path: Path) -> None:
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    )
    with Processes(tmp_path) as processes:
        process = processes.start("deaf", python(code))
        process.wait_until("line", lambda: "up" in process.text(), 20)
        process.signal(signal.SIGSTOP)
        assert process.stop(timeout_s=0.2) == -signal.SIGKILL


def test_http_to_nobody_raises() -> None:
    with pytest.raises(OSError):
        http_json("GET", "http://127.0.0.1:9/", timeout_s=1)


def test_the_log_tail_is_attached_to_a_failure(tmp_path: Path) -> None:
    process: Process | None = None

    def failing() -> None:
        nonlocal process
        with Processes(tmp_path) as processes:
            process = processes.start("talks", python("print('last words', flush=True); import time; time.sleep(600)"))
            process.wait_until("line", lambda: "last words" in process.text(), 20)  # type: ignore[union-attr]
            raise ValueError("the test's own failure")

    with pytest.raises(ValueError, match="own failure") as caught:
        failing()
    assert any("last words" in note for note in caught.value.__notes__)
