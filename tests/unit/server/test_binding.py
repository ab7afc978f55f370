"""Putting the control socket at its public path (F106)."""

import os
import socket
import stat
import threading
from pathlib import Path

import pytest

from hicache_sidecar.server.binding import BindRefused, RuntimeLock, bind_public, unlink_own


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_public_path_never_shows_another_mode(tmp_path: Path) -> None:
    """F106: a watcher sees the path absent or with its mode, during 200 starts; umask is never touched."""
    public, seen, stop = tmp_path / "control.sock", set(), threading.Event()

    def watch() -> None:
        while not stop.is_set():
            try:
                seen.add(stat.S_IMODE(os.stat(public).st_mode))
            except FileNotFoundError:
                continue

    before = os.umask(0o002)
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for index in range(200):
            sock = bind_public(public, mode=0o660)
            if index % 3:
                unlink_own(public, sock)
            else:
                sock.close()  # as a killed daemon leaves it: stale, replaced by the next
    finally:
        stop.set()
        watcher.join()
        assert os.umask(before) == 0o002
    assert seen == {0o660}


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o277])
def test_mode_does_not_depend_on_umask(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        bind_public(tmp_path / "s", mode=0o640).close()
    finally:
        os.umask(before)
    assert mode_of(tmp_path / "s") == 0o640
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["s"]


def test_clients_connect_and_the_stale_file_is_replaced(tmp_path: Path) -> None:
    public = tmp_path / "control.sock"
    bind_public(public, mode=0o600).close()
    with socket.socket(socket.AF_UNIX) as client, pytest.raises(ConnectionRefusedError):
        client.connect(str(public))
    sock = bind_public(public, mode=0o600)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(public))
    unlink_own(public, sock)
    assert not public.exists()


def test_remains_of_a_killed_start_are_cleared(tmp_path: Path) -> None:
    private = tmp_path / ".control.sock.d"
    private.mkdir(0o700)
    (private / "s").touch()
    bind_public(tmp_path / "control.sock", mode=0o600).close()
    assert not private.exists()


def test_other_files_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "control.sock").write_text("mine")
    with pytest.raises(BindRefused, match="is not a socket"):
        bind_public(tmp_path / "control.sock", mode=0o600)
    assert (tmp_path / "control.sock").read_text() == "mine"


def test_long_path_is_refused_with_the_limit(tmp_path: Path) -> None:
    with pytest.raises(BindRefused, match="107"):
        bind_public(tmp_path / ("x" * 100), mode=0o600)


def test_lock_is_exclusive_and_names_the_holder(tmp_path: Path) -> None:
    public = tmp_path / "control.sock"
    lock = RuntimeLock.take(public)
    with pytest.raises(BindRefused, match=f"process {os.getpid()}"):
        RuntimeLock.take(public)
    lock.release()
    lock.release()
    RuntimeLock.take(public).release()


@pytest.mark.needs_root
def test_group_is_set_and_keeps_the_mode(tmp_path: Path) -> None:
    bind_public(tmp_path / "s", mode=0o660, gid=4242).close()
    info = (tmp_path / "s").stat()
    assert (info.st_gid, stat.S_IMODE(info.st_mode)) == (4242, 0o660)
