"""``hicachectl demo`` for real: it keeps its promises, and leaves nothing running however it ends."""

import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest
from tests.rigs.procs import Process, Processes, accepts

LIMIT_S = 180  # the demo's own promise: under three minutes


def demo(processes: Processes, folder: str, *flags: str) -> Process:
    argv = [sys.executable, "-m", "hicache_sidecar.cli.main", *flags, "demo"]
    return processes.start("demo", argv, {"TMPDIR": folder})


def mentions(text: str) -> list[str]:
    """Command lines of live processes that name ``text``."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                state = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[0]
                command = Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if text in command and state not in ("Z", "X"):
                found.append(f"{entry}: {command}")
    return found


@pytest.fixture
def short_folder():
    """Sockets need a short path; pytest's own folders have long names."""
    with tempfile.TemporaryDirectory(prefix="hd-") as folder:
        yield folder


@pytest.mark.timeout(LIMIT_S + 30)
def test_the_demo_keeps_every_promise_and_leaves_nothing(tmp_path: Path, short_folder: str) -> None:
    with Processes(tmp_path) as processes:
        begun = time.monotonic()
        process = demo(processes, short_folder, "-o", "json")
        code = process.wait(LIMIT_S)
        assert time.monotonic() - begun < LIMIT_S
        assert code == 0, process.tail()
        told = json.loads(process.text())
    assert told["success"] is True
    assert told["error"] is None
    checks = [check for step in told["steps"] for check in step["checks"]]
    assert len(checks) == told["checks"] >= 20
    assert all(check["kept"] for check in checks)
    typed = [command["command"] for step in told["steps"] for command in step["commands"]]
    for word in (
        "hicache-sidecar",
        "hicache-engine",
        "hicachectl attach file",
        "hicachectl policy",
        "hicachectl detach",
    ):
        assert any(command.startswith(word) for command in typed), word
    assert mentions(short_folder) == []
    assert os.listdir(short_folder) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_demo_leaves_nothing_running(tmp_path: Path, short_folder: str, number: signal.Signals) -> None:
    """Also when it is killed outright: the kernel tells its children (their directory stays then)."""
    with Processes(tmp_path) as processes:
        process = demo(processes, short_folder)

        def sidecar_is_up() -> bool:
            return any(accepts(str(path)) for path in Path(short_folder).glob("*/run/control.sock"))

        process.wait_until("sidecar", sidecar_is_up, 60)
        process.wait_until("engine", lambda: any("embedded" in line for line in mentions(short_folder)), 60)
        process.signal(number)
        code = process.wait(60)
        deadline = time.monotonic() + 30
        while mentions(short_folder) and time.monotonic() < deadline:
            time.sleep(0.05)  # pace of a poll: after SIGKILL nobody waits for the children but us
        assert mentions(short_folder) == []
        if number is signal.SIGKILL:
            assert code == -signal.SIGKILL
        else:
            assert code == 130
            assert os.listdir(short_folder) == []
            assert "interrupted" in process.text()
