"""The guard around SGLang's storage objects, without SGLang: counters, breaker, bypass, deadline, close."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hicache_hooks.breaker import BreakerSettings
from hicache_hooks.sglang.guard_core import GuardCore, GuardSettings
from hicache_hooks.sglang.pool_memory import PoolMemory
from hicache_hooks.sglang.storage_guard import StorageGuard

WAIT_S = 10.0


class Pool:
    """A host pool with its pages in one tensor."""

    def __init__(self) -> None:
        self.kv_buffer = torch.zeros(64)
        self.page_size = 4


class Store:
    """A scriptable store with SGLang's methods: pages in a dict, trouble on request."""

    def __init__(self) -> None:
        self.pages: dict[str, torch.Tensor] = {}
        self.log: list[str] = []
        self.trouble: BaseException | None = None
        self.gate = threading.Event()  # a call waits here while ``hang``
        self.hang = False
        self.entered = threading.Event()
        self.answer: Any = None

    def _enter(self, name: str) -> None:
        self.log.append(name)
        self.entered.set()
        if self.hang:
            self.gate.wait(WAIT_S)
        if self.trouble is not None:
            raise self.trouble

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> Any:
        self._enter("batch_exists")
        if self.answer is not None:
            return self.answer
        count = 0
        for key in keys:
            if key not in self.pages:
                break
            count += 1
        return count

    def exists(self, key: str) -> bool:
        self._enter("exists")
        return key in self.pages

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> Any:
        self._enter("batch_get")
        return self.answer if self.answer is not None else [self.pages.get(key) for key in keys]

    def batch_set(self, keys: list[str], values: Any = None, locations: Any = None, sizes: Any = None) -> Any:
        self._enter("batch_set")
        self.pages.update(zip(keys, values, strict=True))
        return True

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> Any:
        self._enter("batch_get_v1")
        return self.answer

    def register_mem_pool_host(self, pool: Any) -> None:
        self.log.append("register")

    def register_mem_host_pool_v2(self, pool: Any, name: str) -> None:
        self.log.append(f"register_{name}")

    def on_host_pools_registered(self) -> None:
        self.log.append("registered")

    def get_stats(self) -> Any:
        self._enter("get_stats")
        return "stats"

    def close(self) -> None:
        self.log.append("close")

    def own_method(self) -> str:
        return "own"


class Clock:
    """Seconds that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


_made: list[StorageGuard] = []


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    """Guards of a test are closed at its end."""
    yield
    while _made:
        _made.pop().close()


def call_threads(guard: StorageGuard) -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(f"hicache-call-{id(guard)}-")]


def guarded(store: Store, clock: Clock | None = None, **settings: Any) -> StorageGuard:
    guard: Any = StorageGuard()
    _made.append(guard)
    guard._inner, guard._pools, guard._empty_result = store, PoolMemory(), lambda: "empty"
    guard._core = GuardCore(str(id(guard)), GuardSettings(**settings), clock or Clock(), store.close)
    guard.register_mem_pool_host(Pool())
    result: StorageGuard = guard
    return result


@pytest.fixture
def store() -> Iterator[Store]:
    made = Store()
    yield made
    made.gate.set()


def page() -> torch.Tensor:
    return torch.ones(4)


def background(work: Any) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
    thread.start()
    return thread, results


def until(condition: Any) -> None:
    """Polls: what it waits for ends on a thread that nothing here can join."""
    deadline = threading.Event()
    for _ in range(int(WAIT_S / 0.005)):
        if condition():
            return
        deadline.wait(0.005)
    raise AssertionError("the condition did not come true")


def test_counts_hits_misses_and_errors_apart(store: Store) -> None:
    """F91: 3 misses, 2 errors, 1 timeout: exactly these numbers."""
    guard = guarded(store)
    assert guard.batch_set(["a", "b"], [page(), page()])
    got = guard.batch_get(["a", "x", "y", "z"], [page() for _ in range(4)])
    assert [item is not None for item in got] == [True, False, False, False]
    store.trouble = ValueError("secret")
    assert guard.batch_get(["a", "b"], [page(), page()]) == [None, None]
    store.trouble = TimeoutError()
    assert guard.batch_get(["a"], [page()]) == [None]
    usage = guard.usage()
    assert (usage["get"].hit, usage["get"].miss, usage["get"].error, usage["get"].timeout) == (1, 3, 2, 1)
    assert (usage["put"].hit, usage["put"].bytes, usage["get"].bytes) == (2, 32, 16)
    assert usage["get"].latency.count == 3
    assert "secret" not in guard._core.last_error


@pytest.mark.parametrize("answer", [7, [True], "text", [None, None, None]])
def test_a_wrong_shape_is_an_error_and_a_miss(store: Store, answer: Any) -> None:
    """F38, F80: no answer of a store raises into the engine's thread."""
    guard = guarded(store)
    store.answer = answer
    assert guard.batch_get(["a", "b"], [page(), page()]) == [None, None]
    assert guard.batch_get_v1(["a", "b"], None) == [False, False]
    assert guard.usage()["get"].error == 4


