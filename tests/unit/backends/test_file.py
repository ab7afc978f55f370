"""Backend ``file``: whole pages or none, checked lengths, namespaces, descriptors."""

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hicache_hooks.backends import file as file_module
from hicache_hooks.backends.base import Got, StoreContext
from hicache_hooks.backends.file import BAD_KEPT, FileOptions, FileStore
from hicache_hooks.backends.options import StoreFacts, parse_size
from hicache_hooks.backends.quota import Ledger, Usage
from hicache_proto.errors import InvalidConfig

PAGE = 8192


def store_at(root: Path, namespace: str = "ns", **options: Any) -> FileStore:
    made = FileOptions(file_storage_path=str(root), min_free_space=options.pop("min_free_space", 0), **options)
    return FileStore(made.effective({}), StoreContext(namespace=namespace, page_bytes=PAGE, layout="page_first"))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileStore]:
    made = store_at(tmp_path / "kv")
    made.open()
    yield made
    made.close()


def key(i: int, namespace: str = "ns") -> str:
    return f"{namespace}.{i:064x}"


def page(i: int) -> memoryview:
    return memoryview(bytearray(i.to_bytes(4, "little") * (PAGE // 4)))


def blank() -> memoryview:
    return memoryview(bytearray(PAGE))


def put(store: FileStore, *numbers: int, namespace: str = "ns") -> list[bool]:
    return store.batch_put([key(i, namespace) for i in numbers], [page(i) for i in numbers])


def there(store: FileStore, *numbers: int) -> list[int]:
    found = store.batch_exists([key(i) for i in numbers])
    return [i for i, yes in zip(numbers, found, strict=True) if yes]


def files(root: Path) -> list[Path]:
    return sorted(p for p in (root / "pages").rglob("*") if p.is_file())


def test_round_trip_with_a_hole(store: FileStore) -> None:
    assert put(store, 1, 2) == [True, True]
    out = [blank(), blank(), blank()]
    assert store.batch_get([key(1), key(9), key(2)], out) == [Got.HIT, Got.MISS, Got.HIT]
    assert (out[0], out[2]) == (page(1), page(2))
    assert store.batch_exists([key(1), key(9), key(2)]) == [True, False, True]
    assert store.delete([key(1), key(9)]) == 1
    assert there(store, 1, 2) == [2]


def test_pages_survive_reopening_and_are_shared(tmp_path: Path, store: FileStore) -> None:
    put(store, 1)
    other = store_at(tmp_path / "kv")
    other.open()
    assert there(other, 1) == [1]
    put(other, 2)
    assert there(store, 2) == [2]
    other.close()
    assert there(store, 1, 2) == [1, 2]


def test_a_page_that_exists_is_kept(store: FileStore, tmp_path: Path) -> None:
    put(store, 1)
    inode = files(tmp_path / "kv")[0].stat().st_ino
    assert put(store, 1) == [True]
    assert files(tmp_path / "kv")[0].stat().st_ino == inode


def test_short_and_long_files_are_misses_and_are_written_anew(store: FileStore, tmp_path: Path) -> None:
    """notes/backends.md: a short object must never read as a hit with a stale tail."""
    put(store, 1, 2)
    for path in files(tmp_path / "kv"):
        os.truncate(path, PAGE - 1)
    assert there(store, 1, 2) == []
    assert store.batch_get([key(1)], [blank()]) == [Got.MISS]
    assert len(os.listdir(tmp_path / "kv" / "bad")) == 1
    assert put(store, 1, 2) == [True, True]
    out = [blank(), blank()]
    assert store.batch_get([key(1), key(2)], out) == [Got.HIT, Got.HIT]
    assert out == [page(1), page(2)]


def test_pages_set_aside_are_kept_for_a_look_but_few(store: FileStore, tmp_path: Path) -> None:
    numbers = range(BAD_KEPT + 5)
    put(store, *numbers)
    for i in numbers:
        store.set_aside(key(i), "checksum / odd")
    store.set_aside(key(999), "not there")
    kept = os.listdir(tmp_path / "kv" / "bad")
    assert len(kept) == BAD_KEPT
    assert there(store, *numbers) == []
    assert store.health()["used_bytes"] == BAD_KEPT * PAGE


def test_clear_takes_this_namespace_only(tmp_path: Path, store: FileStore) -> None:
    """F68: keys of A and B, clear(A) -> only A's are gone, the count is right, strangers' files stay."""
    put(store, 1, 2, 3)
    other = store_at(tmp_path / "kv", "ns2")
    other.open()
    put(other, 1, namespace="ns2")
    foreign = tmp_path / "kv" / "notes.txt"
    foreign.write_text("mine")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    (tmp_path / "kv" / "pages" / "ns" / "zz").symlink_to(outside)
    assert store.clear() == 3
    assert there(store, 1, 2, 3) == []
    assert other.batch_exists([key(1, "ns2")]) == [True]
    assert foreign.exists()
    assert (outside / "precious").exists()
    assert store.clear() == 0
    assert other.health()["used_bytes"] == PAGE
    other.close()


def test_clear_that_cannot_finish_says_so(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """F68: clear with a store error is no success; the others are deleted."""
    put(store, 1, 2, 3)
    stuck = os.path.basename(store._paths.page(key(2)))
    real = os.unlink

    def unlink(path: str) -> None:
        if os.path.basename(path) == stuck:
            raise PermissionError(errno.EPERM, "no")
        real(path)

    monkeypatch.setattr(file_module.os, "unlink", unlink)
    with pytest.raises(OSError, match="1 pages could not be deleted, 2 were"):
        store.clear()
    assert there(store, 1, 2, 3) == [2]


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "a/b", ".", "..", "", "x" * 5000, "a\0b", "ключ", "\ud800", "~x", ".lock"]
)
def test_keys_cannot_leave_the_directory(store: FileStore, tmp_path: Path, name: str) -> None:
    assert store.batch_put([name], [page(1)]) == [True]
    assert store.batch_exists([name]) == [True]
    assert len(files(tmp_path / "kv")) == 1
    namespaced = store_at(tmp_path / "kv", name)
    namespaced.open()
    assert namespaced.batch_put([f"{name}.k"], [page(2)]) == [True]
    assert namespaced.clear() == 1
    namespaced.close()
    assert {p.name for p in tmp_path.iterdir()} == {"kv"}


def test_descriptors_stay_flat(store: FileStore) -> None:
    """F65: 5000 page operations, hits, misses and short files alike."""
    put(store, *range(10))
    before = len(os.listdir("/proc/self/fd"))
    out = [blank() for _ in range(10)]
    for i in range(250):
        store.batch_get([key(k) for k in range(5, 15)], out)
        put(store, 100 + i % 7)
        store.batch_exists([key(1)])
        store.delete([key(100 + i % 7)])
    assert len(os.listdir("/proc/self/fd")) == before


def test_open_and_close_leave_nothing(tmp_path: Path) -> None:
    """F43: 50 cycles; no descriptor, no temporary file."""
    before = len(os.listdir("/proc/self/fd"))
    for i in range(50):
        made = store_at(tmp_path / "kv")
        made.open()
        put(made, i)
        made.close()
        made.close()
        with pytest.raises(RuntimeError):
            made.batch_exists([key(1)])
    assert len(os.listdir("/proc/self/fd")) == before
    assert os.listdir(tmp_path / "kv" / "tmp") == []


def test_close_after_a_failed_open(tmp_path: Path) -> None:
    """F14: whatever ``open`` got to, ``close`` takes back."""
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    before = len(os.listdir("/proc/self/fd"))
    made = store_at(blocked / "kv")
    with pytest.raises(OSError):
        made.open()
    made.close()
    (tmp_path / "kv" / "usage").mkdir(parents=True)
    other = store_at(tmp_path / "kv")
    with pytest.raises(OSError):
        other.open()
    other.close()
    assert len(os.listdir("/proc/self/fd")) == before


_WRITER = """
import os, signal, sys
from hicache_hooks.backends import file as m
from hicache_hooks.backends.base import StoreContext
store = m.FileStore(
    m.FileOptions(file_storage_path=sys.argv[1], min_free_space=0).effective({}),
    StoreContext(namespace="ns", page_bytes=8192, layout="page_first"),
)
store.open()
def die(fd, page):
    os.pwrite(fd, page[:5000], 0)
    os.kill(os.getpid(), signal.SIGKILL)
m._write_all = die
store.batch_put(["ns." + "0" * 64], [memoryview(bytearray(8192))])
"""


def test_a_killed_writer_leaves_no_page_and_its_temporary_files_go(tmp_path: Path, store: FileStore) -> None:
    """A crash in the middle of a write leaves a temporary file only; the next open removes it, not the living ones."""
    root = tmp_path / "kv"
    done = subprocess.run([sys.executable, "-c", _WRITER, str(root)], timeout=60, check=False)
    assert done.returncode == -9
    assert there(store, 0) == []
    assert files(root) == []
    assert len(os.listdir(root / "tmp")) == 2
    assert store.health()["reserved_bytes"] == PAGE
    other = store_at(root)
    other.open()
    assert store.health()["reserved_bytes"] == 0, "what the dead had reserved is given back"
    left = os.listdir(root / "tmp")
    assert len(left) == 2, "the killed writer's area is gone; this store's and the other's live"
    assert put(store, 5) == [True]
    other.close()
    assert len(os.listdir(root / "tmp")) == 1


def test_directories_removed_behind_our_back_are_made_again(tmp_path: Path, store: FileStore) -> None:
    import shutil

    put(store, 1)
    shutil.rmtree(tmp_path / "kv")
    assert store.batch_get([key(1)], [blank()]) == [Got.MISS]
    assert there(store, 1) == []
    assert put(store, 1, 2) == [True, True]
    assert there(store, 1, 2) == [1, 2]
    assert store.health()["used_bytes"] == 2 * PAGE


def test_a_read_error_is_an_error_of_that_key(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    put(store, 1, 2)
    real = os.preadv
    calls = iter((True, False))

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        if next(calls):
            raise OSError(errno.EIO, "no")
        return real(fd, buffers, offset)

    monkeypatch.setattr(file_module.os, "preadv", preadv)
    assert store.batch_get([key(1), key(2)], [blank(), blank()]) == [Got.ERROR, Got.HIT]


def test_interrupted_reads_and_writes_go_on(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    real_read, real_write = os.preadv, os.pwrite
    monkeypatch.setattr(file_module.os, "preadv", lambda fd, b, o: real_read(fd, [b[0][:1000]], o))
    monkeypatch.setattr(file_module.os, "pwrite", lambda fd, b, o: real_write(fd, b[:3000], o))
    out = blank()
    # The counter's own small writes go through the same function: 20 bytes are below the limit.
    assert put(store, 7) == [True]
    assert store.batch_get([key(7)], [out]) == [Got.HIT]
    assert out == page(7)


def test_write_errors_other_than_space_are_raised_when_nothing_was_stored(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(errno.EROFS, "read-only")

    monkeypatch.setattr(file_module, "_write_all", refuse)
    with pytest.raises(OSError) as caught:
        put(store, 1, 2)
    assert caught.value.errno == errno.EROFS
    assert os.listdir(store._temp._path) == [".lock"]
    assert store.health()["used_bytes"] == 0


def test_a_fifo_in_the_place_of_a_page_does_not_hang(store: FileStore) -> None:
    path = store._paths.page(key(1))
    os.makedirs(os.path.dirname(path))
    os.mkfifo(path)
    got: list[Got] = []
    thread = threading.Thread(target=lambda: got.extend(store.batch_get([key(1)], [blank()])), daemon=True)
    thread.start()
    thread.join(10)
    assert got in ([Got.MISS], [Got.ERROR])
    assert there(store, 1) == []


def test_threads_share_one_store(store: FileStore) -> None:
    """Right bytes and one file per key from several threads."""
    wrong: list[int] = []

    def work(seed: int) -> None:
        out = blank()
        for i in range(60):
            number = (i * 7 + seed) % 40
            put(store, number)
            if store.batch_get([key(number)], [out]) != [Got.HIT] or out != page(number):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    assert there(store, *range(40)) == list(range(40))


def test_wrong_page_lengths_are_refused(store: FileStore) -> None:
    with pytest.raises(ValueError, match="page buffer of 10 bytes"):
        store.batch_put([key(1)], [memoryview(bytearray(10))])


def test_health_says_what_status_needs(store: FileStore, tmp_path: Path) -> None:
    """F65: direct I/O is said, with the reason."""
    facts = store.health()
    assert facts["path"] == str(tmp_path / "kv")
    assert facts["direct_io"] is False
    assert facts["direct_io_reason"]
    assert facts["no_space"] is None


# ------------------------------------------------------------------ options


def test_sizes() -> None:
    for text, size in (
        ("10gb", 10 << 30),
        ("1.5 GiB", 3 << 29),
        ("4096", 4096),
        ("64k", 65536),
        (" 2 MB ", 2 << 20),
        (7, 7),
    ):
        assert parse_size(text, "x") == size


def test_geometry_is_checked() -> None:
    """F49: a quota below a few pages, and pages of no bytes, are 422 ``bad_geometry``."""
    facts = StoreFacts(layout="page_first", page_bytes=PAGE, l2_pages=100)
    small = FileOptions(file_storage_path="/x", max_size=PAGE).effective({})
    with pytest.raises(InvalidConfig) as caught:
        small.check(facts)
    assert caught.value.details["reason"] == "bad_geometry"
    with pytest.raises(InvalidConfig):
        FileOptions(file_storage_path="/x").effective({}).check(StoreFacts("page_first", 0, 1))
    tight = FileOptions(file_storage_path="/x", max_size=PAGE * 10).effective({})
    assert "fewer than the host pool" in tight.check(facts)[0]
    with pytest.raises(InvalidConfig):
        FileOptions(file_storage_path="relative").effective({})


def test_ledger_refuses_nonsense(tmp_path: Path) -> None:
    """A counter that somebody overwrote is recounted, not believed."""
    ledger = Ledger(str(tmp_path / "usage"))
    ledger.open()
    with ledger.locked():
        assert ledger.read() is None
        ledger.write(Usage(5, 2, 7))
        assert ledger.read() == Usage(5, 2, 7)
    (tmp_path / "usage").write_bytes(b"x" * 36)
    assert ledger.usage() is None
    ledger.close()
