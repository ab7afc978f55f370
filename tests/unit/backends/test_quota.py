"""Quota, eviction and full disks: bounded, fair among processes, and never a dead end (F62)."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hicache_hooks.backends import quota as quota_module
from hicache_hooks.backends.base import Got, StoreContext
from hicache_hooks.backends.file import FileOptions, FileStore
from hicache_hooks.backends.free_space import FreeSpace

PAGE = 64 * 1024


def store_at(root: Path, namespace: str = "ns", **options: Any) -> FileStore:
    options.setdefault("min_free_space", 0)
    made = FileOptions(file_storage_path=str(root), **options).effective({})
    store = FileStore(made, StoreContext(namespace=namespace, page_bytes=PAGE, layout="page_first"))
    store.open()
    return store


def keys(*numbers: int, namespace: str = "ns") -> list[str]:
    return [f"{namespace}.{i:064x}" for i in numbers]


def put(store: FileStore, *numbers: int, namespace: str = "ns") -> list[bool]:
    return store.batch_put(keys(*numbers, namespace=namespace), [memoryview(bytearray(PAGE)) for _ in numbers])


def read(store: FileStore, *numbers: int) -> list[Got]:
    return store.batch_get(keys(*numbers), [memoryview(bytearray(PAGE)) for _ in numbers])


def there(store: FileStore, *numbers: int) -> list[int]:
    return [i for i, yes in zip(numbers, store.batch_exists(keys(*numbers)), strict=True) if yes]


def used(root: Path) -> int:
    return sum(p.stat().st_size for sub in ("pages", "bad") for p in (root / sub).rglob("*") if p.is_file())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def test_the_quota_is_never_exceeded_and_the_oldest_go(root: Path) -> None:
    store = store_at(root, max_size=20 * PAGE, eviction_ratio=0.25)
    for i in range(100):
        assert put(store, i) == [True]
        assert used(root) <= 20 * PAGE
    left = there(store, *range(100))
    assert left == list(range(100 - len(left), 100)), "the most recently written stay"
    assert 15 <= len(left) <= 20
    assert store.health()["used_bytes"] == used(root)
    store.close()


def test_reading_keeps_a_page(root: Path) -> None:
    """Recency is use, not age."""
    store = store_at(root, max_size=20 * PAGE, eviction_ratio=0.25)
    put(store, *range(10))
    for i in range(10, 60):
        assert read(store, 0) == [Got.HIT]
        put(store, i)
    assert there(store, 0, 1, 2) == [0]
    store.close()


def test_a_batch_larger_than_what_is_left_is_stored_in_part_or_whole(root: Path) -> None:
    store = store_at(root, max_size=8 * PAGE, eviction_ratio=0.5)
    assert all(put(store, *range(8)))
    done = put(store, *range(100, 106))
    assert any(done)
    assert used(root) <= 8 * PAGE
    assert put(store, *range(200, 250)).count(True) <= 8
    assert used(root) <= 8 * PAGE
    store.close()


def test_dead_namespaces_go_first(root: Path) -> None:
    """The quota is the directory's: pages of a configuration that nobody runs any more are evicted before ours."""
    old = store_at(root, "old", max_size=20 * PAGE)
    put(old, *range(15), namespace="old")
    old.close()
    store = store_at(root, max_size=20 * PAGE)
    put(store, *range(10))
    assert there(store, *range(10)) == list(range(10))
    assert used(root) <= 20 * PAGE
    store.close()


