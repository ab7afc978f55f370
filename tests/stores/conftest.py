"""Stands of the conformance suite: one started store per module and stand, one process that opens it."""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.rigs.stores.base import Stand
from tests.rigs.stores.catalogue import CATALOGUE, Line
from tests.rigs.stores.host import Host

REQUIRED = "HICACHE_STORES_REQUIRED"  # 1: a store that this machine lacks is a failure, not a skip


def lines(*, server: bool = False, real: bool = False) -> list[Line]:
    """The catalogue, or those with a server, those that are the real store."""
    return [
        line for line in CATALOGUE if (not server or line.stand_class().has_server) and not (real and line.emulated)
    ]


def line_id(line: Line) -> str:
    """Emulated stands are named so."""
    return line.id


def started(line: Line, root: Path, stack: ExitStack, *, small: bool = False) -> Stand:
    """A running stand, or a skip that names what this machine lacks."""
    missing = line.stand_class().missing()
    if missing is not None and os.environ.get(REQUIRED) == "1":
        pytest.fail(f"{line.id}: {missing}, and {REQUIRED} is 1: .ci/run installs everything")
    if missing is not None:
        pytest.skip(f"{line.id}: {missing}")
    if small and not line.stand_class().can_be_small:
        pytest.skip(f"{line.id}: {line.stand_class().why_not_small}")
    return stack.enter_context(line.make(root, small=small))


@pytest.fixture(scope="module", params=lines(), ids=line_id)
def stand(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    """A healthy store that the checks of a module share; each check uses keys of its own."""
    with ExitStack() as stack:
        yield started(request.param, tmp_path_factory.mktemp(request.param.name), stack)


@pytest.fixture(scope="module")
def shared_host(stand: Stand) -> Iterator[Host]:
    """One process per stand, so that a vendor's package is imported once."""
    with Host(stand) as host:
        yield host


@pytest.fixture
def host(shared_host: Host) -> Iterator[Host]:
    """The backend, opened directly."""
    shared_host.open()
    yield shared_host
    shared_host.close()


@pytest.fixture
def own_host(stand: Stand) -> Iterator[Host]:
    """A process of its own, for checks that may leave it in pieces. Nothing is opened."""
    with Host(stand) as host:
        yield host
