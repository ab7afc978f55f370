"""One real SGLang at a time, shared by the tests of its topology; each test begins detached with an empty cache."""

from collections.abc import Iterator

import pytest
from tests.rigs.procs import ProcessFailed
from tests.rigs.sglang_server import Fleet, Stack

PLACES = {"none": 0, "tp1": 1, "tp2": 2, "dp2": 3, "dpattention": 4, "startup": 5}  # tests without a server come first


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of a topology in a row, so that each server is started once."""
    mine = [item for item in items if "tests/sglang/" in str(item.path)]
    for item in mine:
        item.add_marker(pytest.mark.sglang)
    places = [index for index, item in enumerate(items) if item in mine]
    for place, item in zip(places, sorted(mine, key=_topology), strict=True):
        items[place] = item


def _topology(item: pytest.Item) -> int:
    callspec = getattr(item, "callspec", None)
    named = callspec.params.get("topology") if callspec is not None else None
    return PLACES[named or ("tp1" if "stack" in getattr(item, "fixturenames", ()) else "none")]


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Starts servers; stops them at the end."""
    made = Fleet(tmp_path_factory.mktemp("sglang"))
    try:
        yield made
    finally:
        made.stop()


@pytest.fixture
def topology() -> str:
    """Overridden by parametrization."""
    return "tp1"


@pytest.fixture
def stack(fleet: Fleet, topology: str) -> Stack:
    """The stack of the test's topology, clean."""
    running = fleet.get(topology)
    try:
        running.clean()
    except (ProcessFailed, OSError):  # what an earlier test left, which has failed by itself
        fleet.stop()
        running = fleet.get(topology)
        running.clean()
    return running
