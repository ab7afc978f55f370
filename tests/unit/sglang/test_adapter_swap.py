"""What a swap does beside moving the object: the guard's live keys, and the counters."""

from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.sglang.test_storage_guard import Store, guarded, page

from hicache_hooks.cache.config import Running
from hicache_hooks.cache.knobs import Knobs
from hicache_hooks.embedded.usage import UsageTotals
from hicache_hooks.guard_settings import GuardSettings
from hicache_hooks.sglang.adapter import SglangAdapter
from hicache_hooks.sglang.config import make_config
from hicache_hooks.sglang.parked import LiveChange, Parked


class Live:
    """``LiveState`` that believes what it is told."""

    def __init__(self) -> None:
        self.now = Parked(Running(None, Knobs()))

    def parked(self) -> Parked:
        return self.now

    def installed(self, parked: Parked) -> None:
        self.now = parked

    def backend(self) -> Any:
        return self.now.backend

    def running(self) -> Running:
        return self.now.running


@pytest.fixture
def adapter() -> SglangAdapter:
    made: Any = SglangAdapter.__new__(SglangAdapter)
    nothing = lambda *_: None  # noqa: E731
    made._live, made._usage, made._unpublished = Live(), UsageTotals(), False
    made._installer = SimpleNamespace(install=nothing, live=nothing, show=nothing)
    result: SglangAdapter = made
    return result


def parked(deadline_s: float) -> Parked:
    config = make_config("file", {}, "{}", "0" * 32)
    return Parked(Running(config, Knobs(guard=GuardSettings(deadline_s=deadline_s))), guarded(Store()))


def test_each_set_brings_its_guards_settings_and_takes_them_back(adapter: SglangAdapter) -> None:
    a, b = parked(3.0), parked(4.0)
    adapter.swap(a)
    assert a.backend._core.settings.deadline_s == 3.0
    before = adapter.swap(LiveChange(Running(a.running.config, Knobs(guard=GuardSettings(deadline_s=5.0)))))
    assert a.backend._core.settings.deadline_s == 5.0
    adapter.swap_back(before)
    assert a.backend._core.settings.deadline_s == 3.0
    adapter.swap(b)
    assert b.backend._core.settings.deadline_s == 4.0


def test_an_undo_counts_nothing_twice(adapter: SglangAdapter) -> None:
    """F91: attach A, swap to B, back to A."""
    a, b = parked(3.0), parked(4.0)
    a.backend.batch_set(["x"], [page()])
    adapter.swap(a)
    old = adapter.swap(b)
    adapter.swap_back(old)
    assert adapter.usage()["put"].hit == 1
    assert adapter.close(b, 1.0) == []
    assert adapter.close(a, 1.0) == []
    assert adapter.usage()["put"].hit == 1  # it is still what runs, here: met again after its end
