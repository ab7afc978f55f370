"""The few calls on the filesystem that the journal makes, in one class, so that a test can fail or stop at each.

Every call names what it does to durability; nothing here knows about records.
"""

import contextlib
import os
from pathlib import Path


class Disk:
    """The real filesystem. File descriptors are the caller's to close through ``close``."""

    def create(self, path: Path) -> int:
        """A new file of mode 0600, whatever the umask; one that is there already is emptied (a left-over)."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        os.fchmod(fd, 0o600)
        return fd

    def open(self, path: Path) -> int:
        """An existing file, for reading and writing; no symbolic link."""
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)

    def close(self, fd: int) -> None:
        os.close(fd)

    def read(self, fd: int) -> bytes:
        """The whole file."""
        size = os.fstat(fd).st_size
        data = bytearray()
        while len(data) < size:
            chunk = os.pread(fd, size - len(data), len(data))
            if not chunk:
                break
            data += chunk
        return bytes(data)

    def linked(self, fd: int) -> bool:
        """Whether the file still has a name."""
        return os.fstat(fd).st_nlink > 0

    def size(self, fd: int) -> int:
        """Bytes, reserved ones included."""
        return os.fstat(fd).st_size

    def reserve(self, fd: int, offset: int, size: int) -> None:
        """Give the file ``size`` bytes of space from ``offset`` on, as zeros. ENOSPC comes here, and only here."""
        os.posix_fallocate(fd, offset, size)

    def write(self, fd: int, data: bytes, offset: int) -> None:
        """All of ``data`` at ``offset``."""
        view = memoryview(data)
        while view:
            done = os.pwrite(fd, view, offset)
            view, offset = view[done:], offset + done

    def sync(self, fd: int) -> None:
        """Make the file's content durable, and its size where that changed."""
        os.fdatasync(fd)

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def rename(self, old: Path, new: Path) -> None:
        """Replace ``new`` in one step. Durable after ``sync_dir``."""
        os.rename(old, new)

    def sync_dir(self, path: Path) -> None:
        """Make names in the directory durable."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def remove(self, path: Path) -> None:
        """Remove a left-over; one that is not there is fine."""
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