def test_an_unremovable_page_does_not_stop_eviction(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F62: eviction goes on with the others."""
    store = store_at(root, max_size=16 * PAGE, eviction_ratio=0.5)
    put(store, *range(4))
    stuck = {os.path.basename(store._paths.page(name)) for name in keys(0, 1)}
    real = os.unlink

    def unlink(path: str) -> None:
        if os.path.basename(path) in stuck:
            raise PermissionError(1, "no")
        real(path)

    monkeypatch.setattr(quota_module.os, "unlink", unlink)
    for i in range(4, 60):
        assert put(store, i) == [True]
    assert there(store, 0, 1, 2) == [0, 1]
    assert store.health()["unremovable_pages"] == 2
    assert used(root) <= 16 * PAGE
    store.close()


@pytest.mark.needs_root
def test_a_really_unremovable_file(root: Path) -> None:
    """F62 with a file that the kernel refuses to delete (immutable, so that root cannot either)."""
    store = store_at(root, max_size=16 * PAGE, eviction_ratio=0.5)
    put(store, 0, 1)
    path = store._paths.page(keys(0)[0])
    if subprocess.run(["chattr", "+i", path], check=False, capture_output=True).returncode:
        store.close()
        pytest.skip("needs a file system with the immutable flag (chattr +i)")
    try:
        for i in range(2, 40):
            assert put(store, i) == [True]
        assert there(store, 0, 1) == [0]
    finally:
        subprocess.run(["chattr", "-i", path], check=True)
        store.close()


def test_nothing_removable_does_not_scan_per_batch(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_at(root, max_size=8 * PAGE)
    put(store, *range(8))
    scans: list[int] = []
    real = store._quota._scan
    monkeypatch.setattr(store._quota, "_scan", lambda: (scans.append(1), real())[1])

    def refuse(path: str) -> None:
        raise PermissionError(1, "no")

    monkeypatch.setattr(quota_module.os, "unlink", refuse)
    for i in range(100, 130):
        assert put(store, i) == [False]
    assert len(scans) <= 1
    assert read(store, 0) == [Got.HIT]
    store.close()


def test_a_lost_or_foreign_counter_is_recounted(root: Path) -> None:
    store = store_at(root, max_size=20 * PAGE)
    put(store, *range(5))
    (root / "usage").write_bytes(os.urandom(36))
    put(store, 5)  # nothing is believed: the eviction's scan counts
    put(store, 6)
    assert store.health()["used_bytes"] == used(root)
    store.close()
    (root / "usage").unlink()
    again = store_at(root, max_size=20 * PAGE)
    assert again.health()["used_bytes"] == used(root)
    again.close()


def test_a_counter_left_too_high_by_a_crash_heals(root: Path) -> None:
    """quota.py, rule 2."""
    store = store_at(root, max_size=20 * PAGE)
    put(store, *range(5))
    store._quota._change(stored=18 * PAGE)
    assert put(store, 10) == [True]
    assert there(store, *range(5)) == list(range(5)), "a wrong counter alone must not evict"
    assert store.health()["used_bytes"] == used(root)
    store.close()


def test_a_process_stopped_with_the_counters_lock_costs_a_second_not_a_hang(root: Path) -> None:
    """SIGSTOP at the wrong moment: writes fail in bounded time, reads go on, and afterwards all is well."""
    store = store_at(root, max_size=20 * PAGE)
    put(store, 0)
    code = (
        "import fcntl,os,sys,signal\n"
        f"fd=os.open({str(root / 'usage')!r},os.O_RDWR); fcntl.flock(fd,fcntl.LOCK_EX)\n"
        "print('held',flush=True); os.kill(os.getpid(),signal.SIGSTOP)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"held\n"
            started = time.monotonic()
            with pytest.raises(OSError):
                put(store, 1)
            assert time.monotonic() - started < 10
            assert read(store, 0) == [Got.HIT]
        finally:
            holder.kill()
    assert put(store, 1) == [True]
    store.close()


_PEER = """
import sys
from hicache_hooks.backends.base import StoreContext
from hicache_hooks.backends.file import FileOptions, FileStore
root, who, page = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
store = FileStore(
    FileOptions(file_storage_path=root, min_free_space=0, max_size=40 * page, eviction_ratio=0.3).effective({}),
    StoreContext(namespace="ns", page_bytes=page, layout="page_first"),
)
store.open()
sys.stdin.readline()
bufs = [memoryview(bytearray(page)) for _ in range(4)]
for i in range(60):
    store.batch_put([f"ns.{who}-{i}-{k}" for k in range(4)], bufs)
    store.batch_get([f"ns.{who}-{i}-{k}" for k in range(4)], bufs)
store.close()
print("done", flush=True)
"""


def test_processes_share_one_quota(root: Path) -> None:
    """Several processes write at once: the directory stays below the quota all the time."""
    peers = [
        subprocess.Popen(
            [sys.executable, "-c", _PEER, str(root), str(who), str(PAGE)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for who in range(3)
    ]
    most = 0
    done = threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.is_set():
            total = 0
            for folder, _, names in os.walk(root / "pages"):
                for name in names:
                    try:
                        total += os.stat(os.path.join(folder, name)).st_size
                    except FileNotFoundError:
                        continue
            most = max(most, total)

    watcher = threading.Thread(target=watch)
    try:
        for peer in peers:
            assert peer.stdin is not None
            peer.stdin.write(b"go\n")
            peer.stdin.flush()
        watcher.start()
        outputs = [peer.communicate(timeout=100)[0] for peer in peers]
    finally:
        done.set()
        watcher.join(10)
        for peer in peers:
            peer.kill()
            peer.wait()
    assert outputs == [b"done\n"] * 3
    # Walking is not atomic: a page may be seen both before eviction and its successor after. A batch per peer.
    assert 0 < most <= (40 + 3 * 4) * PAGE
    assert used(root) <= 40 * PAGE
    assert os.listdir(root / "tmp") == []


# ------------------------------------------------------------------ free space


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A 10 MB file system of its own."""
    mount = tmp_path / "small"
    mount.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=10m", "tmpfs", str(mount)], check=False, capture_output=True
    )
    if done.returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


