"""Sockets handed over by systemd (F107). Each case runs in a child, whose descriptors start at 3."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

CHILD = """
import os, sys
if os.environ.get("LISTEN_PID") == "self":
    os.environ["LISTEN_PID"] = str(os.getpid())
from hicache_sidecar.daemon.activation import ActivationError, take
try:
    found = take(os.environ)
except ActivationError as exc:
    print("refused:", exc)
else:
    print(len(found.control), len(found.http), [v for v in os.environ if v.startswith("LISTEN_")],
          [s.get_inheritable() or s.getblocking() for s in found.control + found.http])
"""


def run(sockets: list[socket.socket], names: str = "", pid: str = "self", count: str | None = None) -> str:
    """What a child says that inherits ``sockets`` as descriptors 3, 4, ..."""
    fds = [os.dup(sock.fileno()) for sock in sockets]
    high = [os.dup2(fd, 200 + index) for index, fd in enumerate(fds)]

    def place() -> None:
        for index, fd in enumerate(high):
            os.dup2(fd, 3 + index)

    environ = {**os.environ, "LISTEN_PID": pid, "LISTEN_FDS": count or str(len(sockets)), "LISTEN_FDNAMES": names}
    try:
        done = subprocess.run(
            [sys.executable, "-c", CHILD], env=environ, preexec_fn=place, close_fds=False, text=True,
            capture_output=True, check=True, timeout=30,
        )  # fmt: skip
    finally:
        for fd in (*fds, *high):
            os.close(fd)
    return done.stdout.strip()


@pytest.fixture
def unix(tmp_path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(str(tmp_path / "control.sock"))
    sock.listen()
    yield sock
    sock.close()


@pytest.fixture
def tcp() -> socket.socket:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock


def test_named_sockets_are_taken_and_variables_unset(unix: socket.socket, tcp: socket.socket) -> None:
    assert run([tcp, unix], "http:control") == "1 1 [] [False, False]"


def test_unnamed_sockets_are_told_by_family(unix: socket.socket, tcp: socket.socket) -> None:
    assert run([unix, tcp]) == "1 1 [] [False, False]"
    assert run([unix], "hicache-sidecar.socket") == "1 0 [] [False]"


def test_other_pid_is_ignored(unix: socket.socket) -> None:
    assert run([unix], pid="1") == "0 0 [] []"


def test_wrong_descriptors_are_refused_by_number(tmp_path: Path, unix: socket.socket, tcp: socket.socket) -> None:
    assert "descriptor 3 (control)" in run([tcp], "control")
    assert "must be TCP" in run([unix], "http")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagram:
        assert "not a stream socket" in run([datagram], "control")
    with socket.socket(socket.AF_UNIX) as silent:
        assert "does not listen" in run([silent], "control")
    with open(tmp_path / "file", "w") as plain:
        assert "is not a socket" in run([plain], "control")  # type: ignore[list-item]
    assert "is no number" in run([unix], count="many")
    assert "descriptor 4" in run([unix], count="2")
