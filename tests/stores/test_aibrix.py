"""What is special about AIBrix KVCache, with the real package: holes, RocksDB's one owner, settings, failed puts."""

import importlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tests.rigs.stores.aibrix import AibrixBothStand, AibrixRocksdbStand, AibrixShfsStand, AibrixStand
from tests.rigs.stores.host import CallFailed, Host

from hicache_hooks.backends.aibrix import RESET_EVERY, AibrixStore
from hicache_hooks.backends.aibrix_direct import direct_reads
from hicache_hooks.backends.aibrix_options import BLOCK_TOKENS, AibrixOptions
from hicache_hooks.backends.base import Got, StoreContext

MISSING = AibrixStand.missing()
pytestmark = [pytest.mark.stores, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]

PAGE = 65536
Made = Callable[..., AibrixStore]


def key(i: int) -> str:
    return f"ns.{i:064x}"


def page(i: int = 0) -> memoryview:
    return memoryview(bytearray(i.to_bytes(4, "little") * (PAGE // 4)))


@pytest.fixture
def made() -> Iterator[Made]:
    """Opened stores in this process, closed after the test."""
    opened: list[AibrixStore] = []

    def make(config: dict[str, Any]) -> AibrixStore:
        options = msgspec.convert(config, AibrixOptions).effective({})
        store = AibrixStore(options, StoreContext(namespace="ns", page_bytes=PAGE, layout="page_first"))
        opened.append(store)
        store.open()
        return store

    yield make
    for store in opened:
        store.close()


def shfs(root: Path) -> dict[str, Any]:
    return {"l1_capacity_gb": 0, "l2_backend": "SHFS", "l2_options": {"shfs_root": str(root)}}


def put(store: AibrixStore, *numbers: int) -> list[bool]:
    return store.batch_put([key(i) for i in numbers], [page(i) for i in numbers])


def get(store: AibrixStore, *numbers: int) -> list[Got]:
    """Results; a hit with other bytes fails."""
    pages = [page() for _ in numbers]
    got = store.batch_get([key(i) for i in numbers], pages)
    for i, result, found in zip(numbers, got, pages, strict=True):
        assert result is not Got.HIT or found == page(i), i
    return got


def memory_in_use(store: AibrixStore) -> int:
    """Bytes of the vendor's slabs that are handed out."""
    return len(store._manager._allocator)


def test_the_vendor_counts_around_a_hole_and_we_do_not(made: Made, tmp_path: Path) -> None:
    """SHFS: the vendor's own read of [a, missing, c] says two blocks, of which the second was never filled."""
    store = made(shfs(tmp_path))
    put(store, 1, 3)
    hashes = store._hashes([key(1), key(2), key(3)], 16)
    tokens, handle = store._manager.acquire(None, hashes).get()
    wrong = bytes(handle.to_tensors()[1].reshape(-1).numpy())
    handle.release()
    assert tokens == 32, "the vendor mended it: the second look at short batches may go"
    assert wrong != bytes(page(2))
    assert get(store, 1, 2, 3) == [Got.HIT, Got.MISS, Got.HIT]
    assert get(store, 2, 3, 1) == [Got.MISS, Got.HIT, Got.HIT]
    assert memory_in_use(store) == 0


def test_a_page_that_vanishes_after_exists_shifts_nothing(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody evicts between ``exists`` and ``get``: a batch that comes back short is read again page by page."""
    store = made(shfs(tmp_path))
    put(store, 1, 3, 4)
    with monkeypatch.context() as patch:
        patch.setattr(store, "_prefix", len)
        assert get(store, 1, 2, 3, 4) == [Got.HIT, Got.MISS, Got.HIT, Got.HIT]
    assert memory_in_use(store) == 0


def test_puts_that_fail_lose_no_memory_of_the_vendors(made: Made, tmp_path: Path) -> None:
    """Its error path for a batch raises AttributeError; the pages of the batch that were stored are known."""
    store = made(shfs(tmp_path))
    blocked = key(7)
    put(store, 1)
    (root,) = [found for found in tmp_path.iterdir() if found.is_dir()]
    path = root / blocked.encode().hex()[:2] / blocked.encode().hex()[2:4] / blocked.encode().hex()
    path.with_suffix(".tmp").mkdir(parents=True)  # where its temporary file would be
    for _ in range(20):
        assert put(store, 5, 7, 6) == [True, None, True], "an error, not a full store (F69)"
    assert memory_in_use(store) == 0
    assert get(store, 5, 7, 6) == [Got.HIT, Got.MISS, Got.HIT]


def test_two_stores_in_one_process_keep_apart(made: Made, tmp_path: Path) -> None:
    """A swap opens the second beside the first; the vendor knows one environment per process."""
    before = dict(os.environ)
    first, second = made(shfs(tmp_path / "a")), made(shfs(tmp_path / "b"))
    assert put(first, 1) == [True]
    assert put(second, 2) == [True]
    assert get(first, 1, 2) == [Got.HIT, Got.MISS]
    assert get(second, 1, 2) == [Got.MISS, Got.HIT]
    assert dict(os.environ) == before
    first.close()
    assert get(second, 2) == [Got.HIT]


def test_a_manager_that_cannot_be_made_leaves_nothing(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its event loop and its thread are up when a connector refuses."""
    made(shfs(tmp_path / "ok")).close()
    connector: Any = importlib.import_module("aibrix_kvcache.l2.connectors.shfs").SHFSConnector

    def refuse(self: object) -> None:
        raise ConnectionError("refused")

    threads, fds = threading.active_count(), len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(connector, "open", refuse)
        for _ in range(5):
            with pytest.raises(ConnectionError):
                made(shfs(tmp_path / "ok"))
    assert threading.active_count() <= threads
    assert len(os.listdir("/proc/self/fd")) <= fds


def test_a_path_that_is_no_directory_is_refused_at_open(made: Made, tmp_path: Path) -> None:
    """The vendor would take it and fail at every put."""
    (tmp_path / "file").write_text("")
    for config in (
        shfs(tmp_path / "file"),
        {"l1_capacity_gb": 0, "l2_backend": "ROCKSDB", "l2_options": {"rocksdb_root": str(tmp_path / "file")}},
    ):
        with pytest.raises(OSError, match="file"):
            made(config)


def test_rocksdb_keeps_its_pages_through_a_kill(tmp_path: Path) -> None:
    """Its log is read again; nobody closed it."""
    stand = AibrixRocksdbStand("rocksdb", tmp_path)
    with Host(stand) as host:
        host.open()
        assert host.put([1, 2, 3]) == [True] * 3
        host.process.kill()
    with Host(stand) as host:
        host.open()
        assert host.get([1, 2, 9, 3]) == ["hit", "hit", "miss", "hit"]
        host.close()


def test_two_ranks_have_a_rocksdb_each_below_one_path(tmp_path: Path) -> None:
    """One process may open a database. Replicas have the same namespace and are told the same path."""
    stand = AibrixRocksdbStand("rocksdb", tmp_path)
    with Host(stand) as one, Host(stand) as two:
        one.open()
        two.open()
        paths = {one.health()["path"], two.health()["path"]}
        assert {Path(path).name for path in paths} == {"slot-0", "slot-1"}
        assert one.put([1]) == two.put([2]) == [True]
        assert one.get([1, 2]) == ["hit", "miss"]
        assert two.get([1, 2]) == ["miss", "hit"]
        one.close()
        two.close()
        two.open()
        assert two.get([1, 2]) == ["hit", "miss"], "the first directory that is free, with what is in it"
        two.close()


def test_a_value_of_another_length_in_rocksdb_is_a_miss_and_is_written_anew(tmp_path: Path) -> None:
    """The vendor fails the whole batch for it; left alone, it would exist and never be read."""
    import rocksdict

    stand = AibrixRocksdbStand("rocksdb", tmp_path)
    with Host(stand) as host:
        host.open()
        host.put([1, 2, 3])
        host.close()
        (current,) = tmp_path.rglob("CURRENT")
        options = rocksdict.Options(raw_mode=True)
        options.set_wal_dir(str(current.parent / "wal"))
        access = rocksdict.AccessType.read_write().with_ttl(0)
        database = rocksdict.Rdict(str(current.parent), options, access_type=access)
        database[key(2).encode()] = bytes(PAGE // 2)
        database.close()
        host.open()
        assert host.exists([1, 2, 3]) == [True] * 3
        assert host.get([1, 2, 3]) == ["hit", "miss", "hit"]
        assert host.exists([1, 2, 3]) == [True, False, True]
        assert host.put([2]) == [True]
        assert host.get([1, 2, 3]) == ["hit"] * 3
        host.close()


def test_what_dram_evicts_is_still_in_rocksdb(tmp_path: Path) -> None:
    """8 MiB of DRAM, 16 MiB of pages: the vendor's defaults would lose half of them."""
    stand = AibrixBothStand("both", tmp_path)
    numbers = list(range(256))
    with Host(stand) as host:
        host.open()
        for start in range(0, 256, 64):
            assert host.put(numbers[start : start + 64]) == [True] * 64
        for start in range(0, 256, 64):
            assert host.get(numbers[start : start + 64]) == ["hit"] * 64
        assert host.health()["inner"] == "L1+ROCKSDB"
        host.close()


def test_a_device_that_means_pinned_memory_works_without_a_gpu(tmp_path: Path) -> None:
    """``cpu``, the vendor's default, is pinned memory to it, and a RuntimeError here."""

    class CpuStand(AibrixStand):
        def env(self) -> dict[str, str]:
            return {**super().env(), "AIBRIX_KV_CACHE_OL_DEVICE": "cpu"}

    with Host(CpuStand("l1", tmp_path)) as host:
        host.open()
        assert host.put([1]) == [True]
        host.close()


def test_token_validation_cannot_be_had_and_is_refused(tmp_path: Path) -> None:
    class StrictStand(AibrixStand):
        def env(self) -> dict[str, str]:
            return {**super().env(), "AIBRIX_KV_CACHE_OL_TOKEN_VALIDATION_ENABLED": "1"}

    with Host(StrictStand("l1", tmp_path)) as host, pytest.raises(CallFailed, match="TOKEN_VALIDATION") as caught:
        host.open()
    assert caught.value.kind == "BackendUnavailable"


def test_calls_keep_no_metrics(made: Made, tmp_path: Path) -> None:
    """F43: the vendor's metrics are lists that grow until somebody resets them."""
    store = made({"l1_capacity_gb": 0.03, "l2_backend": ""})
    put(store, 1)
    for _ in range(2 * RESET_EVERY):
        store.batch_exists([key(1)])
    kept = store._manager.metrics.l1.exists_metrics.num_tokens
    assert len(kept) <= RESET_EVERY


def test_namespaces_in_one_directory(made: Made, tmp_path: Path) -> None:
    """F68, with SHFS, which is one directory for all."""
    stand = AibrixShfsStand("shfs", tmp_path)
    with Host(stand) as host:
        host.open(namespace="ns2")
        host.put([1])
        store = made(stand.config())
        put(store, 1, 2)
        assert store.clear() == 2
        assert host.get([1]) == ["hit"]
        host.close()


def test_a_look_into_l1_says_what_the_vendor_says(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Holes, and pages that were evicted, of which the vendor's table keeps a ghost."""
    store = made({"l1_capacity_gb": 8 * PAGE / (1 << 30), "l2_backend": ""})
    there = [False] * 24
    for i in range(24):
        put(store, i)
        there = [vendor_has(store, n) for n in range(24)]
        assert store.batch_exists([key(n) for n in range(24)]) == there
    assert 0 < sum(there) <= 8, "eviction began"
    assert store._l1 is not None
    held = [key(n) for n in range(24) if there[n]]
    gone = next(key(n) for n in range(24) if not there[n])
    assert store._l1.prefix(held) == len(held)
    assert store._l1.prefix([held[0], gone, held[1]]) == 1
    # A version of the package that keeps it in another way is asked by its API, and says so when it must be listed.
    monkeypatch.setattr(store, "_l1", None)
    assert store.batch_exists([key(n) for n in range(24)]) == there
    with pytest.raises(RuntimeError, match="cannot be listed"):
        store.clear()


def vendor_has(store: AibrixStore, n: int) -> bool:
    """By its API."""
    return bool(store._manager.exists(None, store._hashes([key(n)], 16)).is_ok())


@pytest.mark.parametrize(("ttl_s", "added"), [(0, 0), (600, 4)])
def test_without_a_time_to_live_the_database_is_a_plain_one(tmp_path: Path, ttl_s: int, added: int) -> None:
    """The wrapper with one writes a time behind each value, and keeps memory each time it is opened."""
    import rocksdict

    config = {
        "l1_capacity_gb": 0, "l2_backend": "ROCKSDB",
        "l2_options": {"rocksdb_root": str(tmp_path), "rocksdb_ttl_s": ttl_s},
    }  # fmt: skip
    options = msgspec.convert(config, AibrixOptions).effective({})
    store = AibrixStore(options, StoreContext(namespace="ns", page_bytes=PAGE, layout="page_first"))
    store.open()
    path = store._manager._l2_cache._backend.path
    assert put(store, 1) == [True]
    store.close()
    database = rocksdict.Rdict(path, rocksdict.Options(raw_mode=True), access_type=rocksdict.AccessType.read_only())
    assert len(database[key(1).encode()]) == PAGE + added
    database.close()


@pytest.mark.parametrize("other_version", [False, True])
def test_rocksdb_without_dram_is_read_past_the_vendors_manager(made: Made, tmp_path: Path, other_version: bool) -> None:
    """Each page by itself around a hole; a version that names its values in another way is read through its manager."""
    config = {"l1_capacity_gb": 0, "l2_backend": "ROCKSDB", "l2_options": {"rocksdb_root": str(tmp_path)}}
    store = made(config)
    asked: list[Any] = []
    if other_version:
        assert direct_reads(SimpleNamespace(_l1_cache=None), store._hashes, PAGE, BLOCK_TOKENS) is None
        store._direct = None
    real = store._manager.acquire
    store._manager.acquire = lambda *args: asked.append(args) or real(*args)
    assert put(store, 1, 2, 4, 5) == [True] * 4
    assert get(store, 1, 2, 3, 4, 5) == [Got.HIT, Got.HIT, Got.MISS, Got.HIT, Got.HIT]
    assert bool(asked) == other_version
    assert store.batch_exists([key(3), key(4)]) == [False, True]