def test_a_count_beyond_the_question_is_no_hit(store: Store) -> None:
    guard = guarded(store)
    store.answer = 3
    assert guard.batch_exists(["a", "b"]) == 0
    assert guard.usage()["exists"].error == 2


@pytest.mark.parametrize("trouble", [SystemExit(1), KeyboardInterrupt(), MemoryError(), OSError(28, "full")])
def test_any_exception_is_a_miss(store: Store, trouble: BaseException) -> None:
    """F38: SystemExit of a native client must not end the engine's thread either."""
    guard = guarded(store)
    store.trouble = trouble
    assert guard.batch_get(["a"], [page()]) == [None]
    assert guard.batch_set(["a"], [page()]) is False
    assert guard.batch_exists(["a"]) == 0
    assert guard.batch_get_v1(["a"], None) == [False]


def test_bypass_skips_and_answers_false(store: Store) -> None:
    """F77: reads miss, writes are skipped and not said to be stored; the store is not called."""
    guard = guarded(store)
    assert guard.set_bypass(True) is False
    store.log.clear()
    assert guard.batch_exists(["a", "b"]) == 0
    assert guard.batch_get(["a"], [page()]) == [None]
    assert guard.batch_set(["a"], [page()]) is False
    assert guard.get_stats() is None
    assert store.log == []
    usage = guard.usage()
    assert (usage["exists"].skipped, usage["get"].skipped, usage["put"].skipped) == (2, 1, 1)
    assert guard.set_bypass(False) is True
    assert guard.batch_set(["a"], [page()]) is True


def test_bypass_lets_a_hanging_copy_call_go_at_once(store: Store) -> None:
    """F77: BK hangs: bypass frees the engine's thread, which then is in no call, so that a COMMIT may run."""
    guard = guarded(store, deadline_s=600.0)
    store.hang = True
    thread, results = background(lambda: guard.batch_get(["a", "b"], [page(), page()]))
    assert store.entered.wait(WAIT_S)
    assert guard.in_flight() == 1
    guard.set_bypass(True)
    thread.join(WAIT_S)
    assert results == [[None, None]]
    assert guard.in_flight() == 0
    assert guard.guard_report().late == 1
    store.gate.set()
    until(lambda: guard.guard_report().late == 0)


def test_a_zero_copy_call_is_never_given_up(store: Store) -> None:
    """An abandoned zero-copy call could write into pages that were given to another request: it stays in flight."""
    clock = Clock()
    guard = guarded(store, clock, deadline_s=0.01)
    store.hang = True
    store.answer = [True]
    thread, results = background(lambda: guard.batch_get_v1(["a"], None))
    assert store.entered.wait(WAIT_S)
    guard.set_bypass(True)
    guard.set_bypass(False)
    thread.join(0.05)
    assert thread.is_alive()
    assert guard.in_flight() == 1
    clock.now += 1.0
    assert guard.guard_report().stuck == [thread.name]  # the breaker has heard of it
    assert guard.batch_exists(["a"]) == 0
    assert guard.usage()["exists"].skipped == 1
    store.gate.set()
    thread.join(WAIT_S)
    assert results == [[True]]
    assert guard.in_flight() == 0


def test_pages_of_the_pool_have_no_deadline(store: Store) -> None:
    """A layout whose pages are views of the pool (MLA page_first) is zero-copy, whatever the method is called."""
    guard = guarded(store, deadline_s=0.01)
    pool = Pool()
    guard.register_mem_host_pool_v2(pool, "kv")
    store.hang = True
    thread, _ = background(lambda: guard.batch_set(["a"], [pool.kv_buffer[4:8]]))
    assert store.entered.wait(WAIT_S)
    thread.join(0.1)
    assert thread.is_alive()
    store.gate.set()
    thread.join(WAIT_S)


