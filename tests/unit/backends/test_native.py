"""When a native client may be called, which memory it may touch, and which directory it may write."""

import mmap
import os
import threading
from pathlib import Path

import pytest

from hicache_hooks.backends.native import OpenState, Ranges, Turns, address_of
from hicache_hooks.backends.slots import claim

PAGE = 4096


def test_nobody_enters_a_client_that_is_not_open() -> None:
    state = OpenState("x")
    with pytest.raises(RuntimeError, match="not open"), state.inside():
        pass
    state.opened()
    with state.inside():
        pass
    assert state.shut(0.1)
    assert not state.shut(0.1)
    with pytest.raises(RuntimeError, match="not open"), state.inside():
        pass


def test_a_client_is_not_destroyed_under_a_call() -> None:
    """F27: the one who closes waits for those inside, and is told when they do not leave."""
    state = OpenState("x")
    state.opened()
    inside, leave, left = threading.Event(), threading.Event(), threading.Event()

    def call() -> None:
        with state.inside():
            inside.set()
            leave.wait(10)
            left.set()

    thread = threading.Thread(target=call)
    thread.start()
    assert inside.wait(10)
    with pytest.raises(TimeoutError, match="1 calls"):
        state.shut(0.01)
    state.opened()  # a client that was left alone would not be; here the same call stands for a new one
    seen: list[tuple[bool, bool]] = []
    closer = threading.Thread(target=lambda: seen.append((state.shut(10), left.is_set())))
    closer.start()
    leave.set()
    closer.join(10)
    thread.join(10)
    assert seen == [(True, True)], "it returned when the call had left, not before"


def test_a_forked_child_is_refused_and_does_not_close() -> None:
    """notes of Mooncake and nixl: a call in the child hangs it, or its parent."""
    state = OpenState("x")
    state.opened()
    pid = os.fork()
    if pid == 0:
        try:
            with state.inside():
                os._exit(1)
        except RuntimeError as exc:
            os._exit(0 if "fork" in str(exc) and not state.shut(0.1) else 2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    with state.inside():
        pass


def test_only_registered_memory_has_an_address() -> None:
    memory = memoryview(mmap.mmap(-1, 8 * PAGE))
    ranges = Ranges()
    page = memory[2 * PAGE : 3 * PAGE]
    with pytest.raises(ValueError, match="outside"):
        ranges.addresses([page], PAGE)
    start = address_of(memory)
    assert ranges.add(start, 4 * PAGE)
    assert ranges.addresses([page, memory[:PAGE]], PAGE) == [start + 2 * PAGE, start]
    with pytest.raises(ValueError, match="outside"):
        ranges.addresses([memory[4 * PAGE : 5 * PAGE]], PAGE)
    with pytest.raises(ValueError, match="outside"):
        ranges.addresses([memory[3 * PAGE + 1 : 4 * PAGE + 1]], PAGE)
    with pytest.raises(ValueError, match="expected 4096"):
        ranges.addresses([memory[: PAGE - 1]], PAGE)


def test_a_range_is_registered_once() -> None:
    ranges = Ranges()
    assert ranges.add(1000, 100)
    assert not ranges.add(1000, 100)
    assert not ranges.add(1010, 20)
    for start, nbytes in ((950, 100), (1050, 100), (900, 300)):
        with pytest.raises(ValueError, match="overlaps"):
            ranges.add(start, nbytes)
    with pytest.raises(ValueError, match="empty"):
        ranges.add(0, 0)
    assert ranges.add(1100, 10)
    assert ranges.add(0, 10)
    assert ranges.starts() == [0, 1000, 1100]
    assert ranges.nbytes() == 120
    assert not ranges.covers(1090, 20), "two ranges are two registrations, even side by side"
    ranges.drop(1000)
    assert not ranges.covers(1000, 1)
    assert ranges.add(1000, 50)


def test_each_holder_gets_a_directory_and_a_freed_one_is_used_again(tmp_path: Path) -> None:
    root = str(tmp_path / "a" / "b")
    first, second = claim(root), claim(root)
    assert [first.path, second.path] == [f"{root}/slot-0", f"{root}/slot-1"]
    (Path(first.path) / "kept").touch()
    first.release()
    first.release()
    again = claim(root)
    assert again.path == first.path
    assert (Path(again.path) / "kept").exists()
    again.release()
    second.release()


def test_a_dead_process_frees_its_directory(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        claim(str(tmp_path))
        os._exit(0)
    os.waitpid(pid, 0)
    slot = claim(str(tmp_path))
    assert slot.path.endswith("slot-0")
    slot.release()


def test_a_key_is_written_by_one_thread_at_a_time() -> None:
    turns = Turns(10.0)
    entered = threading.Event()
    order: list[str] = []

    def other() -> None:
        with turns.of({"b", "c"}):
            order.append("second")
            entered.set()

    with turns.of({"a", "b"}):
        thread = threading.Thread(target=other)
        thread.start()
        with turns.of({"d"}):
            order.append("first")
        assert not entered.is_set()
    thread.join(10)
    assert order == ["first", "second"]


def test_a_stuck_writer_holds_others_for_a_while_only() -> None:
    turns = Turns(0.01)
    with turns.of({"a"}):
        with turns.of({"a", "b"}):
            pass
        with turns.of({"b"}):
            pass
    with turns.of({"a"}):
        pass
