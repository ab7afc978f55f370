"""F80, F81: one bad page, or a failure behind the first pages, costs no page that was read."""

import errno
import mmap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.backends import hf3fs_rig

from hicache_hooks.backends import aibrix
from hicache_hooks.backends.aibrix import BATCH, AibrixStore
from hicache_hooks.backends.aibrix_options import BLOCK_TOKENS, AibrixOptions
from hicache_hooks.backends.base import Got, StoreContext
from hicache_hooks.backends.mooncake import MooncakeStore
from hicache_hooks.backends.mooncake_client import RPC_FAILED
from hicache_hooks.backends.mooncake_options import MooncakeOptions
from hicache_hooks.backends.nixl_object import NixlObjects
from hicache_hooks.backends.nixl_options import NixlOptions
from hicache_hooks.backends.redis import RedisOptions, RedisStore
from hicache_hooks.backends.upkeep import Upkeep, part_or_raise

PAGE = 8192
CONTEXT = StoreContext(namespace="ns", page_bytes=PAGE, layout="page_first")


def pages(count: int) -> list[memoryview]:
    memory = memoryview(mmap.mmap(-1, count * PAGE))
    return [memory[i * PAGE : (i + 1) * PAGE] for i in range(count)]


def test_a_failure_is_said_once_until_it_is_over(caplog: pytest.LogCaptureFixture) -> None:
    tidy = Upkeep("x")

    def fail() -> None:
        raise RuntimeError("s3cret")

    for work in (fail, fail, lambda: None, fail):
        tidy(work)
    assert tidy.failed == 3
    assert [record.getMessage() for record in caplog.records] == [
        "x: a bad page could not be removed (RuntimeError)"
    ] * 2


def test_a_failure_of_everything_is_raised() -> None:
    """F69: the guard must see that the store failed, not a page."""
    failed = ConnectionError()
    assert part_or_raise([Got.MISS, Got.HIT], 4, failed) == [Got.MISS, Got.HIT, Got.ERROR, Got.ERROR]
    for got in ([], [Got.MISS], [Got.ERROR]):
        with pytest.raises(ConnectionError):
            part_or_raise(got, 4, failed)


@pytest.mark.parametrize("code", [RPC_FAILED, -1])
def test_mooncake_keeps_what_it_read_beside_a_page_of_another_length(code: int) -> None:
    removed: list[list[str]] = []

    def batch_remove(names: list[str]) -> list[int]:
        removed.append(names)
        return [code] * len(names)

    store = MooncakeStore(MooncakeOptions(master_server_address="127.0.0.1:1").effective({}), CONTEXT)
    store._client = SimpleNamespace(
        register_buffer=lambda start, nbytes: 0,
        batch_get_into=lambda names, addresses, sizes: [PAGE, 10, PAGE],
        batch_remove=batch_remove,
    )
    store._state.opened()
    mine = pages(3)
    for page in mine:
        store.register(page)
    assert store.batch_get(["ns.a", "ns.b", "ns.c"], mine) == [Got.HIT, Got.MISS, Got.HIT]
    assert [len(names) for names in removed] == [1]


class Redis:
    """As much of redis-py as a read needs. ``asleep_after``: answers before it falls silent."""

    def __init__(self, values: dict[str, bytes], asleep_after: int) -> None:
        self.values, self.left = values, asleep_after
        self.connection_pool = SimpleNamespace(disconnect=lambda inuse_connections=True: None)
        self.unlinks = 0

    def mget(self, names: list[str]) -> list[bytes | None]:
        if self.left <= 0:
            raise TimeoutError
        self.left -= 1
        return [self.values.get(name.rpartition(".")[2]) for name in names]

    def unlink(self, *names: str) -> int:
        self.unlinks += 1
        raise TimeoutError


def redis_store(client: Redis) -> RedisStore:
    store = RedisStore(RedisOptions(url="redis://h").effective({}), CONTEXT, {})
    never = type("Never", (Exception,), {})
    store._client = client
    store._redis = SimpleNamespace(
        exceptions=SimpleNamespace(
            TimeoutError=TimeoutError, AuthenticationError=never, ConnectionError=never, RedisError=never
        )
    )
    return store


