"""A real engine without a sidecar, shared by the tests of one module."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.rigs.procs import Engine, Processes

# A small model and small pools: a prompt of some hundred bytes spans many pages, and L1 overflows soon.
SMALL = ("--layers", "2", "--hidden", "64", "--head-dim", "16", "--seed", "7", "--context", "1024")
POOLS = ("--l1-tokens", "2048", "--l2-tokens", "16384")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Two replicas."""
    with Processes(tmp_path_factory.mktemp("engine")) as processes:
        yield processes.engine(None, "--dp", "2", *SMALL, *POOLS)


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    """For tests that start and end their own."""
    with Processes(tmp_path) as started:
        yield started
