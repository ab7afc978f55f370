"""F38, F69: a put that fails in the middle says what was stored, and counts the rest as failed; a store that takes
nothing raises, so that the guard sees a failed store and no failed page.
"""

import errno
import importlib.util
import mmap
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.backends import hf3fs_rig

from hicache_hooks.backends import eic as eic_module
from hicache_hooks.backends.aibrix import BATCH, AibrixStore
from hicache_hooks.backends.aibrix_options import BLOCK_TOKENS, AibrixOptions
from hicache_hooks.backends.base import StoreContext
from hicache_hooks.backends.eic import EicStore
from hicache_hooks.backends.eic_client import EicFailed
from hicache_hooks.backends.eic_options import EicConfig, EicOptions
from hicache_hooks.backends.file import FileOptions, FileStore
from hicache_hooks.backends.mooncake import MooncakeStore
from hicache_hooks.backends.mooncake_client import NO_SPACE, RPC_FAILED, RPC_TIMEOUT
from hicache_hooks.backends.mooncake_options import MooncakeOptions
from hicache_hooks.backends.nixl_file import NixlFiles
from hicache_hooks.backends.nixl_object import NixlObjects
from hicache_hooks.backends.nixl_options import NixlOptions
from hicache_hooks.backends.redis import RedisOptions, RedisStore
from hicache_hooks.backends.upkeep import stored_or_raise
from hicache_hooks.guard import Guard

PAGE = 8192
CONTEXT = StoreContext(namespace="ns", page_bytes=PAGE, layout="page_first")
EIC_FAKE = Path(__file__).resolve().parents[2] / "rigs" / "eic_fake" / "eic.py"


def pages(count: int) -> list[memoryview]:
    memory = memoryview(mmap.mmap(-1, count * PAGE))
    return [memory[i * PAGE : (i + 1) * PAGE] for i in range(count)]


def keys(count: int) -> list[str]:
    return [f"ns.{i:064x}" for i in range(count)]


def fail(*_: Any, **__: Any) -> Any:
    raise OSError(errno.EIO, "planted")


def after(calls: int, real: Any) -> Any:
    """``real`` for so many calls, then failures."""
    made = []

    def call(*args: Any, **fields: Any) -> Any:
        made.append(1)
        return real(*args, **fields) if len(made) <= calls else fail()

    return call


def test_a_failure_of_everything_is_raised() -> None:
    failed = ConnectionError()
    assert stored_or_raise([True, False], 4, failed) == [True, False, None, None]
    for done in ([], [False], [None]):
        with pytest.raises(ConnectionError):
            stored_or_raise(done, 4, failed)


def test_the_guard_counts_a_key_that_failed_as_an_error_and_not_as_a_miss() -> None:
    """F91. Its caller sees that it is not stored."""
    backend: Any = SimpleNamespace(
        batch_put=lambda keys, pages: [True, False, None], batch_get=fail, batch_exists=fail, close=lambda: None
    )
    guard = Guard(backend, name="x", threads=False)
    assert guard.batch_put(keys(3), pages(3)) == [True, False, False]
    put = guard.usage()["put"]
    assert (put.hit, put.miss, put.error, put.bytes) == (1, 1, 1, PAGE)
    assert guard.report().errors == 1
    guard.close()


def test_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(FileOptions(file_storage_path=str(tmp_path)).effective({}), CONTEXT)
    store.open()
    assert store.batch_put(keys(1), pages(1)) == [True]
    real = store._write
    monkeypatch.setattr(store, "_write", after(1, real))
    assert store.batch_put(keys(4), pages(4)) == [True, True, None, None]
    assert store.batch_exists(keys(4)) == [True, True, False, False]
    with pytest.raises(OSError, match="planted"):
        store.batch_put(keys(4), pages(4))  # those that are there prove no write
    store.close()


@pytest.fixture
def nixl_files(tmp_path: Path) -> NixlFiles:
    """Over transfers that write nothing: what is shown is what is done about the files."""
    options = NixlOptions(storage_dir=str(tmp_path / "kv"), l3_cleaner_enabled=False).effective({})
    mover: Any = SimpleNamespace(run=lambda *args: None, register=lambda memory: None)
    store = NixlFiles(options, CONTEXT, mover)
    store._probe_short = lambda: None  # type: ignore[method-assign]
    store.open()
    return store