@pytest.mark.needs_root
@pytest.mark.parametrize("floor", [0, None, "1mb"])
def test_a_full_disk_stops_writes_only_and_heals(tmpfs: Path, floor: Any) -> None:
    """F62: writes stop with ``no_space``, reads still hit, after freeing 5 MB writes resume without re-attach."""
    store = store_at(tmpfs / "kv", min_free_space=floor)
    stored = [i for i in range(200) if put(store, i) == [True]]
    assert 100 < len(stored) < 165
    assert store.health()["no_space"].startswith("no_space")
    assert put(store, 500) == [False], "no exception: the write side of the breaker only"
    assert read(store, *stored[:20]) == [Got.HIT] * 20
    assert os.listdir(store._temp._path) == [".lock"], "half a page is not left behind"
    ballast = tmpfs / "kv" / "pages" / "ns"
    for path in sorted(p for p in ballast.rglob("*") if p.is_file())[:80]:
        path.unlink()
    assert put(store, *range(1000, 1050)) == [True] * 50
    assert store.health()["no_space"] is None
    store.close()


@pytest.mark.needs_root
def test_a_file_system_without_direct_io_is_fine(tmpfs: Path) -> None:
    """F65: tmpfs; attach works and says so."""
    store = store_at(tmpfs / "kv")
    assert put(store, 1) == [True]
    assert store.health()["direct_io"] is False
    store.close()


def test_refusals_that_free_space_does_not_explain_are_tried_again(tmp_path: Path) -> None:
    """A user's disk quota: no free space is missing, the kernel says no all the same."""
    now = [0.0]
    space = FreeSpace(str(tmp_path), 0, clock=lambda: now[0])
    assert space.room(4, PAGE) == 4
    space.refused()
    assert space.room(4, PAGE) == 0
    assert space.reason.startswith("no_space")
    now[0] = 1.0
    assert space.room(4, PAGE) == 4
    space.written()
    assert space.reason == ""


def test_the_floor_keeps_space_free(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    space = FreeSpace(str(tmp_path), free * 2)
    assert space.room(4, PAGE) == 0
    assert "floor" in space.reason


def test_a_reservation_that_could_not_be_given_back_is_given_back_later(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The counter's lock was held at the wrong moment: the next batch puts it right."""
    store = store_at(root, max_size=20 * PAGE)
    real = store._quota.ledger._flock
    answers = iter((False, True, False, False))

    def flock() -> None:
        if next(answers, False):
            raise quota_module.LedgerBusy("held")
        real()

    monkeypatch.setattr(store._quota.ledger, "_flock", flock)
    monkeypatch.setattr(store, "_write", lambda path, page: 0)
    put(store, 1)
    assert store._quota.ledger.usage() == (0, PAGE, 0)
    put(store, 2)
    assert store._quota.ledger.usage() == (0, 0, 0)
    store.close()
