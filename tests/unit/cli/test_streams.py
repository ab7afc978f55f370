"""hicachectl as a process of its own, on the standard streams that scripts and terminals hand it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.unit.cli.fake_sidecar import DONE, Peer, fake_sidecar

from hicache_proto import control, errors

REASON = "why \N{EN DASH} 漢字"


def run(tmp_path: Path, redirect: str, *arguments: str, encoding: str = "utf-8") -> subprocess.CompletedProcess[bytes]:
    """Run a command line whose standard streams the shell redirects as ``redirect`` says."""

    def script(peer: Peer, request: control.Request) -> None:
        if getattr(request.body, "hicache_storage_backend", "") == "nosuch":
            peer.error(request, errors.UnknownBackend("no backend 'nosuch'"))
        else:
            peer.result(request, {**DONE, "message": REASON})

    with fake_sidecar(tmp_path / "s", script) as server:
        command = [sys.executable, "-m", "hicache_sidecar.cli.main", "--socket", server.path, *arguments]
        return subprocess.run(
            ["bash", "-c", f'exec "$@" {redirect}', "bash", *command],
            capture_output=True,
            timeout=30,
            check=False,
            env={"PYTHONIOENCODING": encoding, "PYTHONPATH": ":".join(filter(None, sys.path))},
        )


@pytest.mark.parametrize(
    ("redirect", "arguments", "code"),
    [
        (">&-", ["detach"], 0),  # what was asked for is done: that nobody wants to read it is no failure
        ("2>&-", ["attach", "nosuch"], 1),
        (">&- 2>&- <&-", ["detach"], 0),
        ("<&-", ["attach", "file", "--config", "@-"], 0),
        (">/dev/full", ["detach"], 1),
        ("2>/dev/full", ["attach", "nosuch"], 1),
        ("> >(exit 0)", ["detach"], 0),  # a reader that leaves at once; 1 if it left before the answer was written
    ],
)
def test_no_stream_ends_in_a_traceback(tmp_path: Path, redirect: str, arguments: list[str], code: int) -> None:
    ran = run(tmp_path, redirect, *arguments)
    assert b"Traceback" not in ran.stderr, ran.stderr.decode()
    assert b"Exception ignored" not in ran.stderr, ran.stderr.decode()
    assert ran.returncode == code or ">(" in redirect
    if redirect == ">/dev/full":
        assert ran.stderr == b"hicachectl: cannot print the answer: No space left on device\n"


@pytest.mark.parametrize(("encoding", "shown"), [("ascii", b"why \\u2013 \\u6f22\\u5b57"), ("utf-8", REASON.encode())])
def test_a_small_alphabet_spells_what_it_lacks(tmp_path: Path, encoding: str, shown: bytes) -> None:
    ran = run(tmp_path, "", "detach", encoding=encoding)
    assert (ran.returncode, ran.stderr) == (0, b"")
    assert ran.stdout.startswith(shown)


@pytest.mark.parametrize(("terminal", "columns"), [("xterm", 40), ("dumb", 40)])
def test_progress_is_one_line_that_fits_and_nothing_where_it_could_not_be_rewritten(
    tmp_path: Path, terminal: str, columns: int
) -> None:
    """What wraps stays on the screen; a dumb terminal shows the escape sequences themselves."""

    def script(peer: Peer, request: control.Request) -> None:
        peer.progress(request, operation_id="op-1", phase="freeze", message="x" * 100)
        peer.result(request, DONE)

    master, slave = os.openpty()
    with fake_sidecar(tmp_path / "s", script) as server:
        command = [sys.executable, "-m", "hicache_sidecar.cli.main", "--socket", server.path, "detach"]
        env = {"TERM": terminal, "COLUMNS": str(columns), "PYTHONPATH": ":".join(filter(None, sys.path))}
        ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=slave, timeout=30, check=False, env=env)
    os.set_blocking(master, False)
    try:
        shown = os.read(master, 4096).decode()
    except BlockingIOError:
        shown = ""
    os.close(slave)
    os.close(master)
    assert ran.returncode == 0
    line = "op-1 · freeze · " + "x" * 100
    assert shown == ("" if terminal == "dumb" else f"\r\x1b[K{line[: columns - 1]}\r\x1b[K")
