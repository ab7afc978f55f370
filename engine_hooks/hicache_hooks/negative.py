"""Keys that a store promised and did not deliver: for a while they count as not stored (F81).

Without it a stale hit is looked up, fetched, missed and looked up again by every request of that prefix. A page that
is written again leaves the list at once. Bounded by count and age; the guard holds the lock.
"""

from collections.abc import Callable, Iterable, Sequence

MAX_KEYS = 65536  # about 10 MB of keys; the oldest leave first


class NegativeCache:
    """Keys with the time at which they may be asked for again."""

    def __init__(self, clock: Callable[[], float], *, max_keys: int = MAX_KEYS) -> None:
        self._clock = clock
        self._max = max_keys
        self._until: dict[str, float] = {}  # in the order of insertion, which is that of expiry while ttl stays

    def add(self, keys: Iterable[str], ttl_s: float) -> None:
        """These were not delivered. ``ttl_s`` 0: they are not remembered."""
        if ttl_s <= 0:
            return
        now = self._clock()
        for key in keys:
            self._until.pop(key, None)
            self._until[key] = now + ttl_s
        while self._until and (len(self._until) > self._max or next(iter(self._until.values())) <= now):
            del self._until[next(iter(self._until))]

    def forget(self, keys: Iterable[str]) -> None:
        """These were written."""
        if self._until:
            for key in keys:
                self._until.pop(key, None)

    def mask(self, keys: Sequence[str], there: list[bool]) -> list[bool]:
        """``there`` without the keys that were not delivered lately."""
        if not self._until:
            return there
        now = self._clock()
        return [yes and self._until.get(key, now) <= now for key, yes in zip(keys, there, strict=True)]

    def clear(self) -> None:
        """The store is another one now: nothing is known about it."""
        self._until.clear()

    def __len__(self) -> int:
        return len(self._until)
