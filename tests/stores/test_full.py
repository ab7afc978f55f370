"""A store that is full: what it said it stored is there whole, what it refused is no error, and room is used again."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.rigs.stores.base import Stand
from tests.rigs.stores.host import CallFailed, Host
from tests.stores.conftest import line_id, lines, started

pytestmark = pytest.mark.stores

BATCH = 32


@pytest.fixture(params=lines(small=True), ids=line_id)
def small(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stand]:
    """A store with room for about ``small_pages``."""
    line = request.param
    with ExitStack() as stack:
        yield started(line, tmp_path / line.name, stack, small=True)


def fill(host: Host, stand: Stand, first: int) -> tuple[list[int], int]:
    """Write three times what fits; returns the numbers said to be stored, and how many were not."""
    stored: list[int] = []
    refused = 0
    for start in range(first, first + 3 * stand.small_pages, BATCH):
        numbers = list(range(start, start + BATCH))
        try:
            done = host.put(numbers)
        except CallFailed:  # allowed only when nothing of the batch was stored; then nothing counts
            done = [False] * BATCH
        stored += [n for n, yes in zip(numbers, done, strict=True) if yes]
        refused += done.count(False)
    return stored, refused


def read(host: Host, numbers: list[int]) -> list[str]:
    """``get`` in batches."""
    return [item for i in range(0, len(numbers), BATCH) for item in host.get(numbers[i : i + BATCH])]


def test_a_full_store_refuses_or_evicts_and_never_lies(small: Stand) -> None:
    """F62: ENOSPC and its like end in refused writes; reads go on; room that comes free is used."""
    with Host(small) as host:
        host.open()
        stored, refused = fill(host, small, 10_000)
        assert stored
        got = read(host, stored)
        assert set(got) <= {"hit", "miss"}, set(got)
        if small.evicts_when_full:
            assert got.count("hit") > small.small_pages // 4
        else:
            assert refused > 0
            assert got == ["hit"] * len(stored)
            unsaid = [n for n in range(10_000, 10_000 + 3 * small.small_pages) if n not in set(stored)]
            assert "wrong" not in read(host, unsaid)
        for start in range(0, len(stored), BATCH):
            host.delete(stored[start : start + BATCH])
        again, _ = fill(host, small, 20_000)
        assert len(again) > small.small_pages // 4, "room that came free is used"
        assert "wrong" not in read(host, again)
        host.close()