def test_a_hung_store_costs_one_deadline(store: Store) -> None:
    """A failing store costs one timeout, not one per request; a probe closes the breaker again."""
    clock = Clock()
    guard = guarded(store, clock, deadline_s=0.05, breaker=BreakerSettings(hold_s=2.0, jitter=0.0, probes_to_close=1))
    store.hang = True
    assert guard.batch_get(["a"], [page()]) == [None]
    assert guard.guard_report().breaker == "open"
    assert guard.guard_report().sides["write"].state == "closed"  # F62
    store.log.clear()
    for _ in range(50):
        assert guard.batch_get(["a"], [page()]) == [None]
    assert store.log == []
    store.hang = False
    store.gate.set()
    clock.now += 3.0
    assert guard.batch_exists(["a"]) == 0  # the probe
    assert store.log == ["batch_exists"]
    assert guard.guard_report().breaker == "closed"


def test_threads_inside_the_store_are_bounded(store: Store) -> None:
    """F46: 50 calls into a store that blocks for ever: a handful of threads, later calls are refused at once."""
    guard = guarded(store, deadline_s=0.01, breaker=BreakerSettings(min_calls=1000, slow_ratio=1.0))
    store.hang = True
    guard._core._breakers["read"]._last_success = float("inf")  # a breaker that never sees a hung store
    for _ in range(50):
        assert guard.batch_exists(["a"]) == 0
    assert 1 <= len(call_threads(guard)) <= 5
    assert guard.usage()["exists"].timeout == 50
    store.gate.set()
    until(lambda: guard.guard_report().late == 0)
    assert guard.usage()["exists"].hit == 0  # F81: late answers are not used


def test_closes_once_and_after_the_last_call(store: Store) -> None:
    """F27: never while a call is inside, an abandoned one included; calls after it are skipped."""
    guard = guarded(store, deadline_s=600.0)
    store.hang = True
    thread, results = background(lambda: guard.batch_get(["a"], [page()]))
    assert store.entered.wait(WAIT_S)
    guard.close()
    thread.join(WAIT_S)
    assert results == [[None]]
    assert "close" not in store.log
    assert not guard.closed
    store.gate.set()
    until(lambda: guard.closed)
    guard.close()
    assert store.log.count("close") == 1
    assert guard.batch_exists(["a"]) == 0
    until(lambda: not call_threads(guard))


def test_pools_are_registered_once(store: Store) -> None:
    """The engine registers again at every attach; a store that pins memory sees it once."""
    guard = guarded(store)
    pool = Pool()
    for _ in range(2):
        guard.register_mem_pool_host(pool)
        guard.register_mem_host_pool_v2(pool, "kv")
        guard.on_host_pools_registered()
    guard.register_mem_host_pool_v2(pool, "draft")  # a pool that came later
    assert store.log == ["register", "register", "register_kv", "registered", "register_draft"]


def test_what_is_not_in_the_base_class_is_the_stores_own(store: Store) -> None:
    guard: Any = guarded(store)
    assert guard.own_method() == "own"
    assert not hasattr(guard, "describe_l3_object_layout")
    store.trouble = RuntimeError()
    assert guard.get_stats() is None


@pytest.mark.parametrize(
    ("make", "own"),
    [
        (lambda pool: [torch.zeros(4)], True),
        (lambda pool: [pool.kv_buffer[:4].clone()], True),
        (lambda pool: [torch.zeros(4), pool.kv_buffer[60:]], False),
        (lambda pool: [pool.kv_buffer], False),
        (lambda pool: [object()], False),
    ],
)
def test_pool_memory(make: Any, own: bool) -> None:
    memory, pool = PoolMemory(), Pool()
    assert not memory.strangers([torch.zeros(4)])  # nothing registered: nothing is known
    memory.add("", pool)
    assert memory.strangers(make(pool)) is own
    memory.add("empty", object())  # a pool whose memory is not found
    assert not memory.strangers(make(pool))


def test_statistics_are_not_asked_for_in_trouble(store: Store) -> None:
    """The scheduler thread asks, with every batch: a lock that a lost call holds must not stop serving."""
    clock = Clock()
    guard = guarded(store, clock, deadline_s=0.02)
    assert guard.get_stats() == "stats"
    store.hang = True
    assert guard.batch_get(["a"], [page()]) == [None]
    store.hang = False
    assert guard.in_flight() == 0
    assert guard.get_stats() is None
    guard.set_bypass(True)
    guard.set_bypass(False)  # closes the breaker; the lost call is still inside
    assert guard.guard_report().breaker == "closed"
    assert guard.get_stats() is None
    store.gate.set()
    until(lambda: guard.guard_report().late == 0)
    assert guard.get_stats() == "stats"
    guard._core._breakers["write"].trip("errors")
    assert guard.get_stats() is None
