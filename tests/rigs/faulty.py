"""A store that goes wrong by chance: a dynamic class whose faults are drawn from a seed.

``options``: ``seed``; ``store`` (name of the content, shared in the process); ``rates`` = {fault: probability of a
call}; ``hang_s``: how long a hang lasts; ``control``: a JSON file that overrides ``rates``, so that another process
can turn faults on and off (``{"hang": 1.0}``, ``{}``); ``hold``: a file while which hangs go on.

==========  ==========================================================================================
fault       what the call does
==========  ==========================================================================================
delay       takes up to 50 ms longer
error       raises one of many kinds, ``SystemExit`` and other ``BaseException`` among them
hang        sleeps ``hang_s`` first, and while ``hold`` exists
scribble    get: hangs, and writes noise into the pages when it is back; put: stores what they hold by then
nospace     put: ENOSPC
short       get: half of each page, reported as a hit
bytes       get: one bit of each page flipped
swap        get: another key's page
hole        get: reports hits without touching the pages
partial     some keys fail alone
shape       an answer with a result too few
stale       exists: everything is there; get: misses
lie         put: says stored, stores nothing
==========  ==========================================================================================
"""

import errno
import json
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar

from hicache_hooks.backends.base import Got, Manifest, StoreContext
from hicache_proto.model import LAYOUTS

HOLD_MAX_S = 120.0  # a test that forgets its file ends all the same


class StrangeError(BaseException):
    """Not an ``Exception``: what a vendor's binding may raise."""


KINDS: tuple[type[BaseException], ...] = (
    OSError, ConnectionResetError, TimeoutError, RuntimeError, ValueError, KeyError, MemoryError, NotImplementedError,
    SystemExit, KeyboardInterrupt, GeneratorExit, StopIteration, StrangeError,
)  # fmt: skip
FAULTS = (
    "delay", "error", "hang", "scribble", "nospace", "short", "bytes", "swap", "hole", "partial", "shape", "stale",
    "lie",
)  # fmt: skip


class Content:
    """What one named store holds, and what happened to it."""

    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}
        self.fired: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.inside = 0
        self.closed_under_a_call = 0
        self.quiet = False  # faults off, for a canary or a final check
        self.lock = threading.Lock()


_CONTENTS: dict[str, Content] = {}


