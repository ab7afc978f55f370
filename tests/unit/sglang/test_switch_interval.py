"""The interpreter's switch interval follows the operation, and the engine gets its own value back."""

import sys
from collections.abc import Iterator

import pytest

from hicache_hooks.sglang.switch_interval import SHORT_S, SwitchInterval

USUAL_S = 0.004


@pytest.fixture(autouse=True)
def usual() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(USUAL_S)
    yield
    sys.setswitchinterval(before)


def test_short_while_told() -> None:
    turns = SwitchInterval()
    turns.follow(False)
    assert sys.getswitchinterval() == pytest.approx(USUAL_S, abs=2e-6)
    for _ in range(2):
        turns.follow(True)
        assert sys.getswitchinterval() == pytest.approx(SHORT_S, abs=2e-6)
    for _ in range(2):
        turns.follow(False)
        assert sys.getswitchinterval() == pytest.approx(USUAL_S, abs=2e-6)


@pytest.mark.parametrize("interval_s", [0.0001, 0.000123, 0.005, 0.0123])
def test_the_engines_own_value_comes_back_each_time(interval_s: float) -> None:
    """Python cuts to microseconds; a hundred operations must not wear it down. A shorter one stays as it is."""
    turns = SwitchInterval()
    sys.setswitchinterval(interval_s)
    own = sys.getswitchinterval()
    for _ in range(100):
        turns.follow(True)
        assert sys.getswitchinterval() <= min(own, SHORT_S + 1e-6)
        turns.follow(False)
    assert sys.getswitchinterval() == own
