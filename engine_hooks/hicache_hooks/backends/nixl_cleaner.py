"""The disk cleaner of ``nixl`` on files: SGLang's ``l3_cleaner_*`` options, for pages of ours only.

When a directory's file system is fuller than the high watermark, the pages that were used longest ago are deleted
until it is below the low one. A page that is gone is a miss.
"""

import logging
import os
import threading
from collections.abc import Sequence
from contextlib import suppress

from hicache_hooks.backends.file_paths import StorePaths, stored_files

log = logging.getLogger(__name__)

LOOK_S = 10.0  # between two looks at the disk
STOP_S = 5.0
ROUND = 256  # pages deleted between two looks at how full the disk is


class Cleaner:
    """A thread of its own, at the rank that has it enabled; several hosts on one directory do no harm."""

    def __init__(self, paths: Sequence[StorePaths], high: float, low: float, *, enabled: bool) -> None:
        self._paths = paths
        self._high, self._low = high, low
        self._enabled = enabled
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.deleted = 0

    def start(self) -> None:
        """Start the thread, if enabled."""
        if self._enabled:
            self._thread = threading.Thread(target=self._run, name="nixl-cleaner", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Idempotent. A disk that hangs keeps the thread, not the caller."""
        self._stop.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(STOP_S)

    def _run(self) -> None:
        while not self._stop.wait(LOOK_S):
            for paths in self._paths:
                try:
                    self.clean(paths)
                except Exception as exc:  # the next look may go better; the thread must live
                    log.warning("nixl cleaner: %s", type(exc).__name__)

    def clean(self, paths: StorePaths) -> int:
        """Bring one directory below the low watermark; returns how many pages it deleted."""
        if used_percent(paths.root) <= self._high:
            return 0
        found: list[tuple[int, str]] = []
        for entry in stored_files(paths):
            with suppress(OSError):
                found.append((entry.stat(follow_symlinks=False).st_mtime_ns, entry.path))
        found.sort()
        gone = 0
        for i, (_, path) in enumerate(found):
            if self._stop.is_set() or (i % ROUND == 0 and used_percent(paths.root) <= self._low):
                break
            with suppress(OSError):
                os.unlink(path)
                gone += 1
        self.deleted += gone
        return gone


def used_percent(path: str) -> float:
    """How full the file system is, in %, as ``df`` counts."""
    info = os.statvfs(path)
    used = info.f_blocks - info.f_bfree
    return 100.0 * used / max(1, used + info.f_bavail)
