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
        fd = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            continue
        except OSError:
            os.close(fd)
            raise
        os.makedirs(path, mode=0o700, exist_ok=True)
        return Slot(path, fd)
    raise OSError(f"all {MAX_SLOTS} directories are in use")
