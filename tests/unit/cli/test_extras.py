"""A program whose extra is not installed says so in one line; ``--help`` works without it."""

import subprocess
import sys

import pytest

from hicache_proto import extras

PROGRAMS = [
    ("hicache_sidecar.daemon.main", extras.SIDECAR, "hicache-sidecar[sidecar]"),
    ("hicache_hooks.embedded.main", extras.ENGINE, "hicache-sidecar[engine]"),
    ("hicache_sidecar.cli.main", extras.SIDECAR + extras.ENGINE, "hicache-sidecar[sidecar,engine]"),
]


def run(module: str, hidden: tuple[str, ...], *argv: str) -> subprocess.CompletedProcess[str]:
    """The program in a process in which ``hidden`` cannot be imported."""
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({hidden!r})); sys.argv[1:] = {list(argv)!r}; "
        f"from {module} import entry; entry()"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)


@pytest.mark.parametrize(("module", "hidden", "names"), PROGRAMS)
def test_a_missing_extra_is_one_line(module: str, hidden: tuple[str, ...], names: str) -> None:
    done = run(module, hidden, *(["demo"] if "cli" in module else []))
    assert done.returncode == 1
    assert f"pip install '{names}'" in done.stderr
    assert hidden[0] in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("module", "hidden", "names"), PROGRAMS)
def test_help_needs_no_extra(module: str, hidden: tuple[str, ...], names: str) -> None:
    done = run(module, hidden, "--help")
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout


def test_the_lists_name_what_is_installed_here() -> None:
    assert extras.missing(extras.SIDECAR + extras.ENGINE) == []
    assert extras.missing(["msgspec", "no_such_module"]) == ["no_such_module"]