def test_redis_keeps_what_it_read_and_asks_once_for_all_bad_pages() -> None:
    """A server that hangs between both costs one time-out, not one per bad page."""
    client = Redis({"a": bytes(PAGE), "b": b"short", "c": b"short", "d": bytes(PAGE)}, 1)
    store = redis_store(client)
    assert store.batch_get([f"ns.{k}" for k in "abcde"], pages(5)) == ["hit", "miss", "miss", "hit", "miss"]
    assert client.unlinks == 1


def test_redis_keeps_the_pages_before_the_time_out() -> None:
    client = Redis({k: bytes(PAGE) for k in "abcd"}, 1)
    store = redis_store(client)
    store._step = 2
    assert store.batch_get([f"ns.{k}" for k in "abcd"], pages(4)) == ["hit", "hit", "error", "error"]
    with pytest.raises(TimeoutError):
        store.batch_get(["ns.a"], pages(1))


class Status:
    """The vendor's."""

    def __init__(self, value: Any = None, error: str = "") -> None:
        self.value, self.error = value, error
        self.error_code = SimpleNamespace(name=error)

    def is_ok(self) -> bool:
        return not self.error

    def is_not_found(self) -> bool:
        return self.error == "NOT_FOUND"

    def is_timeout(self) -> bool:
        return self.error == "TIMEOUT"

    def is_cancelled(self) -> bool:
        return False

    def is_out_of_memory(self) -> bool:
        return False

    def get(self) -> Any:
        return self.value


class Manager:
    """The vendor's, with pages that ``exists`` finds and ``acquire`` cannot give, or raises for."""

    def __init__(self, bad: set[str], raising: set[str], answers: int = 99) -> None:
        self._bad, self._raising, self._left = bad, raising, answers
        self.asked = 0

    def exists(self, _: None, keys: list[str]) -> Status:
        self.asked += 1
        self._left -= 1
        return Status(len(keys) * BLOCK_TOKENS) if self._left >= 0 else Status(error="TIMEOUT")

    def acquire(self, _: None, keys: list[str]) -> Status:
        self._left -= 1
        if self._left < 0:
            return Status(error="TIMEOUT")
        if len(keys) == 1 and self._raising.intersection(keys):
            raise AttributeError("the vendor's own")
        if self._bad.intersection(keys):
            return Status(error="NOT_FOUND")
        tensors = [Tensor(memoryview(b"1" * PAGE)) for _ in keys]
        return Status((len(keys) * BLOCK_TOKENS, Handle(tensors)))

    def delete(self, _: None, keys: list[str]) -> Status:
        return Status(error="DENIED")


class Tensor:
    """As much of one of torch's as a copy needs."""

    def __init__(self, page: memoryview) -> None:
        self.page = page

    def view(self, _: int) -> "Tensor":
        return self

    def copy_(self, other: "Tensor") -> None:
        self.page[:] = other.page


class Handle:
    def __init__(self, tensors: list[Any]) -> None:
        self._tensors = tensors

    def __len__(self) -> int:
        return len(self._tensors)

    def to_tensors(self) -> list[Any]:
        return self._tensors

    def release(self) -> None:
        pass


def aibrix_store(manager: Manager, l2_backend: str = "ROCKSDB") -> AibrixStore:
    store = AibrixStore(AibrixOptions(l1_capacity_gb=1.0, l2_backend=l2_backend), CONTEXT)
    store._manager = manager
    store._hashes = lambda keys, tokens: keys
    store._state.opened()
    return store


@pytest.mark.parametrize("connector", ["ROCKSDB", "SHFS"])
def test_aibrix_keeps_what_it_read_beside_a_page_that_cannot_be_removed(
    monkeypatch: pytest.MonkeyPatch, connector: str
) -> None:
    monkeypatch.setattr(aibrix, "_tensor", Tensor)
    store = aibrix_store(Manager({"ns.b"}, set()), connector)
    assert store.batch_get(["ns.a", "ns.b", "ns.c"], pages(3)) == [Got.HIT, Got.MISS, Got.HIT]
    store = aibrix_store(Manager({"ns.b"}, {"ns.c"}), connector)
    assert store.batch_get(["ns.a", "ns.b", "ns.c"], pages(3)) == [Got.HIT, Got.MISS, Got.ERROR]


