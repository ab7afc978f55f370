"""Real processes that are gone after each test."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.rigs.procs import Processes


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    with Processes(tmp_path) as started:
        yield started
