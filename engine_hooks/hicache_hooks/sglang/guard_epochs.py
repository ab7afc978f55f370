"""Has an SGLang store lost all that it held? (F70)  ``guard_epoch`` over the engine's own lookup.

SGLang's stores say no epoch, so it is inferred: keys that were stored or read are asked for now and then, the newest
first, until one is there. The lookup counts a prefix of keys, so each is asked for alone; where the store is well, the
first answer is the last.

Only told: the event, status and metrics are the same as on the embedded engine, and there is nothing to drop. The
engine's tree asks the store each time, and its buffer_only mode, which remembers what it wrote, forgets by itself what
a lookup did not find; that memory must stay equal on all ranks of a world, so nobody else may touch it.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hicache_hooks.guard import describe_exception
from hicache_hooks.guard_epoch import EpochWatch, Seen

log = logging.getLogger(__name__)

There = Callable[[str], bool]
"""Whether the store has a key. It may block and raise."""


class _Watch(EpochWatch):
    def __init__(self, there: There, clock: Callable[[], float]) -> None:
        nothing: Any = None  # it has no ``epoch()``
        super().__init__(nothing, clock)
        self._there = there

    def _look(self, turn: int, keys: list[str]) -> Seen:
        found: dict[str, bool] = {}
        for key in reversed(keys):
            found[key] = self._there(key)
            if found[key]:
                break
        return Seen(turn, found=found)


class StoreEpochs:
    """Of one guarded store. Any thread."""

    def __init__(
        self, name: str, there: There | None, clock: Callable[[], float], look_soon: Callable[[], None]
    ) -> None:
        """``there`` None: nothing is watched. ``look_soon``: a look is due earlier than before."""
        self._name = name
        self._watch = None if there is None else _Watch(there, clock)
        self._look_soon = look_soon
        self._lock = threading.Lock()
        self._begun: Callable[[], Seen] | None = None

    def holds(self, keys: Sequence[str], *, read: bool = False) -> None:
        """The store took these, or delivered them."""
        if self._watch is None:
            return
        with self._lock:
            sooner = self._watch.holds(keys, read=read)
        if sooner:
            self._look_soon()

    def missed(self, keys: Iterable[str]) -> None:
        """These were asked for in vain, whatever the reason: the look that follows decides."""
        if self._watch is None:
            return
        with self._lock:
            sooner = self._watch.missed(keys)
        if sooner:
            self._look_soon()

    def emptied(self) -> None:
        """It was cleared on purpose."""
        if self._watch is not None:
            with self._lock:
                self._watch.reset()

    def due_in_s(self, every_s: float) -> float | None:
        """Seconds until the next look; None when there is none to make. ``every_s`` 0: never."""
        if self._watch is None:
            return None
        with self._lock:
            return self._watch.due_in_s(every_s)

    def begin(self) -> None:
        """A look is due, and ``look`` will follow."""
        if self._watch is not None:
            with self._lock:
                self._begun = self._watch.begin()

    def look(self, bounded: Callable[[Callable[[], Seen]], Any], every_s: float) -> None:
        """*probe thread*: make it. ``bounded`` runs it with a deadline; whatever it raises, nothing was learned."""
        begun, self._begun = self._begun, None
        if begun is None or self._watch is None:
            return
        seen: Seen | None = None
        try:
            seen = bounded(begun)
        except BaseException as exc:  # the store's
            log.debug("what store %s holds could not be seen: %s", self._name, describe_exception(exc))
        with self._lock:
            lost = self._watch.end(seen, every_s)
        if lost:
            log.warning(
                "store %s is reachable and lost what it held; its pages are computed and written anew", self._name
            )

    def reported(self) -> dict[str, Any]:
        """Fields of a ``GuardReport``."""
        if self._watch is None:
            return {}
        with self._lock:
            watch = self._watch
            return {"epoch": watch.current, "epoch_changes": watch.changes, "epoch_change": watch.last()}
