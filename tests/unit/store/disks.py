"""Filesystems for the journal's tests: one that fails or stops at a chosen call, one that loses power."""

import errno
import os
from pathlib import Path

from hicache_proto.model import TargetState
from hicache_sidecar.store.disk import Disk
from hicache_sidecar.store.journal import Journal

DETACHED = TargetState()
FILE = TargetState(backend="file", extra_config='{"file_storage_path": "/a", "password": "s3cret-sentinel"}')
NIXL = TargetState(backend="nixl", prefetch_policy="timeout", knobs={"prefetch_threshold": 64})


class Stopped(BaseException):
    """The process is gone: nothing after this line runs. No ``except Exception`` may catch it."""


class StoppingDisk(Disk):
    """Ends the process (``Stopped``) or fails (``OSError``) at call ``at`` (from 0), before it takes effect.

    ``partly`` lets half of a write reach the file first. ``only`` counts calls of that name alone.
    """

    def __init__(self, at: int | None, *, error: int | None = None, only: str = "", partly: bool = False) -> None:
        self.at, self.error, self.only, self.partly = at, error, only, partly
        self.calls: list[str] = []

    def _hit(self, name: str) -> bool:
        if self.only and name != self.only:
            return False
        self.calls.append(name)
        return len(self.calls) - 1 == self.at

    def _end(self) -> None:
        if self.error is None:
            raise Stopped
        raise OSError(self.error, os.strerror(self.error))

    def create(self, path: Path) -> int:
        if self._hit("create"):
            self._end()
        return super().create(path)

    def reserve(self, fd: int, offset: int, size: int) -> None:
        if self._hit("reserve"):
            self._end()
        super().reserve(fd, offset, size)

    def write(self, fd: int, data: bytes, offset: int) -> None:
        if self._hit("write"):
            if self.partly:
                super().write(fd, data[: len(data) // 2], offset)
            self._end()
        super().write(fd, data, offset)

    def sync(self, fd: int) -> None:
        if self._hit("sync"):
            self._end()
        super().sync(fd)

    def truncate(self, fd: int, size: int) -> None:
        if self._hit("truncate"):
            self._end()
        super().truncate(fd, size)

    def rename(self, old: Path, new: Path) -> None:
        if self._hit("rename"):
            self._end()
        super().rename(old, new)

    def sync_dir(self, path: Path) -> None:
        if self._hit("sync_dir"):
            self._end()
        super().sync_dir(path)


class PowerDisk(Disk):
    """Remembers what is really durable: content by ``sync``, names by ``sync_dir``. ``power_cut`` leaves only that."""

    def __init__(self, fail_sync: bool = False) -> None:
        self.fail_sync = fail_sync
        self._content: dict[int, bytes] = {}  # by inode
        self._names: dict[str, int] = {}

    def adopt(self, root: Path) -> "PowerDisk":
        """All that is there now is durable."""
        for path in root.iterdir():
            self._content[path.stat().st_ino] = path.read_bytes()
            self._names[path.name] = path.stat().st_ino
        return self

    def sync(self, fd: int) -> None:
        if self.fail_sync:
            # As Linux does: the error is told once, the pages count as clean, and never reach the disk.
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().sync(fd)
        self._content[os.fstat(fd).st_ino] = self.read(fd)

    def sync_dir(self, path: Path) -> None:
        super().sync_dir(path)
        self._names = {entry.name: entry.stat().st_ino for entry in path.iterdir()}

    def power_cut(self, root: Path, into: Path) -> Path:
        """A directory with what survived."""
        into.mkdir(mode=0o700)
        for name, inode in self._names.items():
            (into / name).write_bytes(self._content.get(inode, b""))
        return into


def begin(journal: Journal, n: int, b: TargetState = FILE, **more: str) -> None:
    """A BEGIN with the usual fields."""
    a = journal.desired[0] if journal.desired else DETACHED
    journal.begin(n=n, operation_id=f"op-{n}", kind="attach", a=a, b=b, participants=(0, 1), **more)


def commit(journal: Journal, n: int, b: TargetState = FILE, **more: str) -> None:
    """A whole operation that ended on B."""
    begin(journal, n, b, **more)
    journal.outcome_b(n, {"success": True, "n": n})