@pytest.mark.parametrize("step", ["_publish", "_temporary"])
def test_nixl_files(nixl_files: NixlFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """Nothing of a page that failed stays, whichever step it failed in."""
    store = nixl_files
    monkeypatch.setattr(store, step, after(1, getattr(store, step)))
    assert store.put(keys(3), pages(3)) == [True, None, None]
    with pytest.raises(OSError, match="planted"):
        store.put(keys(3)[1:], pages(2))
    assert [path.name for path in (tmp_path / "kv" / "tmp").rglob("*") if path.is_file()] == [".lock"]
    store.close()


def test_nixl_files_leave_nothing_of_a_batch_that_could_not_be_moved(nixl_files: NixlFiles, tmp_path: Path) -> None:
    nixl_files._transfers.run = fail  # type: ignore[method-assign]
    with pytest.raises(OSError, match="planted"):
        nixl_files.put(keys(3), pages(3))
    assert [path.name for path in (tmp_path / "kv" / "tmp").rglob("*") if path.is_file()] == [".lock"]
    nixl_files.close()


def test_nixl_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    store = NixlObjects(
        NixlOptions(bucket="b", endpoint_override="http://h:1").effective({}),
        CONTEXT,
        SimpleNamespace(),  # type: ignore[arg-type]
        {},
    )
    monkeypatch.setattr(store, "_require_server", lambda: None)
    monkeypatch.setattr(store, "_parts", lambda n: [slice(i, i + 1) for i in range(n)])
    monkeypatch.setattr(store, "_run", after(1, lambda op, keys, slots: [True]))
    assert store.put(keys(3), pages(3)) == [True, None, None]
    with pytest.raises(OSError, match="planted"):
        store.put(keys(3), pages(3))


def test_redis(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two pipelines, and one command's own refusal."""
    store = RedisStore(RedisOptions(url="redis://h").effective({}), CONTEXT, {})
    full = type("OutOfMemoryError", (Exception,), {})
    store._client, store._step = SimpleNamespace(), 2
    store._redis = SimpleNamespace(exceptions=SimpleNamespace(OutOfMemoryError=full))
    monkeypatch.setattr(store, "_pipeline", after(1, lambda commands: [True, full()]))
    assert store.batch_put(keys(3), pages(3)) == [True, False, None]
    with pytest.raises(OSError, match="planted"):
        store.batch_put(keys(3), pages(3))
    monkeypatch.setattr(store, "_pipeline", lambda commands: [b"OK", ValueError()][: len(commands)])
    assert store.batch_put(keys(2), pages(2)) == [True, None]


@pytest.mark.parametrize("code", [RPC_FAILED, RPC_TIMEOUT, -800])
def test_mooncake(code: int) -> None:
    """-800: the node that holds it died."""
    store = MooncakeStore(MooncakeOptions(master_server_address="127.0.0.1:1").effective({}), CONTEXT)
    store._client = SimpleNamespace(
        register_buffer=lambda start, nbytes: 0, batch_put_from=lambda names, addresses, sizes: [0, NO_SPACE, code]
    )
    store._state.opened()
    mine = pages(3)
    for page in mine:
        store.register(page)
    assert store.batch_put(keys(3), mine) == [True, False, None]


class Manager:
    """AIBrix's, which stores ``good`` batches and then raises, or fails to say what it has."""

    def __init__(self, good: int) -> None:
        self.good = good

    def allocate_for(self, _: None, keys: list[str]) -> Any:
        self.good -= 1
        if self.good < 0:
            fail()
        handle = SimpleNamespace(to_tensors=list, __len__=lambda: 0)
        return SimpleNamespace(is_ok=lambda: True, get=lambda: Handle(len(keys)), value=handle)

    def put(self, _: None, keys: list[str], handle: Any) -> Any:
        return SimpleNamespace(is_ok=lambda: True, get=lambda: len(keys) * BLOCK_TOKENS)


class Handle:
    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def to_tensors(self) -> list[Any]:
        return []  # nothing is copied


def test_aibrix() -> None:
    store = AibrixStore(AibrixOptions(l1_capacity_gb=1.0, l2_backend="ROCKSDB"), CONTEXT)
    store._manager, store._hashes = Manager(1), lambda keys, tokens: keys
    store._state.opened()
    count = BATCH + 2
    assert store.batch_put(keys(count), pages(count)) == [True] * BATCH + [None] * 2
    with pytest.raises(OSError, match="planted"):
        store.batch_put(keys(count), pages(count))


def test_eic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("eic", EIC_FAKE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "eic", module)
    monkeypatch.setenv("EIC_FAKE_ROOT", str(tmp_path))
    monkeypatch.setattr(eic_module, "MAX_BATCH", 2)
    config = EicConfig(remote_url="eic://10.0.0.1:9000", eic_instance_id="i-1")
    store = EicStore(EicOptions(config=config, namespace="space").effective({}), CONTEXT)
    store.open()
    real, made = store._client.put, []

    def put(names: Any, parts: Any) -> Any:
        made.append(1)
        if len(made) > 1:
            raise EicFailed("planted")
        return real(names, parts)

    monkeypatch.setattr(store._client, "put", put)
    assert store.batch_put(keys(4), pages(4)) == [True, True, None, None]
    with pytest.raises(EicFailed, match="planted"):
        store.batch_put(keys(4), pages(4))
    store.close()


def test_hf3fs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """EMULATED ring. An entry that cannot be written ends the put; its slot is lost only if it cannot be emptied."""
    hf3fs_rig.emulated_io(monkeypatch)
    with hf3fs_rig.mounted(tmp_path) as mount:
        store = mount.store(slots=4)
        index: Any = store._index
        with monkeypatch.context() as patch:
            patch.setattr(index, "put", after(1, index.put))
            assert hf3fs_rig.put(store, 1, 2, 3) == [True, None, None]
            with pytest.raises(OSError, match="planted"):
                hf3fs_rig.put(store, 4)
        assert store.health()["lost_slots"] == 0
        assert hf3fs_rig.put(store, 2, 3, 4) == [True, True, True]
        assert hf3fs_rig.get(store, 1, 2, 3, 4) == ["hit"] * 4
        with monkeypatch.context() as patch:
            patch.setattr(index, "drop", after(1, index.drop))
            assert hf3fs_rig.put(store, 5, 6, 7) == [True, None, None], "the second victim keeps its entry"
        assert store.health()["lost_slots"] == 1
