"""RocksDB takes no write any more once one has failed for want of space, whatever is free later: it is opened again.

RocksDB itself has ``Resume`` for this; its Python binding has not. Opening it anew replays its log, so what was said to
be stored is there again (tried: ``tests/stores/test_full.py``). For that it needs room for a copy of the log; with less
it would not open, and then it could not even be read. So free space is looked at first.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from hicache_hooks.backends.native import OpenState

log = logging.getLogger(__name__)

RETRY_S = 1.0  # between two looks
UNASKED_S = 10.0  # between two looks where a failed write is not told: behind L1 they are made later
ALONE_S = 1.0  # for calls that are inside; reads and writes wait outside meanwhile
ROOM = 4 << 20  # beside the log: its tables' indexes, a manifest, a new log
PROBE = b"\0hicache write probe"  # of no namespace


class Reopener:
    """One connector of the vendor's. Thread-safe."""

    def __init__(
        self, connector: Any, state: OpenState, *, unasked: bool, reopened: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """``unasked``: look now and then, without ``refused``. ``reopened()`` is called with nobody inside."""
        self._connector = connector
        self._state = state
        self._unasked = unasked
        self._tell = reopened
        self._clock = clock
        self._lock = threading.Lock()
        self._next = 0.0
        self._suspect = False
        self.count = 0

    def refused(self) -> None:
        """A page was not stored."""
        self._suspect = True

    def heal(self) -> None:
        """Before a put, outside the client: open it again if that is what it takes. Never raises."""
        if not (self._suspect or self._unasked) or self._clock() < self._next or not self._lock.acquire(blocking=False):
            return
        try:
            self._next = self._clock() + (RETRY_S if self._suspect else UNASKED_S)
            with suppress(RuntimeError, TimeoutError):  # closed, or calls are inside: the next put looks again
                self._look()
        except Exception as exc:  # whatever the file system or the vendor says
            log.warning("aibrix: RocksDB could not be opened again (%s)", type(exc).__name__)
        finally:
            self._lock.release()

    def _look(self) -> None:
        path = self._connector.path
        info = os.statvfs(path)
        if info.f_bavail * info.f_frsize < _log_bytes(path) + ROOM:
            return
        with self._state.inside():
            stuck = not self._writes()
        if stuck:
            with self._state.alone(ALONE_S):
                self._reopen()
                stuck = not self._writes()
        self._suspect = stuck

    def _writes(self) -> bool:
        store = self._connector.store
        try:
            store.put(PROBE, b"")
            store.delete(PROBE)
        except Exception:  # a class of the binding's; not open: an AttributeError
            return False
        return True

    def _reopen(self) -> None:
        self._connector.close()
        self._connector.store = None  # its close fails when it cannot write: without a reference it is closed too
        status = self._connector.open()
        if not status.is_ok():
            raise OSError("the database cannot be opened")
        self.count += 1
        self._tell()
        log.warning("aibrix: RocksDB had stopped taking writes and was opened again")


def _log_bytes(path: str) -> int:
    """Size of the write-ahead log, which opening copies into a table."""
    with suppress(FileNotFoundError), os.scandir(os.path.join(path, "wal")) as entries:
        return sum(entry.stat().st_size for entry in entries)
    return 0
