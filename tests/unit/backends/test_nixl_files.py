"""``nixl`` on files over a stand-in that moves bytes by plain calls and fails on demand: batches that fail as a whole,
full disks, direct I/O, the cleaner. The real library is in ``tests/stores``.
"""

import errno
import gc
import mmap
import os
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hicache_hooks.backends import nixl, nixl_cleaner, nixl_file
from hicache_hooks.backends.base import LARGE_BATCH, Got, StoreContext
from hicache_hooks.backends.file_paths import StorePaths
from hicache_hooks.backends.nixl import NixlStore, manifest_of
from hicache_hooks.backends.nixl_agent import TransferFailed
from hicache_hooks.backends.nixl_cleaner import Cleaner
from hicache_hooks.backends.nixl_file import TOUCH_S, NixlFiles
from hicache_hooks.backends.nixl_options import NixlOptions
from hicache_proto.errors import PrepareFailed

PAGE = 8192


class Mover:
    """``Transfers`` by preadv and pwrite. ``broken``: pages whose first byte is in it cannot be written."""

    def __init__(self) -> None:
        self.broken: set[int] = set()
        self.unreadable: set[str] = set()
        self.batches: list[int] = []
        self.lies_about_short = False

    def register(self, memory: memoryview) -> None:
        pass

    def run(self, op: str, pages: list[memoryview], targets: list[tuple[int, str]], deadline_s: None) -> None:
        """All or nothing, as the library: some pages have moved when it raises."""
        self.batches.append(len(pages))
        for page, (fd, _) in zip(pages, targets, strict=True):
            if op == "WRITE":
                if page[0] in self.broken:
                    raise TransferFailed("nixl: nixlBackendError")
                os.pwrite(fd, page, 0)
            else:
                if os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))[-1] in self.unreadable:
                    raise TransferFailed("nixl: nixlBackendError")
                if os.preadv(fd, [page], 0) != page.nbytes and not self.lies_about_short:
                    raise TransferFailed("nixl: nixlBackendError")


@pytest.fixture
def mover() -> Mover:
    return Mover()


def opened(root: str, mover: Mover, **options: Any) -> NixlFiles:
    made = NixlOptions(storage_dir=root, **{"l3_cleaner_enabled": False, **options}).effective({})
    store = NixlFiles(made, StoreContext(namespace="ns", page_bytes=PAGE, layout="page_first"), mover)  # type: ignore[arg-type]
    store.open()
    mover.batches.clear()
    return store


@pytest.fixture
def store(tmp_path: Path, mover: Mover) -> Iterator[NixlFiles]:
    made = opened(str(tmp_path / "kv"), mover)
    yield made
    made.close()


def key(i: int) -> str:
    return f"ns.{i:064x}"


def page(i: int) -> memoryview:
    memory = memoryview(mmap.mmap(-1, PAGE))
    memory[:] = bytes([i]) * PAGE
    return memory


def test_a_failed_batch_becomes_results_per_key(store: NixlFiles, mover: Mover, tmp_path: Path) -> None:
    """The library says neither which page failed nor leaves the others undone."""
    mover.broken = {2}
    assert store.put([key(i) for i in range(1, 5)], [page(i) for i in range(1, 5)]) == [True, None, True, True]
    assert mover.batches == [4, 1, 1, 1, 1]
    assert store.exists([key(i) for i in range(1, 5)]) == [True, False, True, True]
    assert [p.name for p in (tmp_path / "kv" / "tmp").rglob("*") if p.is_file()] == [".lock"]
    out = [page(0) for _ in range(4)]
    mover.unreadable = {"3"}
    results = store.get([key(i) for i in range(1, 5)], out)
    assert results == [Got.HIT, Got.MISS, Got.ERROR, Got.HIT]
    assert (out[0], out[3]) == (page(1), page(4))


def test_when_nothing_can_be_written_it_is_said(store: NixlFiles, mover: Mover) -> None:
    """F69: an error is no miss. F62: a full disk is no error."""
    mover.broken = {1, 2}
    with pytest.raises(TransferFailed):
        store.put([key(1), key(2)], [page(1), page(2)])


def test_pages_that_were_there_do_not_hide_a_disk_that_fails(store: NixlFiles, mover: Mover) -> None:
    """F69: else a read-only disk counts as "not taken" as long as one page of each batch is stored."""
    assert store.put([key(1)], [page(1)]) == [True]
    mover.broken = {2}
    with pytest.raises(TransferFailed):
        store.put([key(1), key(2)], [page(1), page(2)])
    assert store.put([key(1), key(2), key(3)], [page(1), page(2), page(3)]) == [True, None, True]


