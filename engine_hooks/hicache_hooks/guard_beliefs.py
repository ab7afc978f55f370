"""What the guard believes about a store's content: pages that it promised and lacks (``negative``), and that it is
still the store it was (``guard_epoch``). Both are dropped when it is not. The guard holds the lock everywhere.
"""

import logging
from collections.abc import Callable, Sequence

from hicache_hooks.backends.base import Backend
from hicache_hooks.guard_epoch import EpochWatch, Seen
from hicache_hooks.negative import NegativeCache

log = logging.getLogger(__name__)


class Beliefs:
    """See the module's text. ``tell_lost`` must be short and must not raise: the lock is held."""

    def __init__(self, name: str, backend: Backend, clock: Callable[[], float]) -> None:
        self._name = name
        self._negative = NegativeCache(clock)
        # The backend's own memory. Without the lock: it is foreign code, and the scheduler takes the lock.
        self.forget: Callable[[], object] = getattr(backend, "forget", lambda: None)
        self.epochs = EpochWatch(backend, clock)
        self.tell_lost: Callable[[], None] = lambda: None
        self.look_soon: Callable[[], None] = lambda: None  # a look is due earlier than before

    def stored(self, keys: Sequence[str], stored: Sequence[bool]) -> None:
        """The store took these, or not."""
        taken = [key for key, yes in zip(keys, stored, strict=True) if yes]
        self._negative.forget(taken)
        if self.epochs.holds(taken):
            self.look_soon()

    def delivered(self, keys: Sequence[str], hits: Sequence[bool], ttl_s: float) -> None:
        """The store delivered these, or not: those are not promised again for ``ttl_s`` (F81)."""
        look = self.epochs.holds([key for key, hit in zip(keys, hits, strict=True) if hit], read=True)
        lost = [key for key, hit in zip(keys, hits, strict=True) if not hit]
        if lost:
            self._negative.add(lost, ttl_s)
            look = self.epochs.missed(lost) or look
        if look:
            self.look_soon()

    def promised(self, keys: Sequence[str], there: list[bool]) -> list[bool]:
        """``there`` as the store says it, without what it did not deliver lately."""
        if not all(there) and self.epochs.missed(key for key, yes in zip(keys, there, strict=True) if not yes):
            self.look_soon()
        return self._negative.mask(keys, there)

    def set_aside(self, key: str, ttl_s: float) -> None:
        """A page failed its check."""
        self._negative.add([key], ttl_s)
        self.epochs.drop(key)

    def emptied(self) -> None:
        """We cleared it ourselves. Of a clear that failed half-way nobody knows what is left.

        What the backend remembers is its own ``clear``'s to drop.
        """
        self.epochs.reset()
        self._drop()

    def looked(self, seen: Seen | None, every_s: float) -> bool:
        """A look for the epoch ended, None: without an answer. True: the content is gone, ``forget`` must be called."""
        if not self.epochs.end(seen, every_s):
            return False
        self._drop()
        if (change := self.epochs.last()) is not None:
            log.warning(
                "backend %s is reachable and lost what it held (epoch %s -> %s, %s): its pages are written again",
                self._name, change.old, change.new, change.how,
            )  # fmt: skip
        return True

    def _drop(self) -> None:
        self._negative.clear()
        self.tell_lost()
