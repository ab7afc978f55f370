"""Byte quota of a directory that several processes share: one counter in a file, and least-recently-used eviction.

Rules:

1. Space is reserved in the counter before it is written and given back if it was not used, so the directory never
   grows over ``max_size``. The counter is read and changed under ``flock``, once per batch (about 10 us).
2. A crash between the two leaves the counter too high, never too low; the next eviction's scan puts it right.
3. Recency is the files' modification time, which every read moves: shared by all processes and kept over restarts.
4. One evictor at a time, over all namespaces: pages of a configuration that nobody runs any more are the oldest, so
   they go first. It starts before the limit is reached, so that the other writers need not stand still meanwhile.
5. A file that cannot be removed is skipped and counted (F62).
"""

import fcntl
import logging
import os
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from hicache_hooks.backends.file_paths import FILE_MODE, StorePaths, stored_files

log = logging.getLogger(__name__)

LOCK_WAIT_S = 1.0  # a holder keeps it for microseconds; only one that was stopped inside keeps it longer
EVICT_WAIT_S = 2.0
EVICT_PAUSE_S = 5.0  # after an eviction that could free nothing: no scan per batch
_MAGIC = b"HiCuse1\n"
_RECORD = struct.Struct("<8sqI")


class LedgerBusy(OSError):
    """Another process holds the counter's lock: it was stopped at the wrong moment."""


class Ledger:
    """The shared byte counter."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = -1
        self._mine = threading.Lock()  # flock does not keep threads of one process apart

    def open(self) -> None:
        """Open or create the file.

        Raises:
            OSError: not possible.
        """
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)

    def close(self) -> None:
        """Idempotent."""
        with self._mine:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the counter.

        Raises:
            LedgerBusy: not within ``LOCK_WAIT_S``.
        """
        if not self._mine.acquire(timeout=LOCK_WAIT_S):
            raise LedgerBusy("the usage counter is held by another thread")
        try:
            if self._fd < 0:
                raise LedgerBusy("the usage counter is closed")
            self._flock()
            try:
                yield
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
        finally:
            self._mine.release()

    def _flock(self) -> None:
        deadline, pause = time.monotonic() + LOCK_WAIT_S, 0.0002
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise LedgerBusy("the usage counter is held by another process") from None
                time.sleep(pause)
                pause = min(pause * 2, 0.01)
            else:
                return

    def read(self) -> int | None:
        """The counter, to be called with the lock held; None when the file says nothing valid."""
        raw = os.pread(self._fd, _RECORD.size, 0)
        if len(raw) != _RECORD.size:
            return None
        magic, total, check = _RECORD.unpack(raw)
        return total if magic == _MAGIC and check == zlib.crc32(raw[:16]) and total >= 0 else None

    def write(self, total: int) -> None:
        """Set the counter, with the lock held."""
        head = _MAGIC + max(total, 0).to_bytes(8, "little", signed=True)
        os.pwrite(self._fd, head + zlib.crc32(head).to_bytes(4, "little"), 0)

    def add(self, delta: int) -> None:
        """Change the counter. What cannot be recorded is left to the next scan."""
        if delta:
            with suppress(OSError), self.locked():
                total = self.read()
                if total is not None:
                    self.write(total + delta)

    def total(self) -> int | None:
        """The counter, for status; None when it cannot be read."""
        with suppress(OSError), self.locked():
            return self.read()
        return None


class Quota:
    """Keeps a store below ``max_size`` bytes (None: counts only)."""

    def __init__(self, paths: StorePaths, max_size: int | None, eviction_ratio: float) -> None:
        self._paths = paths
        self.max_size = max_size
        self._low = None if max_size is None else int(max_size * (1 - eviction_ratio))
        # Start to evict a quarter of the way down: the rest of the way is room for the other writers (rule 4).
        self._soft = None if max_size is None else int(max_size * (1 - eviction_ratio / 4))
        self.ledger = Ledger(paths.usage)
        self._evicting = threading.Lock()
        self._next_evict = 0.0
        self.evicted = 0
        self.unremovable = 0

    def open(self) -> None:
        """Open the counter; count the files when there is no valid one.

        Raises:
            OSError: not possible.
        """
        self.ledger.open()
        with self.ledger.locked():
            if self.ledger.read() is None:
                self.ledger.write(sum(size for _, size, _ in self._scan()))

    def close(self) -> None:
        """Idempotent."""
        self.ledger.close()

    def reopen(self) -> None:
        """The directory was emptied or removed behind our back: start with a new counter.

        Raises:
            OSError: not possible.
        """
        self.ledger.close()
        self.open()

    def reserve(self, pages: int, page_bytes: int) -> int:
        """Reserve room for up to ``pages`` pages; returns how many. Evicts when the store is nearly full.

        Raises:
            OSError: the counter cannot be had.
        """
        granted, total = self._take(pages, page_bytes)
        if self._soft is not None and (granted < pages or total is None or total > self._soft):
            wait_s = EVICT_WAIT_S if granted == 0 else 0.0
            if self._evict(wait_s) and granted < pages:
                more, _ = self._take(pages - granted, page_bytes)
                granted += more
        return granted

    def _take(self, pages: int, page_bytes: int) -> tuple[int, int | None]:
        with self.ledger.locked():
            total = self.ledger.read()
            if total is None:
                return (pages if self.max_size is None else 0), None
            room = pages if self.max_size is None else min(pages, max(0, self.max_size - total) // page_bytes)
            if room:
                self.ledger.write(total + room * page_bytes)
            return room, total + room * page_bytes

    def _evict(self, wait_s: float) -> bool:
        """Remove the least recently used files down to the low mark. False when another thread or process does it."""
        if not (self._evicting.acquire(timeout=wait_s) if wait_s else self._evicting.acquire(blocking=False)):
            return False
        try:
            lock = os.open(self._paths.evict_lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._needed():
                    self._evict_locked()
            except BlockingIOError:
                return False
            finally:
                os.close(lock)
            return True
        finally:
            self._evicting.release()

    def _needed(self) -> bool:
        """False when the evictor that we waited for has done it, or when there is nothing that could be removed."""
        total = self.ledger.total()
        return time.monotonic() >= self._next_evict and (total is None or total > (self._soft or 0))

    def _evict_locked(self) -> None:
        low = self._low or 0
        found = self._scan()
        total = sum(size for _, size, _ in found)
        found.sort()
        gone = stuck = 0
        for _, size, path in found:
            if total <= low:
                break
            try:
                os.unlink(path)
            except FileNotFoundError:
                total -= size
            except OSError:
                stuck += 1
            else:
                total -= size
                gone += 1
        if total > low:
            self._next_evict = time.monotonic() + EVICT_PAUSE_S
        self.evicted += gone
        self.unremovable = stuck
        if stuck:
            log.warning("file store: %d pages could not be removed by eviction; going on with the others", stuck)
        with self.ledger.locked():
            self.ledger.write(total)

    def _scan(self) -> list[tuple[int, int, str]]:
        found = []
        for entry in stored_files(self._paths):
            with suppress(OSError):  # removed meanwhile
                info = entry.stat(follow_symlinks=False)
                found.append((info.st_mtime_ns, info.st_size, entry.path))
        return found
