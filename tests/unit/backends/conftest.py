"""A fresh scriptable store, and fresh records of sets, for each test."""

from collections.abc import Iterator

import pytest
from tests.rigs.backends import BK, Rig
from tests.unit.backends.support import FakeSet


@pytest.fixture
def rig() -> Iterator[Rig]:
    BK.reset()
    FakeSet.made.clear()
    yield BK.rig()
    FakeSet.start_error = None
    FakeSet.stuck = []
    BK.reset()
