"""Free-space floor, and what "no space left" means: writes stop, reads go on, and writes resume by themselves (F62)."""

import errno
import os
import threading
import time
from collections.abc import Callable

# Without a floor of the operator's: 2 % of the file system, at most 1 GiB. A cache must not fill a host's disk.
DEFAULT_FLOOR_SHARE = 0.02
DEFAULT_FLOOR_MAX_BYTES = 1 << 30
RETRY_S = 1.0  # after a refusal that free space does not explain (a user's disk quota, inodes)
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class FreeSpace:
    """Watches the file system of one store. Thread-safe."""

    def __init__(self, root: str, floor_bytes: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._root = root
        self._floor = floor_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._full_at: float | None = None  # when the kernel said no
        self._full_free = 0  # what was free then
        self.reason = ""  # why writes stand still; empty when they do not

    def measure(self) -> tuple[int, int]:
        """Bytes free for this process, and bytes that stay free."""
        info = os.statvfs(self._root)
        floor = self._floor
        if floor is None:
            floor = min(DEFAULT_FLOOR_MAX_BYTES, int(info.f_blocks * info.f_frsize * DEFAULT_FLOOR_SHARE))
        return info.f_bavail * info.f_frsize, floor

    def room(self, pages: int, page_bytes: int) -> int:
        """How many of ``pages`` pages may be written now."""
        free, floor = self.measure()
        fits = min(pages, max(0, free - floor) // page_bytes)
        with self._lock:
            if self._full_at is not None:
                freed = free >= self._full_free + page_bytes
                if not freed and self._clock() - self._full_at < RETRY_S:
                    return 0
            if fits == 0:
                self.reason = "no_space: below the free-space floor"
            elif self._full_at is None:
                self.reason = ""
            return fits

    def refused(self) -> None:
        """The kernel said that there is no space."""
        with self._lock:
            self._full_at, self._full_free = self._clock(), self.measure()[0]
            self.reason = "no_space: the file system is full"

    def written(self) -> None:
        """A page was written: space is there."""
        if self._full_at is not None:
            with self._lock:
                self._full_at, self.reason = None, ""
