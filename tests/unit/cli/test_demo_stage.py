"""The demo's stage without the real programs: failures are told, nothing is left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hicache_sidecar.cli import demo, demo_stage
from hicache_sidecar.cli.demo_stage import Background, Stage, StageError, clean_environment
from hicache_sidecar.cli.main import main


def test_settings_of_the_callers_environment_do_not_reach_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HICACHE_SIDECAR_HTTP", "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", "LISTEN_FDS", "NOTIFY_SOCKET"):
        monkeypatch.setenv(name, "strange")
    monkeypatch.setenv("HOME_OF_MINE", "kept")
    cleaned = clean_environment()
    assert "strange" not in cleaned.values()
    assert cleaned["HOME_OF_MINE"] == "kept"


def test_a_long_temporary_folder_still_gives_a_path_that_sockets_fit_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with Stage() as stage:
        assert len(stage.socket) < 107
        assert stage.path.is_dir()
    assert not stage.path.exists()
    assert list(long.iterdir()) == []


def test_a_program_that_fails_is_told_with_its_log_and_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    popen = subprocess.Popen

    def failing(argv: list[str], **options: Any) -> Any:
        code = "import sys; print('the reason is here'); sys.exit(3)"
        return popen([sys.executable, "-c", code, *argv], **options)

    monkeypatch.setattr(subprocess, "Popen", failing)
    stage = Stage()
    with stage, pytest.raises(StageError, match=r"(?s)ended with 3.*the reason is here"):
        stage.start_sidecar()
    assert not stage.path.exists()


def gone(pid: int) -> bool:
    """Ended; a zombie has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("Z", "X")
    except OSError:
        return True


def test_a_deaf_program_and_its_child_are_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(demo_stage, "STOP_TIMEOUT_S", 0.3)
    pids = tmp_path / "pids"
    code = (
        "import os, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(pids)!r} + '.new', 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        f"os.rename({str(pids)!r} + '.new', {str(pids)!r})\n"
        "time.sleep(600)\n"
    )
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda argv, **options: popen([sys.executable, "-c", code], **options))
    with Stage() as stage:
        stage._start("hicache-sidecar", "anything", [])
        stage._wait("hicache-sidecar", pids.exists)
        parent, child = map(int, pids.read_text().split())
    deadline = time.monotonic() + 10
    while not (gone(parent) and gone(child)):  # a killed process is listed until the kernel is done with it
        assert time.monotonic() < deadline
        time.sleep(0.01)  # pace of a poll


def test_a_background_request_that_fails_is_told() -> None:
    def fail() -> dict[str, Any]:
        raise StageError("no engine")

    with pytest.raises(StageError, match="no engine"):
        Background(fail).wait(5)


class BrokenStory:
    """Breaks its first promise."""

    def __init__(self, _stage: Stage, show: demo.Show) -> None:
        self.show = show

    def tell(self) -> None:
        self.show.step("something")
        self.show.expect(False, "the sun rises in the west")


def test_a_broken_promise_ends_with_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(demo, "Story", BrokenStory)
    before = signal.getsignal(signal.SIGTERM)
    assert main(["demo"]) == 1
    assert "FAILED: the sun rises in the west" in capsys.readouterr().err
    assert main(["-o", "json", "demo"]) == 1
    assert '"success": false' in capsys.readouterr().out
    assert signal.getsignal(signal.SIGTERM) is before


def test_missing_extras_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("hicache_proto.extras.find_spec", lambda name: None if name == "torch" else object())
    assert main(["demo"]) == 1
    assert "needs torch: pip install 'hicache-sidecar[sidecar,engine]'" in capsys.readouterr().err


def test_the_demo_directory_is_kept_on_request(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(demo, "Story", BrokenStory)
    main(["demo", "--keep"])
    kept = capsys.readouterr().out.split("Kept: ")[1].strip()
    assert os.path.isdir(kept)
    if not kept.startswith(str(tmp_path)):
        os.rmdir(kept)
