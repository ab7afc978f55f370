"""Hello, welcome, heartbeat and back-off as times; no socket, no thread."""

import math

import pytest

from hicache_hooks.session import (
    BACKOFF_MAX_S,
    BEAT_SOON_S,
    HEARTBEAT_RANGE_S,
    MAX_WAIT_S,
    REWAKE_S,
    UNHEARD_S,
    WELCOME_S,
    Session,
)


def test_every_wait_is_finite() -> None:
    """F102: no infinite wait on a dead peer."""
    session = Session()
    session.renew(0.0)
    assert session.timeout_ms(0.0, None) == MAX_WAIT_S * 1000
    session.hello_sent(0.0)
    assert session.timeout_ms(0.0, None) == WELCOME_S * 1000
    session.welcome(0.0, 60.0)
    assert session.timeout_ms(0.0, None) == MAX_WAIT_S * 1000


def test_a_wait_is_rounded_up_so_that_nothing_spins() -> None:
    session = Session()
    session.renew(0.0)
    session.hello_sent(0.0)
    session.welcome(0.0, 1.0)
    assert session.timeout_ms(0.9999, None) == 1
    assert session.timeout_ms(1.0, None) == 0
    assert session.beat_due(1.0)


def test_a_change_is_told_soon_unless_an_answer_told_it_already() -> None:
    session = Session()
    session.renew(0.0)
    session.hello_sent(0.0)
    session.welcome(0.0, 1.0)
    session.changed(0.1)
    session.changed(0.11)  # does not put it off
    assert not session.beat_due(0.1)
    assert session.timeout_ms(0.1, None) <= BEAT_SOON_S * 1000 + 1
    assert session.beat_due(0.1 + BEAT_SOON_S)
    assert not session.beat_due(0.3), "told once"
    session.changed(0.4)
    session.reported(0.4)
    assert not session.beat_due(0.9)


def test_a_session_that_never_lived_is_asked_less_and_less_often() -> None:
    session = Session()
    now, gaps = 0.0, []
    session.renew(now)
    for _ in range(12):
        session.hello_sent(now)
        session.back_off(now)
        gap = session.timeout_ms(now, None) / 1000 if not session.hello_due(now) else 0.0
        gaps.append(gap)
        now += gap
        assert session.hello_due(now)
    assert gaps[0] == 0.0, "the first time at once"
    assert gaps == sorted(gaps)
    assert gaps[-1] == BACKOFF_MAX_S


def test_a_session_that_lived_resets_the_back_off() -> None:
    session = Session()
    for _ in range(5):
        session.back_off(0.0)
    session.hello_sent(100.0)
    session.welcome(100.0, 1.0)
    assert not session.beat_due(100.5)
    assert session.beat_due(101.0)
    session.back_off(102.0)
    assert session.hello_due(102.0)


def test_a_report_in_an_answer_puts_off_the_next_heartbeat() -> None:
    """It says as much; and a session that answers all the time has lived, too."""
    session = Session()
    for _ in range(5):
        session.back_off(0.0)
    session.hello_sent(100.0)
    session.reported(100.0)
    session.welcome(100.0, 1.0)
    for now in (100.6, 101.2):
        session.reported(now)
        assert not session.beat_due(now + 0.9)
    assert session.beat_due(102.2)
    session.back_off(102.3)
    assert session.hello_due(102.3)


@pytest.mark.parametrize(("told", "lowest"), [(0.0, 0.1), (-5.0, 0.1), (math.nan, 60.0), (math.inf, 60.0), (1e9, 60.0)])
def test_a_refusals_time_is_bounded(told: float, lowest: float) -> None:
    session = Session()
    session.refused(0.0, told)
    assert not session.hello_due(lowest - 0.01)
    assert session.hello_due(max(lowest, BACKOFF_MAX_S))


@pytest.mark.parametrize("told", [0.0, -1.0, math.nan, math.inf, 1e9])
def test_a_heartbeats_time_is_bounded(told: float) -> None:
    session = Session()
    session.hello_sent(0.0)
    session.welcome(0.0, told)
    assert HEARTBEAT_RANGE_S[0] * 1000 <= session.timeout_ms(0.0, None) <= HEARTBEAT_RANGE_S[1] * 1000


def test_a_scheduler_that_does_not_act_is_woken_again_but_not_at_once() -> None:
    session = Session()
    session.hello_sent(0.0)
    session.welcome(0.0, 60.0)
    assert not session.deadline_due(0.9, 1.0)
    assert session.deadline_due(1.0, 1.0)
    assert not session.deadline_due(1.01, 1.0)
    assert session.timeout_ms(1.01, 1.0) > 0
    assert session.deadline_due(1.0 + REWAKE_S, 1.0)
    assert session.deadline_due(1.3, 1.2), "another deadline is another wake"


def test_a_socket_without_a_peer_is_replaced_in_time() -> None:
    session = Session()
    session.renew(0.0)
    assert not session.unheard(UNHEARD_S - 0.1)
    assert session.unheard(UNHEARD_S)
    session.hello_sent(1.0)
    assert not session.unheard(UNHEARD_S)


def test_an_unwelcome_hello_is_noticed() -> None:
    session = Session()
    session.renew(0.0)
    assert not session.unwelcome(10.0), "nothing was said"
    session.hello_sent(0.0)
    assert not session.unwelcome(WELCOME_S - 0.1)
    assert session.unwelcome(WELCOME_S)
    session.welcome(0.0, 1.0)
    assert not session.unwelcome(WELCOME_S)