class Faulty:
    """See the module's text."""

    contract: ClassVar[int] = 1
    manifest: ClassVar[Manifest] = Manifest(name="faulty", layouts=LAYOUTS, summary="goes wrong by chance")

    def __init__(self, options: dict[str, Any], context: StoreContext) -> None:
        self.content = self.of(str(options.get("store", "default")))
        self._rng = random.Random(options.get("seed", 0))
        self._rates: dict[str, float] = dict(options.get("rates", {}))
        self._hang_s = float(options.get("hang_s", 1.0))
        self._control: str = options.get("control", "")
        self._hold: str = options.get("hold", "")
        self._context = context
        self._open = False
        unknown = set(self._rates) - set(FAULTS)
        if unknown:
            raise ValueError(f"no such faults: {unknown}")

    @staticmethod
    def of(name: str) -> Content:
        """The content of a name in this process."""
        return _CONTENTS.setdefault(name, Content())

    # -- faults ----------------------------------------------------------------------------------------------

    def _draw(self, method: str) -> set[str]:
        content = self.content
        rates = self._rates
        if self._control:
            try:
                with open(self._control) as file:
                    rates = json.load(file)
            except (OSError, ValueError):
                pass
        with content.lock:
            content.calls[method] += 1
            if content.quiet:
                return set()
            # Sorted: the order in which faults are drawn must not depend on how a dict was made.
            drawn = {fault for fault in sorted(rates) if self._rng.random() < rates[fault]}
        return drawn

    def _fire(self, fault: str, drawn: set[str]) -> bool:
        if fault in drawn:
            with self.content.lock:
                self.content.fired[fault] += 1
        return fault in drawn

    def _enter(self, method: str) -> set[str]:
        drawn = self._draw(method)
        if self._fire("delay", drawn):
            time.sleep(self._rng.random() * 0.05)  # a slow store, not synchronisation
        if self._fire("hang", drawn):
            self._sleep()
        if self._fire("error", drawn):
            raise self._rng.choice(KINDS)("injected")
        if not self._open:
            raise RuntimeError("used after close")
        return drawn

    def _sleep(self) -> None:
        time.sleep(self._hang_s)
        until = time.monotonic() + HOLD_MAX_S
        while self._hold and os.path.exists(self._hold) and time.monotonic() < until:
            time.sleep(0.02)

    def _call(self) -> "_Inside":
        return _Inside(self.content)

    # -- the contract ----------------------------------------------------------------------------------------

    def open(self) -> None:
        self._open = True

    def register(self, pool: memoryview) -> None:
        pass

    def batch_put(self, keys: Sequence[str], pages: Sequence[memoryview]) -> list[bool]:
        with self._call():
            drawn = self._enter("put")
            if self._fire("nospace", drawn):
                raise OSError(errno.ENOSPC, "injected")
            if self._fire("scribble", drawn):
                self._sleep()
            out = []
            for key, page in zip(keys, pages, strict=True):
                if "partial" in drawn and self._rng.random() < 0.5:
                    self._fire("partial", drawn)
                    out.append(False)
                    continue
                if not self._fire("lie", drawn):
                    self.content.data[key] = bytes(page)
                out.append(True)
            return out[1:] if self._fire("shape", drawn) else out

    def batch_get(self, keys: Sequence[str], pages: Sequence[memoryview]) -> list[Got]:
        with self._call():
            drawn = self._enter("get")
            if self._fire("stale", drawn):
                return [Got.MISS] * len(keys)
            if self._fire("scribble", drawn):
                self._sleep()
                for page in pages:
                    page[:] = self._rng.randbytes(page.nbytes)
                return [Got.HIT] * len(keys)
            if self._fire("hole", drawn):
                return [Got.HIT] * len(keys)
            out = [self._get(key, page, drawn) for key, page in zip(keys, pages, strict=True)]
            return out[1:] if self._fire("shape", drawn) else out

    def _get(self, key: str, page: memoryview, drawn: set[str]) -> Got:
        data = self.content.data.get(key)
        if "partial" in drawn and self._rng.random() < 0.5:
            self._fire("partial", drawn)
            return Got.ERROR
        if data is not None and self._fire("swap", drawn):
            with self.content.lock:
                data = self._rng.choice(list(self.content.data.values()))
        if data is None:
            return Got.MISS
        n = len(data) // 2 if self._fire("short", drawn) else len(data)
        page[:n] = data[:n]
        if self._fire("bytes", drawn):
            page[self._rng.randrange(page.nbytes)] ^= 1 << self._rng.randrange(8)
        return Got.HIT

    def batch_exists(self, keys: Sequence[str]) -> list[bool]:
        with self._call():
            drawn = self._enter("exists")
            out = [key in self.content.data or self._fire("stale", drawn) for key in keys]
            return out[1:] if self._fire("shape", drawn) else out

    def delete(self, keys: Sequence[str]) -> int:
        with self._call():
            self._enter("delete")
            return sum(self.content.data.pop(key, None) is not None for key in keys)

    def set_aside(self, key: str, reason: str) -> None:
        with self._call():
            self._enter("set_aside")
            self.content.data.pop(key, None)

    def clear(self) -> int:
        mine = [key for key in list(self.content.data) if key.startswith(f"{self._context.namespace}.")]
        return self.delete(mine)

    def health(self) -> dict[str, Any]:
        return {"inner": "faulty"}

    def close(self) -> None:
        if self.content.inside:
            self.content.closed_under_a_call += 1
        self._open = False


class _Inside:
    """Counts calls: none may be inside when the store is closed (F27)."""

    def __init__(self, content: Content) -> None:
        self._content = content

    def __enter__(self) -> None:
        with self._content.lock:
            self._content.inside += 1

    def __exit__(self, *exc: object) -> None:
        with self._content.lock:
            self._content.inside -= 1
