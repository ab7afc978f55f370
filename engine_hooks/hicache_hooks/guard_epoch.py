"""Has the store lost all that it held? (F70)

A store that was restarted or emptied answers well: every key is a miss, nothing fails, no breaker opens. Wrong is only
what we believe about it, so that is dropped: pages are written again at their next use, and misses are asked for again.
Serving goes on, no error is counted, no failover begins. There are two ways to know:

* *said*: the backend has the optional method ``epoch() -> str``, a text that is another one once the content is gone
  (a marker beside the pages; "" = cannot say now).
* *inferred*, where it has none: the keys last stored or read are remembered, a few of them. If one of them was found in
  the store before and now not one is, then what we know to be stored is not. A store that evicts takes old pages first;
  one that never shows what it took is never believed to have held it.

The guard's monitor says when, a probe thread looks (``guard_watch``), and the guard holds the lock.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from hicache_hooks.backends.base import Backend
from hicache_hooks.guard_results import check_shape, is_bool
from hicache_proto.model import EpochChange

KNOWN_KEYS = 16  # asked for in one call
PER_BATCH = 4  # of one batch's keys: its last ones, and older batches stay in the sample
FIRST_S = 1.0  # from the first key to the look that finds it there
SOON_S = 1.0  # least time between two looks, however suspicious the misses are
MAX_CHARS = 64  # of an epoch's name: it comes from the store, and goes to status and events
_ODD = re.compile(r"[^A-Za-z0-9_.:,-]")

_serial = itertools.count(1)  # over all stores of this process, so that nobody mistakes one change for another


@dataclass(frozen=True, slots=True)
class Seen:
    """What one look found. ``turn`` tells whether it began before a ``reset``."""

    turn: int
    said: str = ""
    found: dict[str, bool] = field(default_factory=dict)


class EpochWatch:
    """The epoch of one store. Methods are *locked* unless they say otherwise."""

    def __init__(self, backend: Backend, clock: Callable[[], float]) -> None:
        self._backend = backend
        self._ask: Callable[[], str] | None = getattr(backend, "epoch", None)
        self._confirm: Callable[[list[str]], list[bool]] | None = getattr(backend, "confirm", None)
        self._clock = clock
        self._known: dict[str, None] = {}
        self._confirmed = False  # inferred: one of the known keys was seen in the store
        self._turn = 0
        self._at: float | None = None  # of the next look; None: there is nothing to look for
        self._looked_at = float("-inf")
        self._looking = False
        self.current = "" if self._ask is not None else "1"
        self.changes = 0
        self._last: tuple[int, str, str, float] | None = None  # number, old, new, when

    @property
    def how(self) -> str:
        """Whether the store says its epoch or we infer it."""
        return "said" if self._ask is not None else "inferred"

    # -- what traffic shows ----------------------------------------------------------------------------------

    def holds(self, keys: Sequence[str], *, read: bool = False) -> bool:
        """The store took these, or delivered them; True when a look is due sooner than before."""
        if self._ask is None:
            for key in keys[-PER_BATCH:]:
                self._known.pop(key, None)
                self._known[key] = None
            while len(self._known) > KNOWN_KEYS:
                del self._known[next(iter(self._known))]
            self._confirmed = self._confirmed or read
        if self._at is not None or not keys:
            return False
        self._at = self._clock() + FIRST_S
        return True

    def missed(self, keys: Iterable[str]) -> bool:
        """The store does not have these; True when that makes a look due now: one of them was known to be there."""
        if self._at is None or not self._known or not any(key in self._known for key in keys):
            return False
        soon = max(self._clock(), self._looked_at + SOON_S)
        if self._at <= soon:
            return False
        self._at = soon
        return True

    def drop(self, key: str) -> None:
        """We removed it ourselves."""
        self._known.pop(key, None)

    def soon(self) -> None:
        """The store is back from an outage: look now."""
        if self._at is not None:
            self._at = min(self._at, self._clock())

    def reset(self) -> None:
        """We emptied the store ourselves: what it says next is where we begin."""
        self._turn += 1
        self._known.clear()
        self._confirmed = False
        if self._ask is not None:
            self.current = ""

    # -- looking ---------------------------------------------------------------------------------------------

    def due_in_s(self, every_s: float) -> float | None:
        """Seconds until the next look; None when there is none to make. ``every_s`` 0: never."""
        if every_s == 0 or self._looking or self._at is None or (self._ask is None and not self._known):
            return None
        return max(0.0, self._at - self._clock())

    def begin(self) -> Callable[[], Seen]:
        """A look begins: what to call, without the lock. It blocks and raises as the store does."""
        self._looking = True
        turn, keys = self._turn, list(self._known)
        return lambda: self._look(turn, keys)

    def _look(self, turn: int, keys: list[str]) -> Seen:
        if self._ask is not None:
            return Seen(turn, said=_ODD.sub("_", str(self._ask() or ""))[:MAX_CHARS])
        found = (self._confirm or self._backend.batch_exists)(keys) if keys else []
        check_shape(found, len(keys), is_bool)
        return Seen(turn, found=dict(zip(keys, map(bool, found), strict=True)))

    def end(self, seen: Seen | None, every_s: float) -> bool:
        """A look ended, None: without an answer. True when the store lost what it held."""
        self._looking = False
        self._looked_at = self._clock()
        self._at = self._looked_at + every_s
        if seen is None or seen.turn != self._turn:
            return False
        return self._judge_said(seen.said) if self._ask is not None else self._judge_found(seen.found)

    def _judge_said(self, said: str) -> bool:
        before = self.current
        if not said or said == before:
            return False
        if not before:
            self.current = said
            return False
        return self._changed(before, said)

    def _judge_found(self, found: dict[str, bool]) -> bool:
        gone = [key for key, there in found.items() if not there]
        if len(gone) < len(found):
            self._confirmed = True
            for key in gone:
                self._known.pop(key, None)
            return False
        return bool(found) and self._confirmed and self._changed(self.current, str(int(self.current) + 1))

    def _changed(self, old: str, new: str) -> bool:
        self.reset()
        self.current = new
        self.changes += 1
        self._last = next(_serial), old, new, self._clock()
        return True

    # -- views -----------------------------------------------------------------------------------------------

    def last(self) -> EpochChange | None:
        """The last change, as reported."""
        if self._last is None:
            return None
        n, old, new, at = self._last
        return EpochChange(n=n, old=old, new=new, how=self.how, ago_s=max(0.0, self._clock() - at))
