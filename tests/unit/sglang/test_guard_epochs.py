"""F70 on SGLang: a store that lost all that it held is noticed by the engine's own prefix lookup."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.unit.sglang.test_storage_guard import Clock, Store, page

from hicache_hooks.guard_settings import GuardSettings as Told
from hicache_hooks.sglang.guard_core import GuardCore, GuardSettings
from hicache_hooks.sglang.pool_memory import PoolMemory
from hicache_hooks.sglang.storage_guard import StorageGuard

KEYS = [f"k{number}" for number in range(40)]
EVERY_S = 10.0


class Watched:
    """A guard around a store, with its probes on the test's clock and thread."""

    def __init__(self) -> None:
        self.clock, self.store = Clock(), Store()
        store = self.store
        guard: Any = StorageGuard()
        guard._inner, guard._pools, guard._empty_result = store, PoolMemory(), lambda: "empty"
        settings = GuardSettings(epoch_s=EVERY_S, probe_idle_s=0, deadline_s=5.0)
        guard._core = GuardCore(
            "store", settings, self.clock, store.close, lambda: store.batch_exists(["absent"]),
            lambda key: bool(store.batch_exists([key])),
        )  # fmt: skip
        self.guard: StorageGuard = guard
        self._probes = guard._core._probes
        self._probes.stop()

    def look(self, after_s: float = EVERY_S + 1) -> int:
        """Lookups that the probes make, and what they find out."""
        self.clock.now += after_s
        self.store.log.clear()
        self._probes.tick()
        return self.store.log.count("batch_exists")

    def changes(self) -> int:
        return self.guard.guard_report().epoch_changes

    def write(self, keys: list[str]) -> None:
        """The scriptable store keeps nothing by itself."""
        self.store.pages |= {key: page() for key in keys}
        assert self.guard.batch_set(keys, [page() for _ in keys])


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_an_emptied_store_is_told_once(watched: Watched) -> None:
    watched.write(KEYS)
    assert watched.look() == 1  # the newest key is there: nobody else is asked for
    watched.store.pages.clear()
    assert watched.look() > 1
    report = watched.guard.guard_report()
    assert (report.epoch_changes, report.breaker, report.errors) == (1, "closed", 0)
    change = report.epoch_change
    assert change is not None
    assert (change.old, change.new, change.how) == ("1", "2", "inferred")
    assert watched.look() == 0  # nothing is known of it any more
    watched.write(KEYS[:3])
    assert watched.look() == 1
    assert watched.changes() == 1


def test_what_was_never_seen_there_is_not_lost(watched: Watched) -> None:
    """A store that takes pages and shows none (a write behind) was never known to hold them."""
    watched.guard.batch_set(KEYS, [page() for _ in KEYS])
    watched.look()
    watched.look()
    assert watched.changes() == 0


def test_an_evicted_page_is_no_loss(watched: Watched) -> None:
    watched.write(KEYS[:4])
    watched.look()
    for key in KEYS[1:4]:
        del watched.store.pages[key]
    watched.look()
    assert watched.changes() == 0


def test_a_missed_page_that_was_there_is_looked_after_at_once(watched: Watched) -> None:
    watched.write(KEYS[:4])
    watched.look()
    watched.store.pages.clear()
    assert watched.guard.batch_get(KEYS[:4], [page() for _ in range(4)]) == [None] * 4
    assert watched.look(after_s=1.0) == 4
    assert watched.changes() == 1


def _clear(watched: Watched) -> None:
    watched.store.clear = watched.store.pages.clear  # type: ignore[attr-defined]
    watched.guard.clear()


def _scoped(watched: Watched) -> None:
    watched.store.pages.clear()
    watched.guard.emptied()


@pytest.mark.parametrize("clear", [_clear, _scoped])
def test_a_clear_on_purpose_is_no_loss(watched: Watched, clear: Callable[[Watched], None]) -> None:
    watched.write(KEYS[:4])
    watched.look()
    clear(watched)
    assert watched.store.pages == {}
    watched.look()
    assert watched.changes() == 0


def test_a_store_in_trouble_is_not_asked_and_loses_nothing(watched: Watched) -> None:
    watched.write(KEYS[:4])
    watched.look()
    watched.store.trouble = OSError(5, "gone")
    watched.look()
    assert watched.changes() == 0  # it raised: nothing was learned
    watched.guard.set_bypass(True)
    assert watched.look() == 0
    watched.guard.set_bypass(False)
    watched.store.trouble = None
    assert watched.look() == 1
    watched.guard.tune_guard(Told(epoch_s=0, probe_idle_s=0))
    watched.store.pages.clear()
    assert watched.look() == 0
    assert watched.changes() == 0
