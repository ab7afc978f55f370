"""What hicachectl loads, its choices against the shared model, completion scripts, a closed pipe."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.unit.cli.fake_sidecar import Peer, fake_sidecar

from hicache_proto import model
from hicache_sidecar.cli import arguments, completion
from hicache_sidecar.cli.commands import COMMANDS
from hicache_sidecar.cli.main import main

HEAVY = ("trio", "torch", "zmq", "hypercorn", "starlette", "numpy", "xxhash", "hicache_hooks")
LOADED = "import sys; from hicache_sidecar.cli.main import main; main({argv!r}); print(*sys.modules, file=sys.stderr)"


def test_choices_are_the_models() -> None:
    """arguments.py repeats these so that no struct module is loaded for them."""
    assert tuple(mode.value for mode in model.Mode) == arguments.MODES
    assert arguments.PREFETCH_POLICIES == model.PREFETCH_POLICIES
    assert arguments.WRITE_POLICIES == model.WRITE_POLICIES
    assert arguments.KNOBS == model.KNOBS


def test_status_loads_neither_heavy_packages_nor_the_api_structs(tmp_path: Path) -> None:
    def script(peer: Peer, request: object) -> None:
        peer.result(request, {"state": "detached"})  # type: ignore[arg-type]

    with fake_sidecar(tmp_path / "s", script) as server:
        ran = subprocess.run(
            [sys.executable, "-c", LOADED.format(argv=["--socket", server.path, "status"])],
            capture_output=True, text=True, timeout=30, check=True,
        )  # fmt: skip
    loaded = set(ran.stderr.split())
    assert "hicache_sidecar.client.connection" in loaded
    for name in (*HEAVY, "hicache_proto.api", "hicache_proto.model", "hicache_sidecar.cli.changes", "shutil"):
        assert name not in loaded, name


def test_bash_completion_completes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if shutil.which("bash") is None:
        pytest.skip("needs bash")
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "completion.bash"
    script.write_text(capsys.readouterr().out)

    def complete(*words: str) -> list[str]:
        quoted = " ".join(f"'{word}'" for word in words)
        code = (
            f"source {script}; COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _hicachectl; echo ${{COMPREPLY[@]}}"
        )
        ran = subprocess.run(["bash", "-c", code], capture_output=True, text=True, timeout=30, check=True)
        assert ran.stderr == ""
        return ran.stdout.split()

    assert complete("hicachectl", "")[: len(COMMANDS)] == list(COMMANDS)
    assert complete("hicachectl", "at") == ["attach"]
    assert complete("hicachectl", "-o", "j") == ["json"]
    assert complete("hicachectl", "-o", "json", "attach", "mo") == ["mooncake"]
    assert complete("hicachectl", "attach", "file", "--mode", "") == list(arguments.MODES)
    assert complete("hicachectl", "policy", "--prefetch-th") == ["--prefetch-threshold"]


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_completion_names_every_command_and_only_real_options(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for name in COMMANDS:
        assert name in script
        assert main([name, "--help"]) == 0
        helped = capsys.readouterr().out
        for option in completion._OPTIONS.get(name, "").split():
            assert option in helped, f"{name} has no {option}"


def test_a_reader_that_leaves_is_no_traceback(tmp_path: Path) -> None:
    def script(peer: Peer, request: object) -> None:
        peer.result(request, {"operations": [{"id": "x" * 100, "kind": "k", "phase": "p", "done": True,
                              "started_at": "t", "elapsed_ms": 1.0}] * 5000})  # type: ignore[arg-type]  # fmt: skip

    with fake_sidecar(tmp_path / "s", script) as server:
        read_end, write_end = os.pipe()
        os.close(read_end)
        ran = subprocess.run(
            [sys.executable, "-m", "hicache_sidecar.cli.main", "--socket", server.path, "operations"],
            stdout=write_end, stderr=subprocess.PIPE, text=True, timeout=30, check=False,
        )  # fmt: skip
        os.close(write_end)
    assert ran.returncode == 1
    assert "Traceback" not in ran.stderr


def test_an_interrupt_while_modules_are_loaded_is_no_traceback() -> None:
    """The impatient press Ctrl-C in the first tenth of a second."""
    script = (
        "import signal, sys\n"
        "class Impatient:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'msgspec': signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Impatient())\n"
        "from hicache_sidecar.cli.main import entry\n"
        "entry()\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "")
