"""Where the ``file`` backend keeps things, and the temporary area that a crash may leave behind.

::

    <file_storage_path>/
        pages/<namespace>/<xx>/<name>   one page per file, whole or absent: files arrive by rename
        bad/                            the last few pages that failed their check, for a look
        tmp/<token>/                    files being written by one open store; its .lock is held while it lives
        usage, evict.lock               shared byte counter (quota.py) and the lock of the one evictor

``pages``, ``bad`` and ``tmp`` are ours; nothing else below the path is ever read, counted or deleted (F68).
"""

import fcntl
import hashlib
import itertools
import os
import re
import secrets
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress

from hicache_hooks.describe import Said, describe_exception

DIR_MODE = 0o750
FILE_MODE = 0o640
_PLAIN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
_FRESH_S = 60.0  # a temporary area without a lock file this young is being made


def safe(name: str) -> str:
    """``name`` as one path component; names that are not plain become their hash."""
    if _PLAIN.fullmatch(name):
        return name
    return "~" + hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()


class StorePaths:
    """Paths of one namespace below one root. Pure."""

    def __init__(self, root: str, namespace: str) -> None:
        self.root = root
        self.all_pages = f"{root}/pages"
        self.pages = f"{root}/pages/{safe(namespace)}"
        self.bad = f"{root}/bad"
        self.tmp = f"{root}/tmp"
        self.usage = f"{root}/usage"
        self.evict_lock = f"{root}/evict.lock"
        self._prefix = f"{namespace}."

    def page(self, key: str) -> str:
        """The file of ``key``. 256 directories keep each small: page hashes spread evenly."""
        name = safe(key.removeprefix(self._prefix))
        return f"{self.pages}/{zlib.crc32(name.encode()) & 0xFF:02x}/{name}"

    def make(self) -> None:
        """Create the directories.

        Raises:
            OSError: the path cannot be made or is not a directory.
        """
        for path in (self.pages, self.bad, self.tmp):
            try:
                os.makedirs(path, DIR_MODE, exist_ok=True)
            except RecursionError:  # thousands of parts, none of which is there
                raise DirectoryUnusable("the storage directory cannot be made: its path is too deep") from None
            except OSError as exc:
                raise unusable(exc) from None


class DirectoryUnusable(Said, OSError):
    """A directory cannot be made or written."""


def unusable(exc: OSError) -> DirectoryUnusable:
    """``exc`` in words without its path, and with its errno."""
    found = DirectoryUnusable(f"the storage directory cannot be used: {describe_exception(exc)}")
    found.errno = exc.errno
    return found


def page_files(pages: str) -> Iterator[os.DirEntry[str]]:
    """Regular files in the shard directories of one namespace. Symbolic links are not followed."""
    for shard in _entries(pages):
        if shard.is_dir(follow_symlinks=False):
            for entry in _entries(shard.path):
                if entry.is_file(follow_symlinks=False):
                    yield entry


def stored_files(paths: StorePaths) -> Iterator[os.DirEntry[str]]:
    """Every file that counts against the quota: pages of all namespaces, and those set aside."""
    for namespace in _entries(paths.all_pages):
        if namespace.is_dir(follow_symlinks=False):
            yield from page_files(namespace.path)
    for entry in _entries(paths.bad):
        if entry.is_file(follow_symlinks=False):
            yield entry


def _entries(path: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as found:
            return list(found)
    except OSError:  # gone meanwhile, or not ours to read: the others still count
        return []


class TempArea:
    """The directory in which one open store writes before it renames."""

    def __init__(self, tmp: str) -> None:
        self._tmp = tmp
        self._lock = -1
        self._path = ""
        self._serial = itertools.count()

    def open(self) -> int:
        """Make an area of our own and remove those whose owner died.

        Returns:
            Bytes that the dead had reserved (quota.py, rule 3).

        Raises:
            OSError: the directory is not writable.
        """
        try:
            reserved = self._sweep()
            self._make()
        except OSError as exc:
            raise unusable(exc) from None
        return reserved

    def note(self, reserved: int) -> None:
        """Keep on disk how much this store has reserved."""
        if self._lock >= 0:
            os.pwrite(self._lock, reserved.to_bytes(8, "little", signed=True), 0)

    def _make(self) -> None:
        for _ in range(8):  # a sweeper of another process may take a new area for a dead one
            path = f"{self._tmp}/{os.getpid()}-{secrets.token_hex(6)}"
            os.mkdir(path, DIR_MODE)
            lock = os.open(f"{path}/.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as exc:
                os.close(lock)
                if not isinstance(exc, BlockingIOError):
                    raise
                continue
            self._path, self._lock = path, lock
            self.note(0)  # takes its block now: a full disk must not keep a reservation from being noted
            return
        raise OSError("no temporary area could be kept")

    def name(self) -> str:
        """A fresh file name. Called from several threads."""
        return f"{self._path}/{next(self._serial)}"

    def remake(self) -> bool:
        """Make a new area when somebody removed ours; False when it is there. One caller at a time.

        Raises:
            OSError: not possible.
        """
        if self._lock < 0 or os.path.exists(f"{self._path}/.lock"):
            return False
        os.close(self._lock)
        self._lock = -1
        self._make()
        return True

    def close(self) -> None:
        """Remove the area. Idempotent."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            _remove(self._path)
            os.close(lock)

    def _sweep(self) -> int:
        reserved = 0
        for entry in _entries(self._tmp):
            if entry.is_dir(follow_symlinks=False):
                with suppress(OSError):
                    reserved += self._sweep_one(entry.path)
        return reserved

    @staticmethod
    def _sweep_one(path: str) -> int:
        try:
            lock = os.open(f"{path}/.lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            if time.time() - os.stat(path).st_mtime > _FRESH_S:
                _remove(path)
            return 0
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            reserved = int.from_bytes(os.pread(lock, 8, 0), "little", signed=True)
            _remove(path)
            return max(0, reserved)
        finally:
            os.close(lock)


def _remove(path: str) -> None:
    """A temporary area holds files only. The lock file goes last: without it the area looks dead only by its age."""
    for entry in sorted(_entries(path), key=lambda e: e.name == ".lock"):
        with suppress(OSError):
            os.unlink(entry.path)
    with suppress(OSError):
        os.rmdir(path)
