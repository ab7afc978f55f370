"""A store that says which page has arrived: it is checked there and then, once, and by nobody else."""

from collections.abc import Callable, Iterator, Sequence

import pytest
from tests.unit.cache.support import MemoryStore, geometry

from hicache_hooks.backends.base import Got, Manifest
from hicache_hooks.cache.page_io import PageIo
from hicache_hooks.cache.pages import PageFormat
from hicache_hooks.cache.pools import HostPool
from hicache_hooks.guard import Guard

PAGES = 6
NAMESPACE = "ns"


class Telling(MemoryStore):
    """Says of each page that it is there, as soon as it is."""

    manifest = Manifest(name="telling", layouts=("page_first",))

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []
        self.answer: dict[str, Got] = {}
        self.told = True

    def batch_get(
        self, keys: Sequence[str], pages: Sequence[memoryview], *, arrived: Callable[[str], None] | None = None
    ) -> list[Got]:
        self.told = arrived is not None
        results = []
        for key, page in zip(keys, pages, strict=True):
            results.append(self.answer.get(key) or super().batch_get([key], [page])[0])
            if arrived is not None and key in self.data:
                arrived(key)
        self.events.append("back")
        return results

    def health(self) -> dict[str, object]:
        return {}

    open = register = delete = clear = lambda self, *args: 0  # type: ignore[assignment]


class Noted(PageFormat):
    """Notes every check."""

    events: list[str]

    def check(self, page: memoryview, key: str) -> str | None:
        self.events.append(key)
        return super().check(page, key)


class Rig:
    def __init__(self, layout: str, calls: int = 0) -> None:
        g = geometry(layout)
        self.host = HostPool(g, PAGES)
        self.store = Telling()
        self.pages = Noted(g.payload_bytes, NAMESPACE)
        self.pages.events = self.store.events
        self.guard = Guard(self.store, manifest=Manifest(name="telling", layouts=(layout,), calls=calls), threads=False)
        self.io = PageIo(self.guard, self.host, self.pages)
        self.keys = [f"{NAMESPACE}.{i}" for i in range(PAGES)]
        self.host._buffers.random_()
        assert self.io.write(self.keys, range(PAGES)) == [True] * PAGES
        self.host._buffers.fill_(0)


@pytest.fixture(params=["page_first", "layer_first"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    made = Rig(request.param)
    yield made
    made.guard.close()


def test_each_page_is_checked_once_and_within_the_call(rig: Rig) -> None:
    assert rig.io.read(rig.keys, range(PAGES)) == [True] * PAGES
    assert rig.store.events == [*rig.keys, "back"]


def test_a_torn_page_that_arrived_is_a_miss_and_is_set_aside(rig: Rig) -> None:
    """F80: the other pages of the batch count."""
    torn = bytearray(rig.store.data[rig.keys[2]])
    torn[5] ^= 1
    rig.store.data[rig.keys[2]] = bytes(torn)
    assert rig.io.read(rig.keys, range(PAGES)) == [True, True, False, True, True, True]
    assert rig.store.aside == [(rig.keys[2], "checksum")]


def test_what_the_store_answers_in_the_end_counts(rig: Rig) -> None:
    """It arrived, and then the store thought better of it."""
    rig.store.answer = {rig.keys[0]: Got.ERROR, rig.keys[3]: Got.MISS}
    assert rig.io.read(rig.keys, range(PAGES)) == [False, True, True, False, True, True]
    assert rig.store.aside == []


def test_a_page_that_was_not_told_is_checked_after_the_call(rig: Rig) -> None:
    missing = rig.keys[1]
    value = rig.store.data.pop(missing)  # the store answers a hit and fills nothing
    rig.store.answer = {missing: Got.HIT}
    assert rig.io.read(rig.keys, range(PAGES)) == [True, False, True, True, True, True]
    assert rig.store.events[-2:] == ["back", missing]
    rig.store.data[missing] = value


def test_a_key_that_is_asked_for_twice_has_two_buffers(rig: Rig) -> None:
    """What was found of one buffer says nothing about the other."""
    first, second = rig.keys[:2]
    assert rig.io.read([first, second, first], [0, 1, 2]) == [True] * 3
    assert rig.store.events.count(first) == 3, "told of it twice, and one buffer left to look at"


def test_where_calls_wait_for_turns_pages_are_checked_after_the_turn() -> None:
    """Else the next call would wait for the sums of this one."""
    rig = Rig("page_first", calls=1)
    assert rig.io.read(rig.keys, range(PAGES)) == [True] * PAGES
    assert not rig.store.told
    assert rig.store.events == ["back", *rig.keys]
    rig.guard.close()