def test_memory_of_the_probe_stays_as_long_as_agents_know_of_it(tmp_path: Path, mover: Mover) -> None:
    """An agent that is made again after an error registers all of it again: it must not be unmapped."""
    known: list[weakref.ref[Any]] = []
    mover.register = lambda memory: known.append(weakref.ref(memory.obj))  # type: ignore[method-assign]
    made = opened(str(tmp_path / "kv"), mover)
    gc.collect()
    assert [ref() is not None for ref in known] == [True]
    made.close()


def test_a_full_disk_refuses_and_resumes(store: NixlFiles, mover: Mover, monkeypatch: pytest.MonkeyPatch) -> None:
    """F62: no retry of every page of a batch on a full disk, reads go on, writes resume by themselves."""
    assert store.put([key(1)], [page(1)]) == [True]
    space = store._dirs[0].space
    mover.broken = set(range(2, 10))
    free = iter([1 << 30, 0])
    monkeypatch.setattr(space, "measure", lambda: (next(free, 0), 0))
    mover.batches.clear()
    assert store.put([key(i) for i in range(2, 8)], [page(i) for i in range(2, 8)]) == [False] * 6
    assert mover.batches == [6, 1], "one page was tried alone, then the disk was seen to be full"
    assert store.put([key(8)], [page(8)]) == [False]
    assert store.get([key(1)], [page(0)]) == [Got.HIT]
    mover.broken = set()
    monkeypatch.setattr(space, "measure", lambda: (1 << 30, 0))
    assert store.put([key(2)], [page(2)]) == [True]
    assert space.reason == ""


def test_a_library_that_reads_short_files_is_refused(tmp_path: Path, mover: Mover) -> None:
    """By behaviour: 1.3.2 and 1.4.1 say DONE with a stale tail."""
    mover.lies_about_short = True
    with pytest.raises(PrepareFailed) as caught:
        opened(str(tmp_path / "kv"), mover)
    assert caught.value.details["reason"] == "short_reads"


def test_keys_are_routed_over_directories(tmp_path: Path, mover: Mover) -> None:
    roots = [str(tmp_path / name) for name in "abc"]
    store = opened(",".join(roots), mover)
    numbers = list(range(1, 61))
    assert store.put([key(i) for i in numbers], [page(i) for i in numbers]) == [True] * 60
    counts = [sum(1 for p in (Path(root) / "pages").rglob("*") if p.is_file()) for root in roots]
    assert sum(counts) == 60
    assert min(counts) > 5
    again = opened(",".join(roots), mover)
    assert again.exists([key(i) for i in numbers]) == [True] * 60, "the hash is the same in every process"
    assert again.clear() == 60
    store.close()
    again.close()


