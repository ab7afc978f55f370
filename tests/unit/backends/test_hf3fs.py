"""Backend hf3fs over the EMULATED ring: files, index, reuse, faults of the ring. It was never run on a live 3FS."""

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.backends.hf3fs_rig import PAGE, Mount, emulated_io, get, key, mounted, put

from hicache_hooks.backends import hf3fs_index, hf3fs_ring
from hicache_hooks.backends.base import StoreContext
from hicache_hooks.backends.hf3fs import Hf3fsStore
from hicache_hooks.backends.hf3fs_index import ForeignFile, Slots, digest
from hicache_hooks.backends.hf3fs_ring import RingFailed


@pytest.fixture
def io(monkeypatch: pytest.MonkeyPatch) -> Any:
    return emulated_io(monkeypatch)


@pytest.fixture
def mount(tmp_path: Path, io: Any) -> Iterator[Mount]:
    with mounted(tmp_path / "mnt") as found:
        yield found


# ---- pages


def test_pages_outlive_the_process_and_a_hole_is_a_miss(mount: Mount) -> None:
    store = mount.store()
    assert put(store, 1, 2, 3, 4, 5, 6) == [True] * 6  # more than one submission
    assert get(store, 6, 9, 1) == ["hit", "miss", "hit"]
    store.close()
    store = mount.store()
    assert get(store, 1, 2, 3, 9, 4, 5, 6) == ["hit", "hit", "hit", "miss", "hit", "hit", "hit"]
    assert store.health()["pages"] == 6


def test_a_full_file_gives_out_what_was_used_least_recently(mount: Mount) -> None:
    store = mount.store(slots=4)
    put(store, 1, 2, 3, 4)
    get(store, 1)
    assert put(store, 5, 6) == [True, True]
    assert get(store, 1, 2, 3, 4, 5, 6) == ["hit", "miss", "miss", "hit", "hit", "hit"]
    store.close()
    store = mount.store(slots=4)
    assert get(store, 1, 2, 3, 4, 5, 6) == ["hit", "miss", "miss", "hit", "hit", "hit"]
    assert put(store, 1, 7) == [True, True], "a page that is stored again is in use: 7 takes another's slot"
    assert get(store, 1, 4, 7) == ["hit", "miss", "hit"]


def test_every_process_has_a_file_of_its_own(mount: Mount) -> None:
    """Replicas are told the same path; so are two namespaces."""
    first, second, other = mount.store(), mount.store(), mount.store(namespace="other")
    put(first, 1)
    assert [get(s, 1) for s in (first, second, other)] == [["hit"], ["miss"], ["miss"]]
    put(second, 2)
    put(other, 3)
    assert first.clear() == 1
    assert (get(second, 2), get(other, 3)) == (["hit"], ["hit"])
    assert len(list((mount.root / "kv").iterdir())) == 3


def test_delete_set_aside_and_clear_free_slots(mount: Mount) -> None:
    store = mount.store(slots=4)
    put(store, 1, 2, 3, 4)
    assert store.delete([key(1), key(1), key(9)]) == 1
    store.set_aside(key(2), "checksum")
    assert put(store, 5, 6) == [True, True]
    assert get(store, 3, 4, 5, 6) == ["hit"] * 4
    assert store.health()["evicted_pages"] == 0
    assert store.clear() == 4
    store.close()
    assert mount.store(slots=4).health()["pages"] == 0


def test_a_reader_keeps_its_slots(mount: Mount) -> None:
    """A slot that is being read is neither written again nor given out, whatever is removed meanwhile."""
    slots = Slots(2)
    a, b, c = (digest(name) for name in "abc")
    for name in (a, b):
        taken = slots.reserve(name)
        assert taken is not None
        slots.publish(name, taken[0])
    held = slots.pin([a])
    taken = slots.reserve(c)
    assert taken == (1, True)  # b's, though a was used less recently before the pin
    slots.give_back(c, 1)
    freed = slots.remove([a])
    slots.freed(freed)
    assert slots.reserve(c) == (1, False)
    assert slots.reserve(b) is None  # a's slot is still read
    slots.unpin(held)
    assert slots.reserve(b) == (0, False)


def test_two_threads_that_store_one_page_both_hear_that_it_is_stored(mount: Mount) -> None:
    store = mount.store()
    mount.faults(hang=True)
    answers: list[list[bool]] = []
    threads = [threading.Thread(target=lambda: answers.append(put(store, 7))) for _ in range(2)]
    for thread in threads:
        thread.start()
    mount.faults()
    for thread in threads:
        thread.join(20)
    assert answers == [[True], [True]]
    assert store.health()["pages"] == 1


