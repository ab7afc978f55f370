"""Batches that fail in part: what was read or stored counts all the same (F80, F81). And upkeep beside a read.

A read finds a page that cannot be one (wrong length, or its bytes do not move) and removes it. The caller asked for
pages, not for this: an exception here would turn the hits of the whole batch into errors, which cost their requests
a recomputation and open the breaker. What could not be removed is found again by the next read of it.
"""

import logging
from collections.abc import Callable, Sequence

from hicache_hooks.backends.base import Got

log = logging.getLogger(__name__)


class Upkeep:
    """Runs such calls for one store. Thread-safe."""

    def __init__(self, name: str) -> None:
        """``name`` is the backend's, for the log."""
        self._name = name
        self._said = False
        self.failed = 0  # calls, since the store was made

    def __call__(self, work: Callable[[], object]) -> None:
        """Run ``work``; what it raises is logged once until it succeeds again."""
        try:
            work()
        except Exception as exc:  # whatever the vendor's client raises
            self.failed += 1
            if not self._said:
                self._said = True
                log.warning("%s: a bad page could not be removed (%s)", self._name, type(exc).__name__)
        else:
            self._said = False


def part_or_raise(got: Sequence[Got], keys: int, failed: Exception) -> list[Got]:
    """What was read before ``failed``, and an error for each other key of ``keys``.

    Raises:
        Exception: ``failed`` itself, when not one page was read: then the store failed, not a page.
    """
    if Got.HIT not in got:
        raise failed
    return [*got, *[Got.ERROR] * (keys - len(got))]


def stored_or_raise(done: Sequence[bool | None], keys: int, failed: Exception) -> list[bool | None]:
    """What was stored before ``failed``, and None for each other key of ``keys``: those failed.

    Raises:
        Exception: ``failed`` itself, when not one page was stored: then the store failed, not a page.
    """
    if not any(done):
        raise failed
    return [*done, *[None] * (keys - len(done))]
