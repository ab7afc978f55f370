"""PREPARE's canary on the zero-copy contract, and what becomes of the host page that it borrows."""

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.unit.sglang.test_storage_guard import Clock

from hicache_hooks.sglang.canary import run_canary
from hicache_hooks.sglang.guard_core import GuardCore, GuardSettings
from hicache_hooks.sglang.pool_memory import PoolMemory
from hicache_hooks.sglang.storage_guard import StorageGuard
from hicache_proto.errors import PrepareFailed

TOKENS = 4


class Pool:
    """Host pool and its group: pages by the index of their first token."""

    def __init__(self) -> None:
        self.kv_buffer = torch.zeros(8 * TOKENS)
        self.size = len(self.kv_buffer)
        self.lent: list[int] = []

    def available_size(self) -> int:
        return self.size - TOKENS * len(self.lent)

    def alloc(self, tokens: int) -> Any:
        self.lent.append(0)
        return torch.arange(tokens)

    def free(self, indices: Any) -> None:
        self.lent.remove(int(indices[0]))

    def get_dummy_flat_data_page(self) -> Any:
        return torch.zeros(TOKENS)

    def set_from_flat_data_page(self, index: int, page: Any) -> None:
        self.kv_buffer[index : index + TOKENS] = page

    def get_data_page(self, index: int) -> Any:
        return self.kv_buffer[index : index + TOKENS]


class Silent:
    """A store of the copy path that answers no lookup until it may."""

    def __init__(self) -> None:
        self.may, self.closed = threading.Event(), threading.Event()

    def batch_exists(self, keys: list[str]) -> int:
        self.may.wait(30)
        return 0

    def close(self) -> None:
        self.closed.set()


def test_a_silent_store_costs_one_deadline_and_is_closed_when_it_lets_go() -> None:
    """F46, F27."""
    store = Silent()
    guard: Any = StorageGuard()
    guard._inner, guard._pools, guard._empty_result = store, PoolMemory(), lambda: "empty"
    guard._core = GuardCore("silent", GuardSettings(deadline_s=0.05), time.monotonic, store.close)
    config = SimpleNamespace(is_storage_writer=True, tp_rank=0, extra_config=None)
    with pytest.raises(PrepareFailed) as caught:
        run_canary(guard, Controller(Pool()), config, "file", "0" * 32)
    assert caught.value.details["reason"] == "canary_late"
    guard.close()
    assert not store.closed.is_set()
    store.may.set()
    assert store.closed.wait(10)


class Store:
    """A zero-copy store without a close, as some of the engine's."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.pages: dict[str, Any] = {}
        self.raises = ""
        self.full = False

    def batch_exists(self, keys: list[str]) -> int:
        return sum(key in self.pages for key in keys)

    def batch_set_v1(self, keys: list[str], indices: Any) -> list[bool]:
        if self.raises == "set":
            raise RuntimeError("lost")
        if not self.full:
            self.pages[keys[0]] = self.pool.get_data_page(int(indices[0])).clone()
        return [not self.full]

    def batch_get_v1(self, keys: list[str], indices: Any) -> list[bool]:
        if self.raises == "get":
            raise RuntimeError("lost")
        self.pool.set_from_flat_data_page(int(indices[0]), self.pages[keys[0]])
        return [True]


class Closing(Store):
    """One with a close."""

    closed = False
    broken = False

    def close(self) -> None:
        assert self.pool.lent, "the page was given back before the store was closed"
        self.closed = True
        if self.broken:
            raise RuntimeError("not closed")


class Controller:
    """The cache controller."""

    page_size = TOKENS

    def __init__(self, pool: Pool) -> None:
        self.mem_pool_host = self.storage_host_pool = pool


class Config:
    """The engine's storage config."""

    is_storage_writer = True
    tp_rank = 0
    extra_config: dict[str, Any] = {}  # noqa: RUF012


_guards: list[StorageGuard] = []


@pytest.fixture(autouse=True)
def closed_again() -> Iterator[None]:
    yield
    _guards.clear()


def canary(store: Store, tp_rank: int = 0) -> None:
    guard: Any = StorageGuard()
    guard._inner, guard._pools = store, PoolMemory()
    guard._core = GuardCore("nixl", GuardSettings(), Clock(), getattr(store, "close", lambda: None))
    _guards.append(guard)
    config = Config()
    config.tp_rank = tp_rank
    run_canary(guard, Controller(store.pool), config, "nixl", "0" * 32)


def test_a_good_store_gives_the_page_back() -> None:
    store = Store(Pool())
    canary(store)
    assert store.pool.lent == []
    assert len(store.pages) == 1


def test_an_answer_ends_the_transfer() -> None:
    store = Store(Pool())
    store.full = True
    with pytest.raises(PrepareFailed):
        canary(store)
    assert store.pool.lent == []


@pytest.mark.parametrize("where", ["set", "get"])
def test_a_store_that_may_still_use_the_page_is_closed_first(where: str) -> None:
    """F27: memory that a store still knows must not be given to a request."""
    store = Closing(Pool())
    store.raises = where
    with pytest.raises(PrepareFailed):
        canary(store)
    assert store.closed
    assert store.pool.lent == []


@pytest.mark.parametrize("kind", [Store, Closing])
@pytest.mark.parametrize("where", ["set", "get"])
def test_a_store_that_cannot_be_closed_keeps_the_page(
    where: str, kind: type[Store], caplog: pytest.LogCaptureFixture
) -> None:
    """F27: a page lost is better than a page shared; it is said."""
    store = kind(Pool())
    store.raises = where
    if isinstance(store, Closing):
        store.broken = True
    with pytest.raises(PrepareFailed):
        canary(store)
    assert len(store.pool.lent) == 1
    assert "stays reserved" in caplog.text


class Late(Store):
    """Its directory is made by rank 0, a moment later."""

    tries = 0

    def batch_set_v1(self, keys: list[str], indices: Any) -> list[bool]:
        self.tries += 1
        self.full = self.tries < 3
        return super().batch_set_v1(keys, indices)


def test_another_rank_waits_for_what_rank_0_makes() -> None:
    """Rank 0 alone is judged by its first write."""
    store = Late(Pool())
    canary(store, tp_rank=1)
    assert store.tries == 3
    assert store.pool.lent == []
    with pytest.raises(PrepareFailed, match="did not take"):
        canary(Late(Pool()))


def test_another_rank_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache_hooks.sglang.canary.RANK0_PATIENCE_S", 0.12)
    store = Store(Pool())
    store.full = True
    with pytest.raises(PrepareFailed, match="did not take"):
        canary(store, tp_rank=1)
    assert store.pool.lent == []
