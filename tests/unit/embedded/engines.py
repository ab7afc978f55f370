"""A rank driven by hand: submit, run passes until it has answered. Shared by the tests of the embedded engine."""

import random
import threading
import time
from collections.abc import Iterable, Sequence

from hicache_hooks.cache.storage_set import StorageSet
from hicache_hooks.embedded.messages import Done, Failed, Flush, Flushed, Submit
from hicache_hooks.embedded.options import EngineOptions, ModelShape
from hicache_hooks.embedded.rank import Rank

SHAPE = ModelShape(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, seed=7)
WAIT_S = 20.0  # bound of every wait


def options(**changes: object) -> EngineOptions:
    values: dict[str, object] = {
        "model": SHAPE, "page_size": 16, "l1_tokens": 1024, "l2_tokens": 4096, "context": 512, "chunk_tokens": 64,
    }  # fmt: skip
    return EngineOptions(**{**values, **changes})  # type: ignore[arg-type]


def text(seed: int, n: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(n)]


class Engine:
    """One rank, no processes. ``generate`` runs passes on the calling thread, which is the scheduler thread."""

    def __init__(self, **changes: object) -> None:
        self.woken = threading.Event()
        self.done: dict[str, Done] = {}
        self.failed: dict[str, Failed] = {}
        self.flushed: dict[int, Flushed] = {}
        self.rank = Rank(options(**changes), emit=self._emit, wake=self.woken.set)
        self.scheduler = self.rank.scheduler
        self.cache = self.rank.cache
        self.serial = 0

    def _emit(self, message: Done | Failed | Flushed) -> None:
        match message:
            case Done():
                self.done[message.rid] = message
            case Failed():
                self.failed[message.rid] = message
            case Flushed():
                self.flushed[message.call] = message

    def submit(self, tokens: Sequence[int], new: int = 16, rid: str | None = None) -> str:
        self.serial += 1
        rid = rid or f"q{self.serial}"
        self.scheduler.submit(Submit(rid, list(tokens), new))
        return rid

    def pass_(self) -> bool:
        """One pass; when it had nothing to do, wait for a wake-up as the loop does."""
        self.woken.clear()
        if self.scheduler.run_pass():
            return True
        self.woken.wait(self.scheduler.sleep_s())
        return False

    def until(self, what: str, true: "object") -> None:
        """Run passes until ``true()``; fails after WAIT_S."""
        deadline = time.monotonic() + WAIT_S
        while not true():  # type: ignore[operator]
            if time.monotonic() > deadline:
                raise AssertionError(f"no {what} within {WAIT_S} s: {self.scheduler.idle_report().counters}")
            self.pass_()

    def finish(self, rids: Iterable[str]) -> list[Done]:
        wanted = list(rids)
        self.until("answer", lambda: all(rid in self.done or rid in self.failed for rid in wanted))
        assert not self.failed, self.failed
        return [self.done[rid] for rid in wanted]

    def generate(self, tokens: Sequence[int], new: int = 16) -> Done:
        return self.finish([self.submit(tokens, new)])[0]

    def idle(self) -> None:
        """Run passes until nothing is left to do, and check the ledgers (F42)."""
        self.until("idle moment", lambda: not any(self.scheduler.idle_report().counters.values()))
        self.cache.check()

    def flush(self, timeout_s: float = 5.0) -> Flushed:
        self.serial += 1
        call = self.serial
        self.scheduler.flush(Flush(call, timeout_s))
        self.until("end of flush", lambda: call in self.flushed)
        return self.flushed[call]

    def close(self) -> None:
        storage = self.cache.storage
        if isinstance(storage, StorageSet):
            assert storage.stop(5.0) == []
            assert storage.close()
