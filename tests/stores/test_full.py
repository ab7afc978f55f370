"""A store that is full: what it said it stored is there whole, what it refused is no error, and room is used again."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from tests.rigs.stores.base import Stand
from tests.rigs.stores.host import CallFailed, Host
from tests.stores.conftest import line_id, lines, started

pytestmark = pytest.mark.stores

BATCH = 32
IN_VAIN = 4  # batches in a row of which nothing was stored


@pytest.fixture(params=lines(), ids=line_id)
def small(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stand]:
    """A store with room for about ``small_pages``."""
    line = request.param
    with ExitStack() as stack:
        yield started(line, tmp_path / line.name, stack, small=True)


def fill(host: Host, stand: Stand, first: int) -> tuple[list[int], list[int]]:
    """Write three times what fits, or until nothing is taken any more; numbers said to be stored, and the others."""
    stored: list[int] = []
    refused: list[int] = []
    in_vain = 0
    for start in range(first, first + 3 * stand.small_pages, BATCH):
        numbers = list(range(start, start + BATCH))
        try:
            done = host.put(numbers)
        except CallFailed:  # allowed only when nothing of the batch was stored; then nothing counts
            done = [False] * BATCH
        stored += [n for n, yes in zip(numbers, done, strict=True) if yes]
        refused += [n for n, yes in zip(numbers, done, strict=True) if not yes]
        in_vain = 0 if any(done) else in_vain + 1
        if in_vain == IN_VAIN:
            break
    return stored, refused


def read(host: Host, numbers: list[int]) -> list[str]:
    """``get`` in batches."""
    return [item for i in range(0, len(numbers), BATCH) for item in host.get(numbers[i : i + BATCH])]


def room_again(host: Host, small: Stand, stored: list[int]) -> list[int]:
    """Make room, as an operator would where the store does not do it; what is stored then."""
    if small.delete_frees:
        for start in range(0, len(stored), BATCH):
            host.delete(stored[start : start + BATCH])
    else:
        small.more_room()
    deadline = time.monotonic() + small.back_s
    while time.monotonic() < deadline:
        with suppress(CallFailed):
            if any(host.put([19_999])):
                break
    return fill(host, small, 20_000)[0]


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
            assert refused
            assert got == ["hit"] * len(stored)
            assert "wrong" not in read(host, refused)
        again = room_again(host, small, stored)
        assert len(again) > small.small_pages // 4, "room that came free is used"
        assert "wrong" not in read(host, again)
        if not small.evicts_when_full and not small.delete_frees:
            assert read(host, stored) == ["hit"] * len(stored), "what was stored before it was full"
        host.close()
        if small.has_server:
            host.process.kill()  # a client that waits for answers to its writes need not be waited for
