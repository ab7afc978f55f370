"""The child that asks a vendor's library: its deadline, its end with its parent, and what a command line shows."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hicache_hooks.backends import child

SECRET = "SENTINEL-of-a-rehearsal"
HANG = """
import threading
open(sys.argv[1], "w").write(str(os.getpid()))
threading.Event().wait(120)
"""
PARENT = f"""
import sys
from hicache_hooks.backends import child
child.ask({HANG!r}, [sys.argv[1]], "", 100.0)
"""


def alive(pid: int) -> bool:
    """Runs still; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def poll(what, within_s: float) -> bool:
    end = time.monotonic() + within_s
    while not what():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)  # pace of a poll
    return True


def test_it_is_gone_with_its_parent(tmp_path: Path) -> None:
    """F111: SIGKILL of the process that probes: the probe is gone in less than two seconds, though it hangs."""
    said = tmp_path / "pid"
    with subprocess.Popen([sys.executable, "-c", PARENT, str(said)]) as parent:
        try:
            assert poll(lambda: said.exists() and said.read_text() != "", 60)
            pid = int(said.read_text())
            assert alive(pid)
            parent.kill()
            parent.wait()
            assert poll(lambda: not alive(pid), 2.0)
        finally:
            parent.kill()


def test_a_parent_that_is_gone_already_leaves_no_child() -> None:
    """F111: it ended between fork and the child's first line."""
    command = [sys.executable, "-c", child._TIED + "print('went on')", "1" if os.getppid() != 1 else "2"]
    done = subprocess.run(command, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (1, b"")


def test_time_runs_out() -> None:
    """F66: killed at the deadline, in the group as well."""
    began = time.monotonic()
    assert child.ask("import threading; threading.Event().wait(60)", [], "", 0.5) is None
    assert time.monotonic() - began < 20


def test_what_it_is_given_is_on_no_command_line() -> None:
    """F94: ``ps`` shows every user's command lines; parameters come by standard input."""
    code = "print(sys.stdin.read(), '|', open('/proc/self/cmdline').read().replace(chr(0), ' '))"
    said, status = child.ask(code, ["harmless"], SECRET, 30) or ("", None)
    given, _, shown = said.partition("|")
    assert (given.strip(), status) == (SECRET, 0)
    assert "harmless" in shown
    assert SECRET not in shown


def test_it_starts_no_hooks_and_says_how_it_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HICACHE_SIDECAR", "ipc:///nowhere")
    assert child.ask("print(os.environ.get('HICACHE_SIDECAR'))", [], "", 30) == ("None\n", 0)
    assert child.ask("os.kill(os.getpid(), signal.SIGSEGV)", [], "", 30) == ("", -signal.SIGSEGV)
