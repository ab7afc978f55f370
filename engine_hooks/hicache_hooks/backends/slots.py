"""Directories that one process at a time may use: ``root/slot-0``, ``slot-1``, ..., the first that is free.

For stores whose files belong to one writer (RocksDB, Mooncake's SSD spill). The replicas of an engine have the same
namespace and are told the same path; a restarted one finds a directory that was left, with its pages.
"""

import fcntl
import os

MAX_SLOTS = 256  # far more than ranks of one host


class Slot:
    """A claimed directory. The kernel frees it when the process ends."""

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self._fd = fd

    def release(self) -> None:
        """Let others have it. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def claim(root: str) -> Slot:
    """Create ``root`` and take its first free slot.

    Raises:
        OSError: the directory cannot be used, or every slot is taken.
    """
    os.makedirs(root, mode=0o700, exist_ok=True)
    for i in range(MAX_SLOTS):
        path = os.path.join(root, f"slot-{i}")
        fd = open_locked(f"{path}.lock")
        if fd is None:
            continue
        try:
            os.makedirs(path, mode=0o700, exist_ok=True)
        except OSError:
            os.close(fd)
            raise
        return Slot(path, fd)
    raise OSError(f"all {MAX_SLOTS} directories are in use")


def open_locked(path: str) -> int | None:
    """Open or create the file ``path`` for this process alone; None: another one has it. Closing lets it go.

    Raises:
        OSError: it cannot be opened or locked.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        os.close(fd)
        if isinstance(exc, BlockingIOError):
            return None
        raise
    return fd
