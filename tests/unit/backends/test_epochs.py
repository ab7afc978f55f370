"""F70: the markers of directories and of the hf3fs file: another name once the content is gone, else the same one."""

import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.unit.backends import hf3fs_rig
from tests.unit.backends.test_file import files, key, put, store_at, there
from tests.unit.backends.test_nixl_files import Mover, opened

from hicache_hooks.backends.base import StoreContext
from hicache_hooks.backends.file import FileStore
from hicache_hooks.backends.hf3fs_index import ForeignFile
from hicache_hooks.backends.nixl import NixlStore
from hicache_hooks.backends.nixl_options import NixlOptions


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def opened_file(root: Path, namespace: str = "ns") -> FileStore:
    store = store_at(root, namespace)
    store.open()
    return store


def test_a_directory_keeps_its_epoch_over_processes_and_is_no_page(root: Path) -> None:
    store = opened_file(root)
    first = store.epoch()
    put(store, 1, 2)
    assert len(first) == 16
    assert store.epoch() == first
    assert opened_file(root).epoch() == first
    assert opened_file(root, "other").epoch() != first
    assert store.clear() == 2
    assert [path.name for path in files(root) if "ns" in path.parts] == ["epoch"]
    store.close()


EMPTYINGS: dict[str, Callable[[Path], None]] = {
    "everything": lambda root: shutil.rmtree(root),
    "its content": lambda root: [shutil.rmtree(path) for path in root.iterdir() if path.is_dir()] and None,
    "the pages": lambda root: shutil.rmtree(root / "pages"),
    "the namespace's files": lambda root: (
        [shutil.rmtree(path) if path.is_dir() else path.unlink() for path in (root / "pages" / "ns").iterdir()] and None
    ),
}


@pytest.mark.parametrize("emptying", EMPTYINGS)
def test_a_directory_that_was_emptied_is_another_store(root: Path, emptying: str) -> None:
    store, other = opened_file(root), opened_file(root)
    first = store.epoch()
    assert other.epoch() == first
    put(store, 1)
    EMPTYINGS[emptying](root)
    second = store.epoch()
    assert second not in ("", first)
    assert other.epoch() == second
    assert there(store, 1) == []
    assert put(store, 1) == [True]
    assert store.epoch() == second
    store.close()
    other.close()


def test_clear_and_a_torn_marker_begin_a_new_epoch(root: Path) -> None:
    store = opened_file(root)
    first = store.epoch()
    assert store.clear() == 0
    second = store.epoch()
    (root / "pages" / "ns" / "epoch").write_text("")
    assert len({first, second, store.epoch()}) == 3
    store.close()


def test_the_marker_stays_young(root: Path) -> None:
    """A cleaner of old files must take pages first."""
    store = opened_file(root)
    store.epoch()
    marker = root / "pages" / "ns" / "epoch"
    os.utime(marker, (1, 1))
    store.epoch()
    assert marker.stat().st_mtime > 1000
    store.close()


def test_of_many_that_make_the_marker_one_wins(root: Path) -> None:
    stores = [opened_file(root) for _ in range(8)]
    for _ in range(20):
        (root / "pages" / "ns" / "epoch").unlink(missing_ok=True)
        with ThreadPoolExecutor(8) as pool:
            names = set(pool.map(FileStore.epoch, stores))
        assert len(names) == 1
        assert {each.epoch() for each in stores} == names
    for each in stores:
        each.close()
    assert not list((root / "tmp").iterdir())


def test_one_of_several_directories_is_enough(tmp_path: Path) -> None:
    store = opened(f"{tmp_path}/a,{tmp_path}/b", Mover())
    first = store.epoch()
    assert store.epoch() == first
    shutil.rmtree(tmp_path / "b" / "pages")
    second = store.epoch()
    assert [a == b for a, b in zip(first.split(","), second.split(","), strict=True)] == [True, False]
    store.clear()
    assert not set(store.epoch().split(",")) & set(second.split(","))
    store.close()


def test_only_nixl_on_files_says_its_epoch(tmp_path: Path) -> None:
    """Of objects the guard infers it: a method that could never answer would keep it from doing so."""
    context = StoreContext(namespace="ns", page_bytes=8192, layout="page_first")
    files = NixlOptions(plugin={"posix": {"active": True}}, storage_dir=str(tmp_path))
    objects = NixlOptions(plugin={"obj": {"active": True, "bucket": "b", "access_key": "a", "secret_key": "s"}})
    assert hasattr(NixlStore(files.effective({}), context, {}), "epoch")
    assert not hasattr(NixlStore(objects.effective({}), context, {}), "epoch")


def test_hf3fs_notices_a_file_that_was_emptied_under_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its index is in memory: without this it would promise pages that are gone, one by one."""
    hf3fs_rig.emulated_io(monkeypatch)
    with hf3fs_rig.mounted(tmp_path) as mount:
        store = mount.store()
        assert hf3fs_rig.put(store, 1, 2) == [True, True]
        first = store.epoch()
        assert store.epoch() == first
        os.truncate(store._path, 0)
        second = store.epoch()
        assert second != first
        assert store.batch_exists([key(1), key(2)]) == [False, False]
        assert hf3fs_rig.put(store, 1) == [True]
        assert hf3fs_rig.get(store, 1, 2) == ["hit", "miss"]
        assert store.epoch() == second
        with open(store._path, "r+b") as file:
            file.write(b"somebody else's")
        with pytest.raises(ForeignFile):
            store.epoch()
