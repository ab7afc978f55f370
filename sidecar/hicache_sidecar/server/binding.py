"""Putting a Unix socket at its public path: never with a wrong mode, never over a live one, without touching umask.

Theory of operation (failures.md F106; tried, 200 starts under a watcher):

1. ``RuntimeLock`` holds an flock on ``<path>.lock``. The kernel drops it when the process dies, so a lock that is held
   means a live daemon, and a socket file without a held lock is stale. The lock file is never removed: removing it
   would let two processes hold locks on two files of one name.
2. The socket is bound inside a private 0700 directory beside the public path, gets its mode and group there, listens,
   and is then renamed over the public path. rename(2) replaces a stale file in one step: who looks at the public path
   sees the old socket or the finished new one.
3. rename alone would steal a live path; hence rule 1 first.
"""

import contextlib
import errno
import fcntl
import os
import socket
import stat
from pathlib import Path

BACKLOG = 128  # connections waiting for accept; more than the daemon lets in at once
MAX_PATH_BYTES = 107  # sun_path of Linux, less the closing zero


class BindRefused(Exception):
    """The socket cannot be put there; the text says why and what to do."""


class RuntimeLock:
    """Exclusive hold on one public socket path until ``release``, or until the process is gone."""

    def __init__(self, fd: int) -> None:
        self._fd: int | None = fd

    @classmethod
    def take(cls, public: Path) -> "RuntimeLock":
        """Lock ``<public>.lock``. Never waits.

        Raises:
            BindRefused: another daemon holds it, or the directory cannot be written.
        """
        path = public.with_name(public.name + ".lock")
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as exc:
            raise BindRefused(f"cannot open {path}: {exc.strerror}") from exc
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            holder = os.pread(fd, 16, 0).decode("ascii", "replace").strip()
            os.close(fd)
            by = f" (process {holder})" if holder else ""
            raise BindRefused(
                f"another hicache-sidecar{by} already serves {public.parent}: "
                "stop it, or give this one its own --runtime-dir and --state-dir"
            ) from exc
        with contextlib.suppress(OSError):  # the number is for the message above; a full disk must not stop us
            os.ftruncate(fd, 0)
            os.pwrite(fd, b"%d\n" % os.getpid(), 0)
        return cls(fd)

    def release(self) -> None:
        """Let go. Twice is fine."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def bind_public(public: Path, *, mode: int, gid: int | None = None) -> socket.socket:
    """A listening Unix stream socket at ``public``. The caller holds its ``RuntimeLock``.

    Args:
        mode: permission bits of the socket file.
        gid: its group; None leaves the process's.

    Raises:
        BindRefused: the path is too long, is something else than a socket, or the kernel refused.
    """
    if len(os.fsencode(public)) > MAX_PATH_BYTES - 16:  # room for the private directory's name
        raise BindRefused(
            f"{public}: a Unix socket path has at most {MAX_PATH_BYTES} bytes; choose a shorter directory"
        )
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(public.lstat().st_mode):
            raise BindRefused(f"{public} exists and is not a socket: move it away")
    private = public.with_name(f".{public.name}.d")
    hidden = private / "s"
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        _fresh_directory(private)
        sock.bind(os.fspath(hidden))
        os.chmod(hidden, mode)
        if gid is not None:
            os.chown(hidden, -1, gid)
            os.chmod(hidden, mode)  # chown may drop bits
        sock.listen(BACKLOG)
        os.rename(hidden, public)
    except OSError as exc:
        sock.close()
        raise BindRefused(f"cannot put a socket at {public}: {exc.strerror}") from exc
    finally:
        with contextlib.suppress(OSError):
            private.rmdir()
    return sock


def unlink_own(public: Path, sock: socket.socket) -> None:
    """Remove the file at ``public`` if nobody else put theirs there. Never used on an inherited socket (F107)."""
    # The lock is still held here, so only a hand could have replaced it; a missing file is fine too.
    with contextlib.suppress(OSError):
        if stat.S_ISSOCK(public.lstat().st_mode):
            public.unlink()
    sock.close()


def _fresh_directory(path: Path) -> None:
    try:
        os.mkdir(path, 0o700)  # umask can only take bits away from 0700
    except FileExistsError:
        # Left by a killed start; ours, since we hold the lock. A foreign one is refused.
        info = path.lstat()
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
            raise OSError(errno.EPERM, f"{path} is not ours") from None
        for left in path.iterdir():
            left.unlink()
    path.chmod(0o700)  # a umask like 0277 may have taken our own bits