# ---- crashes


class Crash(BaseException):
    """The process ends here."""


def countdown(moments: int) -> Callable[[], None]:
    """Raises Crash at the call after so many."""
    left = moments

    def tick() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise Crash

    return tick


@pytest.mark.parametrize("what", ["entry", "page"])
def test_a_crash_at_every_write_leaves_no_page_that_is_not_whole(
    mount: Mount, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Index, rule 1: at each write of an entry, or of a page (half of it is written), the process ends."""
    real_write, real_run = hf3fs_index._write_all, hf3fs_ring.Lane.run

    for moment in range(60):
        tick = countdown(moment)

        def write(fd: int, data: bytes, at: int, tick: Any = tick) -> None:
            if what == "entry" and at >= 4096:
                tick()
            real_write(fd, data, at)

        def run(lane: Any, offsets: Any, buffers: Any, timeout_s: float, tick: Any = tick) -> list[bool]:
            if what == "page" and not lane._read:
                try:
                    tick()
                except Crash:
                    os.pwrite(lane._fd, bytes(buffers[0][: PAGE // 2]), offsets[0])
                    raise
            return real_run(lane, offsets, buffers, timeout_s)

        store = mount.store(slots=4, namespace=f"crash-{what}-{moment}")
        ended = False
        with monkeypatch.context() as patch:
            patch.setattr(hf3fs_index, "_write_all", write)
            patch.setattr(hf3fs_ring.Lane, "run", run)
            try:
                for first in range(1, 13, 3):
                    put(store, first, first + 1, first + 2)
                    store.delete([key(first)])
            except Crash:
                ended = True
        store.close()  # the kernel closes the file of a dead process as well
        again = mount.store(slots=4, namespace=f"crash-{what}-{moment}")
        found = get(again, *range(1, 13))
        assert "wrong" not in found, (moment, found)
        assert "error" not in found, (moment, found)
        again.close()
        if not ended:
            assert moment > 3
            return
    raise AssertionError("the run never came to its end")


def test_torn_and_foreign_entries_are_not_believed(mount: Mount) -> None:
    store = mount.store(slots=8)
    put(store, 1, 2, 3)
    path, fd = store.health()["path"], os.dup(store._fd)
    store.close()
    os.pwrite(fd, b"\xff" * 20, 4096 + 64)  # half of the second entry
    os.pwrite(fd, os.pread(fd, 64, 4096), 4096 + 5 * 64)  # a copy of the first one in another place
    os.close(fd)
    store = mount.store(slots=8)
    assert store.health()["path"] == path
    assert sorted(get(store, 1, 2, 3)) == ["hit", "hit", "miss"]
    assert store.health()["pages"] == 2


def test_a_file_of_another_configuration_is_refused_and_kept(mount: Mount) -> None:
    store = mount.store(slots=8)
    put(store, 1)
    store.close()
    with pytest.raises(ForeignFile):
        mount.store(slots=9)
    assert get(mount.store(slots=8), 1) == ["hit"]


# ---- a ring that fails


def test_a_short_or_failed_request_is_no_hit_and_is_forgotten(mount: Mount) -> None:
    """notes/backends.md: SGLang's client does not look at the length; every result must be the page's."""
    store = mount.store()
    put(store, 1, 2, 3, 4)
    mount.faults(short=100, every=2)
    found = get(store, 1, 2, 3, 4)
    assert sorted(found) == ["hit", "hit", "miss", "miss"]
    mount.faults()
    assert get(store, 1, 2, 3, 4) == found
    mount.faults(errno=5)
    with pytest.raises(OSError, match="not written whole"):  # F69: an error is no full store
        put(store, 8)
    mount.faults(errno=5, every=2)
    assert sorted(map(str, put(store, 8, 9))) == ["None", "True"]
    mount.faults()
    assert put(store, 8, 9) == [True, True]
    assert get(store, 8) == ["hit"]


def test_a_hole_in_the_file_is_no_page_of_zeros(mount: Mount) -> None:
    """Somebody truncated the file and made it long again: holes read as zeros unless the ring is told otherwise."""
    store = mount.store()
    put(store, 1)
    os.ftruncate(store._fd, 4096 + 4096)
    os.ftruncate(store._fd, 1 << 20)
    assert get(store, 1) == ["miss"]


def test_a_hung_ring_costs_one_time_out_and_its_late_write_hits_nobody(mount: Mount) -> None:
    """Rule 4 of the index, rule 2 of the ring: slot and client are not used again, so what lands late is harmless."""
    store = mount.store(slots=4, client_timeout=0.2)
    put(store, 1)
    mount.faults(hang=True)
    with pytest.raises(RingFailed):
        put(store, 2)
    mount.faults()  # the late write lands now
    assert put(store, 3, 4) == [True, True]
    assert get(store, 1, 2, 3, 4) == ["hit", "miss", "hit", "hit"]
    health = store.health()
    assert (health["lost_slots"], health["spoilt_clients"]) == (1, 1)


def test_a_ring_that_hung_for_a_while_is_used_again(mount: Mount) -> None:
    """F84: a spoilt client leaves its place to a new one, whose memory the late requests do not touch."""
    store = mount.store(client_timeout=0.05, numjobs=2)
    put(store, 1)
    mount.faults(hang=True)
    for _ in range(3):
        with pytest.raises(RingFailed, match="did not complete"):
            get(store, 1)
    mount.faults()
    assert get(store, 1) == ["hit"]
    assert (store.health()["spoilt_clients"], store.health()["needs_reattach"]) == (3, False)


def test_new_clients_for_spoilt_ones_are_bounded_and_the_end_is_said(
    mount: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F84: each keeps its memory. Then calls fail at once, by direction, and health names the way out."""
    monkeypatch.setattr(hf3fs_ring, "REPLACEMENTS", 1)
    store = mount.store(client_timeout=0.05, numjobs=2)
    put(store, 1)
    mount.faults(hang=True)
    for _ in range(4):
        with pytest.raises(RingFailed, match="did not complete"):
            get(store, 1)
    mount.faults()
    store._timeout_s = 60.0  # of a wait that must not be
    with pytest.raises(RingFailed, match="attached again"):
        get(store, 1)
    assert store.health()["needs_reattach"] is True
    assert put(store, 2) == [True], "the other direction has clients"


def test_a_file_that_was_replaced_is_unhealthy(mount: Mount) -> None:
    store = mount.store()
    path = store.health()["path"]
    os.rename(path, path + ".old")
    with pytest.raises(OSError, match=r".*"):
        store.health()


def test_close_gives_memory_links_and_registration_back(mount: Mount, io: Any) -> None:
    store = mount.store()
    put(store, 1)
    get(store, 1)
    assert len(mount.links) == 2
    shm = {name for name in os.listdir("/dev/shm") if name.startswith(f"hicache-{os.getpid()}-")}
    store.close()
    store.close()
    assert (mount.links, shm, io._registered) == ([], set(), {})
    for call in (lambda: put(store, 1), lambda: get(store, 1), store.clear, store.health):
        with pytest.raises(RuntimeError, match="not open"):
            call()


def test_an_open_that_fails_leaves_nothing(mount: Mount, monkeypatch: pytest.MonkeyPatch, io: Any) -> None:
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(io, "register_fd", lambda fd, flags=0: (_ for _ in ()).throw(OSError(5, "no")))
    with pytest.raises(OSError, match="no"):
        mount.store()
    assert len(os.listdir("/proc/self/fd")) == before
    context = StoreContext(namespace="ns", page_bytes=PAGE, layout="page_first")
    elsewhere = Hf3fsStore(mount.options(file_path_prefix="/tmp/no-mount-here/x/rank"), context)
    with pytest.raises(OSError, match="3FS mount"):
        elsewhere.open()
    assert not os.path.exists("/tmp/no-mount-here")


# ---- what the emulated ring refuses, as the real one does


def test_the_emulated_ring_refuses_what_it_must(mount: Mount, io: Any, tmp_path: Path) -> None:
    store = mount.store()
    put(store, 1)
    lane = hf3fs_ring.Lane(io, str(mount.root), store._fd, 2, PAGE, read=True)
    ring, iov = lane._ring, lane._iov
    with pytest.raises(OSError, match="other direction"):
        ring.prepare(iov[0:PAGE], False, store._fd, 0)
    with pytest.raises(OSError, match="not registered"):
        ring.prepare(iov[0:PAGE], True, 0, 0)
    with pytest.raises(OSError, match="not aligned"):
        ring.prepare(iov[0:PAGE], True, store._fd, 100)
    with pytest.raises(IndexError):
        ring.prepare(iov[9 * PAGE : 10 * PAGE], True, store._fd, 0)
    for _ in range(2):
        ring.prepare(iov[0:PAGE], True, store._fd, 0)
    with pytest.raises(OSError, match="full"):
        ring.prepare(iov[0:PAGE], True, store._fd, 0)
    with pytest.raises(OSError, match="registered twice"):
        io.register_fd(store._fd)
    with open(tmp_path / "elsewhere", "w") as file, pytest.raises(OSError, match="not a file of a mount"):
        io.register_fd(file.fileno())
    lane.close()
