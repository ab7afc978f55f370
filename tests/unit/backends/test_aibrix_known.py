"""AIBrix over RocksDB alone: what this process stored is not asked for, and nothing that is gone is believed in."""

from typing import Any

import pytest

from hicache_hooks.backends import known as known_keys
from hicache_hooks.backends.aibrix import AibrixStore
from hicache_hooks.backends.aibrix_options import BLOCK_TOKENS, AibrixOptions
from hicache_hooks.backends.base import Got, StoreContext
from hicache_hooks.backends.known import Known

PAGE = 8192


class Status:
    def __init__(self, value: Any = None) -> None:
        self.value = value

    def is_ok(self) -> bool:
        return self.value is not None

    def is_not_found(self) -> bool:
        return self.value is None

    def is_timeout(self) -> bool:
        return False

    is_cancelled = is_out_of_memory = is_denied = is_timeout

    def get(self) -> Any:
        return self.value


class Handle:
    """Blocks without tensors: nothing is copied."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def to_tensors(self) -> list[Any]:
        return []

    def release(self) -> None:
        pass


class Manager:
    """The vendor's, with keys alone; says how often it was asked."""

    def __init__(self) -> None:
        self.keys: set[str] = set()
        self.asked: list[list[str]] = []

    def _front(self, keys: list[str]) -> int:
        return next((i for i, key in enumerate(keys) if key not in self.keys), len(keys))

    def allocate_for(self, _: None, keys: list[str]) -> Status:
        return Status(Handle(len(keys)))

    def put(self, _: None, keys: list[str], handle: Handle) -> Status:
        self.keys.update(keys)
        return Status(len(keys) * BLOCK_TOKENS)

    def acquire(self, _: None, keys: list[str]) -> Status:
        front = self._front(keys)
        return Status((front * BLOCK_TOKENS, Handle(front)) if front else None)

    def exists(self, _: None, keys: list[str]) -> Status:
        self.asked.append(keys)
        return Status(self._front(keys) * BLOCK_TOKENS or None)

    def delete(self, _: None, keys: list[str]) -> Status:
        self.keys.difference_update(keys)
        return Status(0)


def opened(**options: Any) -> tuple[AibrixStore, Manager]:
    fields = {"l1_capacity_gb": 0.0, "l2_backend": "ROCKSDB", "l2_options": {"rocksdb_ttl_s": 0}, **options}
    store = AibrixStore(AibrixOptions(**fields), StoreContext(namespace="ns", page_bytes=PAGE, layout="page_first"))
    manager = Manager()
    store._manager, store._hashes = manager, lambda keys, tokens: keys
    store._state.opened()
    return store, manager


def pages(count: int) -> list[memoryview]:
    return [memoryview(bytearray(PAGE)) for _ in range(count)]


def test_what_this_process_stored_is_not_asked_for() -> None:
    store, manager = opened()
    manager.keys.add("c")  # of an earlier process
    assert store.batch_put(["a", "b"], pages(2)) == [True, True]
    assert store.batch_exists(["a", "b"]) == [True, True]
    assert manager.asked == []
    assert store.batch_exists(["a", "c", "d", "b"]) == [True, True, False, True]
    assert manager.asked == [["c", "d", "b"]]


def test_what_was_deleted_or_set_aside_is_not_believed_in() -> None:
    store, _ = opened()
    store.batch_put(["a", "b", "c"], pages(3))
    assert store.delete(["a"]) == 1
    store.set_aside("b", "checksum")
    assert store.batch_exists(["a", "b", "c"]) == [False, False, True]


def test_a_removal_that_crosses_a_put_leaves_no_belief() -> None:
    """The put has stored, somebody deletes, and only then the put tells; and a put amid a removal."""
    store, manager = opened()
    real_put, real_delete = manager.put, manager.delete

    def put_then_deleted(_: None, keys: list[str], handle: Handle) -> Status:
        status = real_put(None, keys, handle)
        store.set_aside("a", "checksum")
        return status

    manager.put = put_then_deleted  # type: ignore[method-assign]
    store.batch_put(["a", "b"], pages(2))
    manager.put = real_put  # type: ignore[method-assign]
    assert store.batch_exists(["a", "b"]) == [False, True]

    def delete_after_a_put(_: None, keys: list[str]) -> Status:
        store.batch_put(["c"], pages(1))
        return real_delete(None, keys)

    manager.delete = delete_after_a_put  # type: ignore[method-assign]
    store.set_aside("c", "checksum")
    assert store.batch_exists(["b", "c"]) == [True, False]


def test_a_page_that_is_gone_all_the_same_is_a_miss_and_forgotten() -> None:
    """Somebody emptied the directory."""
    store, manager = opened()
    store.batch_put(["a", "b", "c"], pages(3))
    manager.keys.discard("b")
    assert store.batch_get(["a", "b", "c"], pages(3)) == [Got.HIT, Got.MISS, Got.HIT]
    assert store.batch_exists(["a", "b", "c"]) == [True, False, True]


class Refused(Status):
    """A put that failed."""

    def __init__(self, said: str, *, memory: bool = False) -> None:
        self.value = Exception(said)
        self._memory = memory

    def is_ok(self) -> bool:
        return False

    def is_out_of_memory(self) -> bool:
        return self._memory


@pytest.mark.parametrize(
    ("status", "answer"),
    [
        (Refused("IO error: While appending to file: x: Input/output error"), None),
        (Refused("IO error: No space left on device: While appending to file: x"), False),
        (Refused("", memory=True), False),
    ],
)
def test_a_put_that_failed_is_an_error_and_a_full_disk_is_none(status: Status, answer: bool | None) -> None:
    """F69, F62: else a database that cannot be written looks like a store that is full, and no breaker opens."""
    store, manager = opened()
    real = manager.put
    manager.put = lambda *args: status if "b" in args[1] else real(*args)  # type: ignore[method-assign]
    assert store.batch_put(["b", "c"], pages(2)) == [answer, answer]
    assert store.batch_exists(["b", "c"]) == [False, False]
    manager.put = real  # type: ignore[method-assign]
    assert store.batch_put(["b", "c"], pages(2)) == [True, True]


@pytest.mark.parametrize(
    "options",
    [{"l2_options": {"rocksdb_ttl_s": 60}}, {"l2_options": {}}, {"l1_capacity_gb": 1.0}, {"l2_backend": "SHFS"}],
)
def test_where_pages_go_by_themselves_or_others_write_the_store_is_asked(options: dict[str, Any]) -> None:
    store, manager = opened(**options)
    store.batch_put(["a"], pages(1))
    assert store.batch_exists(["a"]) == [True]
    assert manager.asked == [["a"]]


def test_forgetting_many_keys_leaves_the_interpreter_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler shares it; a store that fails forgets all it knew."""
    known = Known(enabled=True)
    known.add(map(str, range(2 * known_keys.SLICE + 1)), known.now)
    left: list[list[bool]] = []
    monkeypatch.setattr(known_keys.time, "sleep", lambda s: left.append(known.has(["0", "1000"])))
    known.clear()
    assert left == [[False, False]] * 3, "none is believed in from the first moment on"


def test_the_keys_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """F43."""
    monkeypatch.setattr(known_keys, "MAX_KEYS", 2)
    known = Known(enabled=True)
    known.add(["a", "b", "a", "c"], known.now)
    assert [known.prefix([key]) for key in "abc"] == [1, 0, 1]
