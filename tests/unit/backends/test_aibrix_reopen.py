"""RocksDB that takes no write any more: when it is opened again, and when it is left alone. The real one, on a disk
that is full: ``tests/stores/test_full.py``.
"""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from hicache_hooks.backends import aibrix_reopen
from hicache_hooks.backends.aibrix_reopen import RETRY_S, ROOM, UNASKED_S, Reopener
from hicache_hooks.backends.native import OpenState

WAIT_S = 10.0
LOG = 1 << 20


class Database:
    """What the vendor's binding does once a write found no space: every later one fails, until it is made anew."""

    def __init__(self) -> None:
        self.broken = False
        self.writes: list[bytes] = []

    def put(self, key: bytes, value: bytes) -> None:
        if self.broken:
            raise Exception("IO error: No space left on device")
        self.writes.append(key)

    def delete(self, key: bytes) -> None:
        self.put(key, b"")


class Connector:
    """The vendor's, in the one part that is used."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.store: Database | None = Database()
        self.opens = True
        self.opened = 0

    def close(self) -> None:
        """Fails as the real one may: the database stays referenced."""

    def open(self) -> SimpleNamespace:
        self.opened += 1
        if self.opens:
            self.store = Database()
        return SimpleNamespace(is_ok=lambda: self.opens)


class Rig:
    def __init__(self, path: Path, *, unasked: bool = False) -> None:
        self.now = 100.0
        self.told = 0
        self.state = OpenState("aibrix")
        self.state.opened()
        self.connector = Connector(path)
        self.reopener = Reopener(
            self.connector, self.state, unasked=unasked, reopened=self.tell, clock=lambda: self.now
        )

    def tell(self) -> None:
        self.told += 1

    def fail(self) -> None:
        """A write found no space."""
        assert self.connector.store is not None
        self.connector.store.broken = True
        self.reopener.refused()


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets how many bytes the file system has free."""

    def set_free(nbytes: int) -> None:
        monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=nbytes, f_frsize=1))

    set_free(1 << 40)
    return set_free


@pytest.fixture
def rig(tmp_path: Path, free: Callable[[int], None]) -> Rig:
    (tmp_path / "wal").mkdir()
    (tmp_path / "wal" / "000004.log").write_bytes(bytes(LOG))
    return Rig(tmp_path)


def test_it_is_opened_again_once_and_what_was_known_is_dropped(rig: Rig) -> None:
    """F62: writes resume without an attach."""
    rig.fail()
    rig.reopener.heal()
    assert (rig.connector.opened, rig.told, rig.reopener.count) == (1, 1, 1)
    rig.now += RETRY_S
    rig.reopener.heal()
    assert rig.connector.opened == 1
    assert rig.connector.store is not None
    assert set(rig.connector.store.writes) == {aibrix_reopen.PROBE}
    with rig.state.inside():
        pass


def test_nothing_is_looked_at_while_every_page_is_taken(rig: Rig) -> None:
    rig.reopener.heal()
    assert rig.connector.store is not None
    assert rig.connector.store.writes == []


def test_a_database_that_takes_writes_is_left_open(rig: Rig) -> None:
    """A page may be refused for other reasons."""
    rig.reopener.refused()
    rig.reopener.heal()
    assert rig.connector.opened == 0


def test_without_room_for_its_log_it_stays_open_for_reads(rig: Rig, free: Callable[[int], None]) -> None:
    rig.fail()
    free(LOG + ROOM - 1)
    rig.reopener.heal()
    assert rig.connector.opened == 0
    free(LOG + ROOM)
    rig.reopener.heal()
    assert rig.connector.opened == 0, "looked at once in a while"
    rig.now += RETRY_S
    rig.reopener.heal()
    assert rig.connector.opened == 1


def test_one_that_does_not_open_is_tried_again(rig: Rig) -> None:
    rig.fail()
    rig.connector.opens = False
    rig.reopener.heal()
    assert (rig.connector.opened, rig.told) == (1, 0)
    rig.connector.opens = True
    rig.now += RETRY_S
    rig.reopener.heal()
    assert (rig.connector.opened, rig.told) == (2, 1)


def test_behind_l1_nobody_says_that_a_write_failed(tmp_path: Path, free: Callable[[int], None]) -> None:
    """The vendor writes later, and tells its log alone."""
    rig = Rig(tmp_path, unasked=True)
    rig.reopener.heal()
    assert rig.connector.store is not None
    rig.connector.store.broken = True
    rig.reopener.heal()
    assert rig.connector.opened == 0
    rig.now += UNASKED_S
    rig.reopener.heal()
    assert rig.connector.opened == 1


def test_it_is_not_replaced_under_a_call(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """F27. The call that is inside ends as it would, and the next put tries again."""
    monkeypatch.setattr(aibrix_reopen, "ALONE_S", 0.01)
    rig.fail()
    with rig.state.inside():
        rig.reopener.heal()
        assert rig.connector.opened == 0
    with rig.state.inside():
        pass
    rig.now += RETRY_S
    rig.reopener.heal()
    assert rig.connector.opened == 1


def test_calls_that_come_meanwhile_wait_for_the_new_one(rig: Rig) -> None:
    entered = threading.Event()
    began = threading.Event()

    def call() -> None:
        began.set()
        with rig.state.inside():
            entered.set()

    thread = threading.Thread(target=call)
    with rig.state.alone(WAIT_S):
        thread.start()
        assert began.wait(WAIT_S)
        assert not entered.wait(0.05)
    assert entered.wait(WAIT_S)
    thread.join(WAIT_S)


def test_a_closed_client_is_not_opened_again(rig: Rig) -> None:
    rig.fail()
    assert rig.state.shut(WAIT_S)
    rig.reopener.heal()
    assert rig.connector.opened == 0
