"""An embedded engine in this process whose store is ``Faulty``: attach with rates, generate, compare, come to rest."""

import json
import threading
import time
from collections.abc import Sequence
from typing import Any

from tests.rigs.faulty import Content, Faulty
from tests.unit.embedded.engines import Engine, text

from hicache_hooks.embedded.adapter import EmbeddedAdapter
from hicache_proto.model import TargetState

ENV = "HICACHE_DYNAMIC_BACKENDS"
ALLOWED = "tests.rigs.faulty:Faulty"
REST_S = 30.0
NEW = 4  # tokens of an answer: one wrong page in the prompt already changes them
GUARD = {"guard_deadline_s": 0.3, "guard_hold_s": 0.1, "guard_hold_max_s": 0.5, "guard_min_calls": 5,
         "guard_negative_ttl_s": 1.0, "guard_probe_idle_s": 0.5}  # fmt: skip


def faulty_target(store: str, rates: dict[str, float], policy: str = "wait_complete", **options: Any) -> TargetState:
    """Attach ``Faulty`` with these rates. The allow-list must be in the environment before the engine is made."""
    config = {
        "module_path": "tests.rigs.faulty", "class_name": "Faulty", "prefetch_threshold": 16, **GUARD,
        "options": {"store": store, "rates": rates, **options},
    }  # fmt: skip
    return TargetState(backend="dynamic", extra_config=json.dumps(config), prefetch_policy=policy)


class FaultyEngine:
    """One rank; its true outputs come from itself, computed before any store was attached."""

    def __init__(self, **changes: Any) -> None:
        self.threads_before = threading.active_count()
        self.engine = Engine(**changes)
        self.adapter = EmbeddedAdapter(self.engine.rank)
        self.truth: dict[int, list[int]] = {}

    def learn(self, seeds: Sequence[int], tokens: int) -> None:
        """Compute the outputs of these prompts without a store."""
        for seed in seeds:
            self.truth[seed] = list(self.engine.generate(text(seed, tokens), NEW).output)
        self.engine.idle()
        assert self.engine.flush().ok

    def attach(self, target: TargetState) -> Content:
        """Faults are off while it is built: the canary would refuse most of them."""
        content = Faulty.of(json.loads(target.extra_config or "{}")["options"]["store"])
        content.quiet = True
        built = self.adapter.build(target, lambda: False)
        while not self.adapter.backfill_slice(0.001):
            pass
        self.close_old(self.adapter.swap(built))
        content.quiet = False
        return content

    def detach(self) -> None:
        self.close_old(self.adapter.swap(self.adapter.build(TargetState(), lambda: False)))

    def close_old(self, old: object) -> None:
        """A set whose thread still hangs is closed when that thread is back."""
        deadline = time.monotonic() + REST_S
        while self.adapter.close(old, 2.0):
            self.engine.pass_()
            assert time.monotonic() < deadline, "a thread was lost in the store"

    def check(self, seeds: Sequence[int], tokens: int) -> None:
        """Ask for these prompts at once and compare with the truth."""
        rids = [self.engine.submit(text(seed, tokens), NEW) for seed in seeds]
        for seed, done in zip(seeds, self.engine.finish(rids), strict=True):
            assert list(done.output) == self.truth[seed], f"prompt {seed}: another output than computed"

    def rest(self) -> None:
        """Until every thread is back: then each page has its owner again, and nobody was lost."""
        ledger = self.engine.cache.host_ledger
        deadline = time.monotonic() + REST_S
        while ledger.open or any(self.engine.scheduler.idle_report().counters.values()):
            assert time.monotonic() < deadline, f"{ledger.open} operations never ended"
            self.engine.pass_()
        self.engine.cache.check()
        assert ledger.reserved == 0
        assert self.engine.cache.stats().get("internal_errors", 0) == 0
        guard = self.adapter.guard()
        assert guard is None or guard.late == 0

    def close(self) -> None:
        self.close_old(self.adapter._installed)
