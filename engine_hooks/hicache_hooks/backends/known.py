"""Keys that this process has put into a store, or found there: said to exist without asking again.

The engine asks before each read, and some stores answer dearly. RocksDB reads the page (0.8 ms a MiB, as much as the
read that follows); S3 takes a request for each page (15 % of a get on loopback, a round trip and its price elsewhere).
The database belongs to this process and, without a time to live, drops nothing by itself. A bucket may lose pages to
others: such a page is a miss when it is read, is then forgotten, and the request is recomputed (F81); that all are gone
is seen by ``confirm`` (F70). Keys of an earlier process are not known, and are asked for.

Calls of several threads cross: a put has stored its page, another thread deletes it, and only then does the first tell.
So who tells says since when: what it saw before something was removed counts for nothing.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

MAX_KEYS = 100_000  # 24 MB; the least recently stored go first, and are asked for then
SLICE = 5000  # keys dropped at a time, 1.5 ms: all at once held the interpreter lock for 30


class Known:
    """Thread-safe. ``enabled`` False: knows nothing."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._lock = threading.Lock()
        self._keys: OrderedDict[str, None] = OrderedDict()
        self._removals = 0

    @property
    def now(self) -> int:
        """For ``add``, taken before the call that stores or finds the pages."""
        return self._removals

    def add(self, keys: Iterable[str], since: int) -> None:
        """They were stored or found after ``since`` (``now``)."""
        if not self._enabled:
            return
        with self._lock:
            if since != self._removals:
                return
            for key in keys:
                self._keys[key] = None
                self._keys.move_to_end(key)
            while len(self._keys) > MAX_KEYS:
                self._keys.popitem(last=False)

    def drop(self, keys: Iterable[str]) -> None:
        """They could not be read."""
        with self._lock:
            for key in keys:
                self._keys.pop(key, None)

    @contextmanager
    def removing(self, keys: Iterable[str]) -> Iterator[None]:
        """Around a removal, whether or not it succeeds: a put that ends meanwhile may come before or after it."""
        keys = list(keys)
        self._removed(keys)
        try:
            yield
        finally:
            self._removed(keys)

    def _removed(self, keys: Sequence[str]) -> None:
        with self._lock:
            self._removals += 1
            for key in keys:
                self._keys.pop(key, None)

    def clear(self) -> None:
        """Nothing is known any more."""
        with self._lock:
            self._removals += 1
            gone, self._keys = self._keys, OrderedDict()
        while gone:
            for _ in range(min(SLICE, len(gone))):
                gone.popitem()
            time.sleep(0)  # lets go of the interpreter lock

    def has(self, keys: Sequence[str]) -> list[bool]:
        """Which are known."""
        with self._lock:
            return [key in self._keys for key in keys]

    def prefix(self, keys: list[str]) -> int:
        """How many of the first ``keys`` are surely there."""
        with self._lock:
            return next((i for i, key in enumerate(keys) if key not in self._keys), len(keys))
