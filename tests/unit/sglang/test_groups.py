"""Where storage groups are made: all ranks meet first, or nobody makes any (F114)."""

import datetime
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import PrefixStore, TCPStore

from hicache_hooks.sglang.groups import GROUPS, StorageGroups, all_here

WAIT_S = 10.0
SHORT_S = 0.05


class KeyValues:
    """The engine's store, between threads."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._came = 0
        self._changed = threading.Condition()

    def add(self, key: str, amount: int) -> int:
        with self._changed:
            self._came += amount
            return self._came

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        with self._changed:
            if self._values.get(key, b"") == expected.encode():
                self._values[key] = desired.encode()
                self._changed.notify_all()
            return self._values[key]

    def wait(self, keys: list[str], timeout: datetime.timedelta) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: set(keys) <= set(self._values), timeout.total_seconds()):
                raise RuntimeError("timeout")


class Controller:
    """Makes and destroys groups as the engine's does."""

    enable_storage = False

    def __init__(self) -> None:
        self.made = 0
        for name in GROUPS:
            setattr(self, name, [])

    def _create_sync_groups(self) -> list[Any]:
        self.made += 1
        return [object()]


def meet(store: KeyValues, *waits_s: float, ranks: int) -> list[bool]:
    """All of them at once; each one's answer."""
    answers = [False] * len(waits_s)

    def come(place: int, wait_s: float) -> None:
        answers[place] = all_here(store, "k", ranks, wait_s)

    threads = [threading.Thread(target=come, args=each) for each in enumerate(waits_s)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    return answers


def test_all_come() -> None:
    assert meet(KeyValues(), WAIT_S, WAIT_S, WAIT_S, ranks=3) == [True] * 3


def test_one_whose_hooks_did_not_load_costs_the_others_the_wait_alone() -> None:
    """Nobody enters a collective; and who comes late hears the same."""
    store = KeyValues()
    assert meet(store, SHORT_S, SHORT_S, ranks=3) == [False] * 2
    assert meet(store, WAIT_S, ranks=3) == [False]


def test_torchs_own_store_keeps_what_the_meeting_needs() -> None:
    """Atomic sums, a first writer that wins, and a wait that ends: also after a wait that timed out."""
    server = TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", server.port, 2, False, wait_for_workers=False)
    assert not all_here(PrefixStore("alone", server), "k", 2, SHORT_S)
    assert not all_here(PrefixStore("alone", client), "k", 2, WAIT_S)
    stores = PrefixStore("both", server), PrefixStore("both", client)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda store: all_here(store, "k", 2, WAIT_S), stores)) == [True, True]


def test_groups_are_made_once_when_all_are_there() -> None:
    controller = Controller()
    groups = StorageGroups(controller)
    assert groups.make_at_start(KeyValues(), 1)
    assert groups.make_at_start(KeyValues(), 1)
    assert controller.made == len(GROUPS)


def test_an_engine_that_was_started_with_storage_has_its_own() -> None:
    controller = Controller()
    setattr(controller, GROUPS[0], ["the engine's"])
    assert StorageGroups(controller).make_at_start(KeyValues(), 2)
    assert controller.made == 0


@pytest.mark.parametrize("broken", ["store", "engine"])
def test_trouble_at_the_start_never_reaches_the_engine(broken: str) -> None:
    """A plugin failure never stops SGLang from starting."""
    controller, store = Controller(), KeyValues()
    setattr(*((store, "add") if broken == "store" else (controller, "_create_sync_groups")), lambda *_: 1 // 0)
    assert not StorageGroups(controller).make_at_start(store, 1)
