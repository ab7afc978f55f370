"""Byte quota of a directory that several processes share: one counter file, and least-recently-used eviction.

Rules:

1. Space is *reserved* in the counter before it is written and becomes *stored* after, so the directory never grows
   over ``max_size``. The counter is read and changed under ``flock``, twice per batch (about 10 us each).
2. A scan replaces *stored* by what it found plus what was *added* while it ran: it may count a page twice, never leave
   one out. So the counter errs upwards only (crashes too), and the next eviction's scan puts it right.
3. Each open store also notes its reservation in its own temporary area; who removes the area of a dead one gives that
   back.
4. Recency is the files' modification time, which every read moves: shared by all processes and kept over restarts.
5. One evictor at a time, over all namespaces: pages of a configuration that nobody runs any more are the oldest, so
   they go first. It starts before the limit is reached, so that the other writers need not stand still meanwhile.
6. A file that cannot be removed is skipped and counted (F62).
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
from typing import NamedTuple

from hicache_hooks.backends.file_paths import FILE_MODE, StorePaths, TempArea, stored_files

log = logging.getLogger(__name__)

LOCK_WAIT_S = 1.0  # a holder keeps it for microseconds; only one that was stopped inside keeps it longer
EVICT_WAIT_S = 2.0
EVICT_PAUSE_S = 5.0  # after an eviction that could free nothing: no scan per batch
_MAGIC = b"HiCuse1\n"
_RECORD = struct.Struct("<8sqqqI")


class Usage(NamedTuple):
    """The counter: bytes in files, bytes reserved by writers, and bytes ever added (rule 2)."""

    stored: int = 0
    reserved: int = 0
    added: int = 0

    @property
    def total(self) -> int:
        """What counts against the quota."""
        return self.stored + self.reserved


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

    def read(self) -> Usage | None:
        """The counter, to be called with the lock held; None when the file says nothing valid."""
        raw = os.pread(self._fd, _RECORD.size, 0)
        if len(raw) != _RECORD.size:
            return None
        magic, stored, reserved, added, check = _RECORD.unpack(raw)
        valid = magic == _MAGIC and check == zlib.crc32(raw[:-4]) and stored >= 0 and reserved >= 0
        return Usage(stored, reserved, added) if valid else None

    def write(self, usage: Usage) -> None:
        """Set the counter, with the lock held."""
        head = _RECORD.pack(_MAGIC, max(usage.stored, 0), max(usage.reserved, 0), usage.added, 0)[:-4]
        os.pwrite(self._fd, head + zlib.crc32(head).to_bytes(4, "little"), 0)

    def usage(self) -> Usage | None:
        """The counter, for status; None when it cannot be read."""
        with suppress(OSError), self.locked():
            return self.read()
        return None


class Quota:
    """Keeps a store below ``max_size`` bytes (None: counts only)."""

    def __init__(self, paths: StorePaths, area: TempArea, max_size: int | None, eviction_ratio: float) -> None:
        self._paths = paths
        self._area = area
        self._reserved = 0  # by this store; changed with the counter's lock held, like the next
        self._owed = 0  # reservations that could not be given back because the counter was held
        self.max_size = max_size
        self._low = None if max_size is None else int(max_size * (1 - eviction_ratio))
        # Start to evict a quarter of the way down: the rest of the way is room for the other writers (rule 5).
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
        self.recount()

    def close(self) -> None:
        """Idempotent."""
        self._change(reserved=-self._reserved)
        self._reserved = self._owed = 0
        self.ledger.close()

    def recount(self) -> None:
        """Count the files when the counter says nothing valid.

        Raises:
            OSError: the counter cannot be had.
        """
        with self.ledger.locked():
            if self.ledger.read() is None:
                self.ledger.write(Usage(sum(size for _, size, _ in self._scan()), self._reserved))

    def reopen(self) -> None:
        """The directory was emptied or removed behind our back: start with a new counter.

        Raises:
            OSError: not possible.
        """
        self.ledger.close()
        self.open()

    def reserve(self, pages: int, page_bytes: int) -> int:
        """Reserve room for up to ``pages`` pages; returns how many. Evicts when the store is nearly full.

        ``settle`` must follow.

        Raises:
            OSError: the counter cannot be had.
        """
        granted, total = self._take(pages, page_bytes)
        if total is None and self.max_size is None:
            self.recount()
            granted, total = self._take(pages, page_bytes)
        if self._soft is not None and (granted < pages or total is None or total > self._soft):
            wait_s = EVICT_WAIT_S if granted == 0 else 0.0
            if self._evict(wait_s, (pages - granted) * page_bytes) and granted < pages:
                more, _ = self._take(pages - granted, page_bytes)
                granted += more
        return granted

    def _take(self, pages: int, page_bytes: int) -> tuple[int, int | None]:
        with self.ledger.locked():
            usage = self.ledger.read()
            if usage is None:
                return 0, None
            owed, self._owed = self._owed, 0
            total = usage.total - owed
            room = pages if self.max_size is None else min(pages, max(0, self.max_size - total) // page_bytes)
            if room or owed:
                self._reserve(usage, room * page_bytes - owed)
            return room, total + room * page_bytes

    def _reserve(self, usage: Usage, delta: int) -> None:
        self._reserved += delta
        self._area.note(self._reserved)
        self.ledger.write(usage._replace(reserved=usage.reserved + delta))

    def settle(self, reserved: int, written: int) -> None:
        """``written`` of ``reserved`` bytes are files now, the rest is given back."""
        try:
            with self.ledger.locked():
                usage = self.ledger.read()
                if usage is not None:
                    usage = usage._replace(stored=usage.stored + written, added=usage.added + written)
                    self._reserve(usage, -reserved)
        except OSError:
            # Counted twice at worst (rule 2): what was written stays reserved until a scan has found it.
            self._owed += reserved - written

    def removed(self, nbytes: int) -> None:
        """Files of so many bytes are gone."""
        self._change(stored=-nbytes)

    def forget(self, reserved: int) -> None:
        """Reservations of a store that died (rule 3)."""
        self._change(reserved=-reserved)

    def _change(self, stored: int = 0, reserved: int = 0) -> None:
        if stored or reserved:
            with suppress(OSError), self.ledger.locked():  # what cannot be recorded is left to the next scan
                usage = self.ledger.read()
                if usage is not None:
                    self.ledger.write(usage._replace(stored=usage.stored + stored, reserved=usage.reserved + reserved))

    def _evict(self, wait_s: float, missing: int) -> bool:
        """Remove the least recently used files down to the low mark, or so that ``missing`` bytes fit too.

        False when another thread or process is at it.
        """
        if not (self._evicting.acquire(timeout=wait_s) if wait_s else self._evicting.acquire(blocking=False)):
            return False
        try:
            lock = os.open(self._paths.evict_lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._needed():
                    self._evict_locked(missing)
            except BlockingIOError:
                return False
            finally:
                os.close(lock)
            return True
        finally:
            self._evicting.release()

    def _needed(self) -> bool:
        """False when the evictor that we waited for has done it, or when there is nothing that could be removed."""
        usage = self.ledger.usage()
        return time.monotonic() >= self._next_evict and (usage is None or usage.total > (self._soft or 0))

    def _evict_locked(self, missing: int) -> None:
        most = self.max_size or 0
        before = self.ledger.usage()
        reserved = before.reserved if before else 0
        # One greedy batch must not empty the store: it may ask for half of it.
        low = max(0, min(self._low or 0, most - min(missing, most // 2)) - reserved)
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
            now = self.ledger.read()
            if now is None or before is None:
                self.ledger.write(Usage(total, self._reserved))
            else:
                self.ledger.write(now._replace(stored=total + now.added - before.added))

    def _scan(self) -> list[tuple[int, int, str]]:
        found = []
        for entry in stored_files(self._paths):
            with suppress(OSError):  # removed meanwhile
                info = entry.stat(follow_symlinks=False)
                found.append((info.st_mtime_ns, info.st_size, entry.path))
        return found