def test_direct_io_is_probed_and_said(tmp_path: Path, mover: Mover, monkeypatch: pytest.MonkeyPatch) -> None:
    """F65: a file system without it gets the page cache, visibly."""
    real = os.open

    def no_direct(path: str, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no")
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(nixl_file.os, "open", no_direct)
    store = opened(str(tmp_path / "kv"), mover)
    assert store.put([key(1)], [page(1)]) == [True]
    health = store.health()
    assert (health["direct_io"], "O_DIRECT" in health["direct_io_reason"]) == (False, True)
    store.close()
    monkeypatch.undo()
    store = opened(str(tmp_path / "kv"), mover, use_direct_io=False)
    assert store.health()["direct_io_reason"] == "switched off (use_direct_io)"
    store.close()


def test_descriptors_stay_flat(store: NixlFiles, mover: Mover) -> None:
    """F65: hits, misses, short files and failures alike."""
    store.put([key(i) for i in range(1, 9)], [page(i) for i in range(1, 9)])
    mover.broken = {9}
    before = len(os.listdir("/proc/self/fd"))
    out = [page(0) for _ in range(10)]
    for turn in range(100):
        store.get([key(i) for i in range(1, 11)], out)
        store.put([key(20 + turn), key(9)], [page(1), page(9)])
        path = store._dirs[0].paths.page(key(20 + turn))
        os.truncate(path, 10)
        assert store.get([key(20 + turn)], out[:1]) == [Got.MISS]
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_cleaner_takes_the_oldest_pages_of_ours_only(
    store: NixlFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's watermarks; F68: a stranger's file stays."""
    root = tmp_path / "kv"
    (root / "precious").write_text("x")
    paths = StorePaths(str(root), "ns")
    store.put([key(i) for i in range(1, 11)], [page(i) for i in range(1, 11)])
    for i in range(1, 11):
        os.utime(paths.page(key(i)), (i, i))
    monkeypatch.setattr(nixl_cleaner, "ROUND", 1)
    used = iter([85.0, 84.0, 83.0, 75.0, 69.0])
    monkeypatch.setattr(nixl_cleaner, "used_percent", lambda path: next(used))
    cleaner = Cleaner([paths], 80.0, 70.0, enabled=False)
    assert cleaner.clean(paths) == 3
    assert store.exists([key(i) for i in range(1, 11)]) == [False] * 3 + [True] * 7
    assert (root / "precious").exists()
    monkeypatch.setattr(nixl_cleaner, "used_percent", lambda path: 79.0)
    assert cleaner.clean(paths) == 0


def test_the_cleaner_runs_and_stops(tmp_path: Path, mover: Mover, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_cleaner, "LOOK_S", 0.01)
    monkeypatch.setattr(nixl_cleaner, "used_percent", lambda path: 99.0)
    store = opened(str(tmp_path / "kv"), mover, l3_cleaner_enabled=True)
    thread = store._cleaner._thread
    assert thread is not None
    store.put([key(1)], [page(1)])
    while store._cleaner.deleted == 0:
        assert thread.is_alive()
        thread.join(0.01)
    store.close()
    assert not thread.is_alive()


def test_a_read_marks_a_page_as_used_once_a_minute(store: NixlFiles, tmp_path: Path) -> None:
    """For the cleaner. Within the minute a read writes nothing to the page's inode."""
    paths = StorePaths(str(tmp_path / "kv"), "ns")
    store.put([key(1), key(2)], [page(1), page(2)])
    now = time.time()
    for number, age_s in ((1, TOUCH_S / 2), (2, 2 * TOUCH_S)):
        os.utime(paths.page(key(number)), (now - age_s, now - age_s))
    assert store.get([key(1), key(2)], [page(0), page(0)]) == [Got.HIT] * 2
    ages_s = [now - os.stat(paths.page(key(number))).st_mtime for number in (1, 2)]
    assert ages_s[0] == pytest.approx(TOUCH_S / 2, abs=0.01)
    assert ages_s[1] < TOUCH_S


def test_files_are_moved_in_larger_calls_than_objects() -> None:
    """A call registers its files and posts a transfer; each object is a transfer of its own anyway."""
    batch_bytes = {
        name: manifest_of(NixlOptions(plugin={name: {}}), {}).batch_bytes for name in ("posix", "gds", "obj")
    }
    assert batch_bytes == {"posix": LARGE_BATCH, "gds": LARGE_BATCH, "obj": NixlStore.manifest.batch_bytes}
    assert NixlStore.manifest.batch_bytes < LARGE_BATCH


@pytest.fixture
def tight(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mover: Mover) -> NixlStore:
    """A store in a process that may open 80 files: four calls at a time take half of them."""
    monkeypatch.setattr(nixl.resource, "getrlimit", lambda which: (80, 4096))
    options = NixlOptions(storage_dir=str(tmp_path), l3_cleaner_enabled=False).effective({})
    context = StoreContext(namespace="ns", page_bytes=PAGE, layout="page_first")
    made = NixlStore(options, context, {})
    made._store = NixlFiles(options, context, mover)  # type: ignore[arg-type]
    made._movers = []
    made.open()
    return made


def test_a_call_opens_a_part_of_the_files_that_the_process_may(tight: NixlStore, mover: Mover) -> None:
    """F65: a request's small pages at once would take every descriptor of the engine."""
    keys, pages = [key(i) for i in range(25)], [page(i) for i in range(25)]
    mover.batches.clear()
    assert tight.batch_put(keys, pages) == [True] * 25
    assert tight.batch_get(keys, pages) == [Got.HIT] * 25
    assert mover.batches == [10, 10, 5] * 2
    tight.close()


@pytest.mark.parametrize("broken", [{12}, set(range(10, 20)), set(range(25))])
def test_what_moved_before_a_part_failed_counts(tight: NixlStore, mover: Mover, broken: set[int]) -> None:
    keys, pages = [key(i) for i in range(25)], [page(i) for i in range(25)]
    mover.broken = broken
    if len(broken) == 25:
        with pytest.raises(TransferFailed):
            tight.batch_put(keys, pages)
        return
    done = tight.batch_put(keys, pages)
    assert done[:10] == [True] * 10
    assert [i for i in range(10, 20) if done[i]] == [i for i in range(10, 20) if i not in broken]
    assert tight.batch_exists(keys) == [bool(item) for item in done]
    tight.close()
