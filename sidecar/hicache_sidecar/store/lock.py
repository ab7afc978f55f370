"""The state directory: made or checked, then locked, before anything in it is read (rule 15).

The lock is an flock on a file that is never removed, so it dies with the process and leaves no race; the pid in
it is for the message only.
"""

import contextlib
import fcntl
import os
import stat
from pathlib import Path

from hicache_sidecar.store.errors import StateDirLocked, StateDirUnsafe

LOCK_NAME = "lock"
_OURS = frozenset({LOCK_NAME, "journal", "journal.new"})


class StateDirLock:
    """Exclusive hold on one state directory until ``release``, or until the process is gone."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd: int | None = fd

    @classmethod
    def take(cls, path: Path) -> "StateDirLock":
        """Make the directory if need be (0700), check it, lock it. Never waits.

        Raises:
            StateDirUnsafe: no directory, another owner, or open to others and not plainly ours to close.
            StateDirLocked: another open lock exists, in this process too.
        """
        _prepare(path)
        try:
            fd = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as exc:
            raise StateDirUnsafe(path, f"cannot open {LOCK_NAME}: {exc.strerror}") from exc
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            holder = os.pread(fd, 32, 0).split(b"\n")[0].decode("ascii", "replace")
            os.close(fd)
            raise StateDirLocked(path, holder) from exc
        with contextlib.suppress(OSError):  # a full disk must not keep the daemon from starting
            os.fchmod(fd, 0o600)
            os.ftruncate(fd, 0)
            os.pwrite(fd, b"%d\n" % os.getpid(), 0)
        return cls(path, fd)

    def release(self) -> None:
        """Let go. Twice is fine."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _prepare(path: Path) -> None:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = path.stat()
    except OSError as exc:
        raise StateDirUnsafe(path, exc.strerror or str(exc)) from exc
    if not stat.S_ISDIR(info.st_mode):
        raise StateDirUnsafe(path, "is not a directory")
    if info.st_uid != os.geteuid():
        raise StateDirUnsafe(path, f"belongs to uid {info.st_uid}, this process is uid {os.geteuid()}")
    if info.st_mode & 0o077:
        # Closing a directory that holds other people's files (somebody named /tmp) would harm them: refuse that.
        names = {entry for entry in os.listdir(path) if not entry.startswith("journal.")}
        if names - _OURS:
            raise StateDirUnsafe(
                path, f"mode {stat.S_IMODE(info.st_mode):04o} lets others in, and it holds other files"
            )
        try:
            path.chmod(0o700)
        except OSError as exc:
            raise StateDirUnsafe(path, f"mode cannot be set to 0700: {exc.strerror}") from exc