@pytest.mark.parametrize(("connector", "answers"), [("ROCKSDB", 1), ("SHFS", 2)])
def test_aibrix_keeps_the_pages_before_a_time_out(
    monkeypatch: pytest.MonkeyPatch, connector: str, answers: int
) -> None:
    """With SHFS each batch is asked for first. A time-out is not tried again page by page: that would take as many."""
    monkeypatch.setattr(aibrix, "_tensor", Tensor)
    store = aibrix_store(Manager(set(), set(), answers), connector)
    keys = [f"ns.{i}" for i in range(BATCH + 2)]
    assert store.batch_get(keys, pages(len(keys))) == [Got.HIT] * BATCH + [Got.ERROR] * 2
    with pytest.raises(TimeoutError):
        store.batch_get(keys, pages(len(keys)))


@pytest.mark.parametrize(("connector", "asked"), [("", 0), ("ROCKSDB", 0), ("MOCK", 0), ("SHFS", 1), ("PRISKV", 1)])
def test_aibrix_asks_before_a_read_only_where_a_read_may_have_holes(
    monkeypatch: pytest.MonkeyPatch, connector: str, asked: int
) -> None:
    monkeypatch.setattr(aibrix, "_tensor", Tensor)
    manager = Manager(set(), set())
    assert aibrix_store(manager, connector).batch_get(["ns.a", "ns.b"], pages(2)) == [Got.HIT, Got.HIT]
    assert manager.asked == asked


def test_hf3fs_keeps_what_it_read_when_the_index_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slot whose entry stays in the file is not given out again (index, rule 1)."""
    hf3fs_rig.emulated_io(monkeypatch)
    with hf3fs_rig.mounted(tmp_path) as mount:
        store = mount.store(slots=4)
        hf3fs_rig.put(store, 1, 2, 3)

        def refuse(slot: int) -> None:
            raise OSError(errno.EIO, "planted")

        with monkeypatch.context() as patch:
            patch.setattr(store._index, "drop", refuse)
            mount.faults(short=100, every=3)
            assert sorted(hf3fs_rig.get(store, 1, 2, 3)) == ["hit", "hit", "miss"]
            mount.faults()
            with pytest.raises(OSError, match="planted"):
                store.delete([hf3fs_rig.key(n) for n in (1, 2, 3)])
        assert store.health()["pages"] == 0
        assert hf3fs_rig.put(store, 4, 5) == [True, False], "one slot of four is free"


def test_hf3fs_keeps_the_pages_before_a_request_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hf3fs_rig.emulated_io(monkeypatch)
    with hf3fs_rig.mounted(tmp_path) as mount:
        store = mount.store(entries=1, client_timeout=0.1)
        hf3fs_rig.put(store, 1, 2, 3)
        assert _second_hangs(store, mount) == ["hit", "error", "error"]


def _second_hangs(store: Any, mount: hf3fs_rig.Mount) -> list[str]:
    """A read whose second request hangs."""
    lane = store._clients.take(read=True, timeout_s=1)
    real, calls = lane.run, []

    def run(*args: Any) -> list[bool]:
        calls.append(1)
        if len(calls) == 2:
            mount.faults(hang=True)
        return real(*args)  # type: ignore[no-any-return]

    lane.run = run
    store._clients.give(lane, read=True)
    return hf3fs_rig.get(store, 1, 2, 3)


def test_nixl_on_objects_keeps_what_it_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed page whose length cannot be asked for, or a second part that fails."""
    options = NixlOptions(bucket="b", endpoint_override="http://h:1").effective({})
    store = NixlObjects(options, CONTEXT, SimpleNamespace(), {})  # type: ignore[arg-type]
    server = SimpleNamespace(lengths=lambda names: (_ for _ in ()).throw(OSError("planted")))
    monkeypatch.setattr(store, "_require_server", lambda: None)
    monkeypatch.setattr(store, "_s3", lambda: server)

    def run(op: str, keys: list[str], slots: Any) -> list[bool]:
        if "ns.late" in keys:
            raise TimeoutError
        for page in slots.pages:
            page[:] = bytes(PAGE)
        return [key != "ns.b" for key in keys]

    monkeypatch.setattr(store, "_run", run)
    assert store.get(["ns.a", "ns.b"], pages(2)) == [Got.HIT, Got.ERROR]
    with pytest.raises(OSError, match="planted"):
        store.get(["ns.b"], pages(1))
    monkeypatch.setattr(store, "_parts", lambda n: [slice(i, i + 1) for i in range(n)])
    assert store.get(["ns.a", "ns.late", "ns.c"], pages(3)) == [Got.HIT, Got.ERROR, Got.ERROR]
