"""Counters over swaps, undos and what the engine attaches by itself: each guard is counted once (F91)."""

import pytest
from tests.unit.sglang.test_storage_guard import Store, guarded, page

from hicache_hooks.embedded.usage import UsageTotals
from hicache_hooks.sglang.storage_guard import StorageGuard


@pytest.fixture
def a() -> StorageGuard:
    guard = guarded(Store())
    guard.batch_set(["x"], [page()])
    return guard


def test_an_undo_counts_nothing_twice(a: StorageGuard) -> None:
    """Attach A, swap to B, undo to A; then A is closed, and a late look meets it again."""
    totals, b = UsageTotals(), guarded(Store())
    for guard in (a, b, a):
        totals.add(guard)
    assert totals.totals()["put"].hit == 1
    totals.retire(a)
    totals.add(a)
    totals.retire(a)
    assert totals.totals()["put"].hit == 1


def test_what_the_engine_closed_itself_is_retired(a: StorageGuard) -> None:
    """The engine's own PUT and DELETE, again and again: numbers stay, guards go."""
    totals = UsageTotals()
    totals.add(a)
    totals.retire_closed()
    assert totals._live == [a]
    a.close()
    totals.retire_closed()
    assert totals._live == []
    assert totals.totals()["put"].hit == 1
