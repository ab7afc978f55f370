"""The grammar of fault points, and that a point armed by a file fires once, in one process, when it is told."""

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hicache_proto.faults import FIRED, LINKED, PLAIN, RAISING, FaultError, FaultPlan

POINTS = {"commit.recv": LINKED, "commit.before_apply": RAISING, "begin.before_fsync": PLAIN}


def test_a_file_arms_a_point_each_time_it_is_there(tmp_path: Path) -> None:
    arm = tmp_path / "arm"
    faults = FaultPlan(POINTS, f"commit.recv=error@{arm}")
    faults.hit("commit", "recv")
    for _ in range(2):
        arm.touch()
        with pytest.raises(FaultError):
            faults.hit("commit", "recv")
        assert not arm.exists()
        assert Path(f"{arm}{FIRED}").exists()
        faults.hit("commit", "recv")
    assert faults.hits == ["commit.recv", "commit.recv"]


def test_two_actions_at_one_point_are_armed_apart(tmp_path: Path) -> None:
    faults = FaultPlan(POINTS, f"commit.recv=error@{tmp_path}/a, commit.recv=hang:0@{tmp_path}/b")
    (tmp_path / "b").touch()
    faults.hit("commit", "recv")
    (tmp_path / "a").touch()
    with pytest.raises(FaultError):
        faults.hit("commit", "recv")


def test_hold_ends_when_it_is_let_go(tmp_path: Path) -> None:
    arm = tmp_path / "arm"
    faults = FaultPlan(POINTS, f"begin.before_fsync=hold:60@{arm}")
    arm.touch()
    held = threading.Thread(target=faults.hit, args=("begin", "before_fsync"))
    held.start()
    fired = Path(f"{arm}{FIRED}")
    while not fired.exists():
        assert held.is_alive()
    assert held.is_alive()
    fired.unlink()
    held.join(10)
    assert not held.is_alive()


def test_hold_ends_by_itself(tmp_path: Path) -> None:
    faults = FaultPlan(POINTS, f"begin.before_fsync=hold:0.01@{tmp_path}/arm")
    (tmp_path / "arm").touch()
    faults.hit("begin", "before_fsync")
    assert faults.hits == ["begin.before_fsync"]


def test_of_many_processes_one_fires(tmp_path: Path) -> None:
    """The sidecar's rank or an engine's replica: who comes first dies, the others go on."""
    code = (
        "import sys; from hicache_proto.faults import PLAIN, FaultPlan\n"
        "faults = FaultPlan({'a.b': PLAIN}, 'a.b=kill@' + sys.argv[1])\n"
        "sys.stdin.readline(); faults.hit('a', 'b')"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", code, f"{tmp_path}/arm"], stdin=subprocess.PIPE) for _ in range(3)
    ]
    (tmp_path / "arm").touch()
    codes = []
    for process in started:
        process.communicate(b"\n", timeout=30)
        codes.append(process.returncode)
    assert sorted(codes) == [-signal.SIGKILL, 0, 0]


@pytest.mark.parametrize(
    "spec",
    [
        "begin.before_fsync=error",
        "commit.before_apply=cut",
        "commit.recv=hold:1",
        "commit.recv=hold@/tmp/x",
        "commit.recv=kill:3@/tmp/x",
        "commit.recv=kill@tmp/x",
        "commit.recv=hang",
        "commit.recv=hang:nan",
    ],
)
def test_what_a_point_cannot_do_is_an_error(spec: str) -> None:
    with pytest.raises(ValueError, match="fault"):
        FaultPlan(POINTS, spec)
