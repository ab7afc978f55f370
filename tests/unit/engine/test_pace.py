"""F70: an engine that restarts ten times in a minute is re-attached once per restart, and ever later, up to the cap."""

import pytest

from hicache_sidecar.engine.pace import FIRST_PAUSE_S, MAX_PAUSE_S, STEADY_S, Pace


def middle(low: float, high: float) -> float:
    return (low + high) / 2


def waits(pace: Pace, restarts: list[float]) -> list[float]:
    """How long each restart waits for its one attempt; one that comes meanwhile is part of it."""
    found, free_at = [], 0.0
    for at in restarts:
        if at < free_at:
            continue
        free_at = max(at, pace.not_before(at))
        found.append(free_at - at)
        pace.tried(free_at)
    return found


def test_the_first_restart_is_answered_at_once() -> None:
    pace = Pace(middle)
    assert waits(pace, [100.0]) == [pytest.approx(FIRST_PAUSE_S / 2)]


def test_ten_restarts_in_a_minute_wait_longer_and_longer() -> None:
    """Every six seconds: pauses double with each attempt, so fewer and fewer restarts get one of their own."""
    pace = Pace(middle)
    found = waits(pace, [6.0 * i for i in range(10)])
    assert len(found) < 10
    assert found[0] < FIRST_PAUSE_S
    assert found[-1] > 2.0
    assert sum(found) > 10.0


def test_the_pause_doubles_up_to_the_cap() -> None:
    pace = Pace(middle)
    now, pauses = 0.0, []
    for _ in range(10):
        now = max(now, pace.not_before(now))
        pace.tried(now)
        pauses.append(pace.not_before(now) - now)
        now += 1.0  # it restarts again as soon as it is attached
    assert pauses[:5] == pytest.approx([2.0, 4.0, 8.0, 16.0, 32.0])
    assert pauses[5:] == pytest.approx([MAX_PAUSE_S] * 5)


def test_a_state_that_held_ends_the_growth() -> None:
    pace = Pace(middle)
    for now in (0.0, 10.0, 20.0):
        pace.not_before(now)
        pace.tried(now)
    assert pace.held_until == pytest.approx(28.0)
    assert pace.not_before(28.0 + STEADY_S) == pytest.approx(28.0)
    now = 28.0 + STEADY_S + 1
    assert pace.not_before(now) - now == pytest.approx(FIRST_PAUSE_S / 2)


def test_the_jitter_spreads_a_rack() -> None:
    ends = []
    for draw in (lambda low, high: low, lambda low, high: high):
        pace = Pace(draw)
        pace.not_before(0.0)
        pace.tried(0.0)
        ends.append(pace.not_before(0.0))
    assert ends == [pytest.approx(1.0), pytest.approx(3.0)]


def test_a_thousand_restarts_overflow_nothing() -> None:
    pace = Pace(middle)
    for i in range(5000):
        pace.tried(float(i))
    assert pace.not_before(5000.0) == pytest.approx(4999.0 + MAX_PAUSE_S)
