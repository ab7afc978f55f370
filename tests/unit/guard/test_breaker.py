"""The breaker as a table of what opens it, what closes it, and how long it holds. A hand-turned clock, no threads."""

import random
from collections.abc import Callable

import pytest

from hicache_hooks.breaker import Admit, Breaker, BreakerSettings, Phase


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def made(
    clock: Clock, *, traffic_probes: bool = False, uniform: Callable[[], float] = lambda: 0.5, **kw: float
) -> Breaker:
    values = {"min_calls": 10, "hold_s": 2.0, **kw}
    return Breaker(BreakerSettings(**values), clock=clock, uniform=uniform, traffic_probes=traffic_probes)  # type: ignore[arg-type]


def calls(breaker: Breaker, clock: Clock, n: int, *, failed: float = 0.0, took_s: float = 0.01) -> None:
    for _ in range(n):
        started = clock.now
        clock.now += took_s
        breaker.record(started, failed=failed)


def opened(clock: Clock, **kw: float) -> Breaker:
    breaker = made(clock, **kw)
    calls(breaker, clock, 10, failed=1.0)
    assert breaker.phase is Phase.OPEN
    return breaker


def probe(breaker: Breaker, clock: Clock, ok: bool) -> None:
    wait = breaker.probe_in_s()
    assert wait is not None
    clock.now += wait
    assert breaker.begin_probe()
    breaker.end_probe(ok)


def test_a_ratio_needs_its_sample(clock: Clock) -> None:
    breaker = made(clock)
    calls(breaker, clock, 9, failed=1.0)
    assert breaker.closed
    calls(breaker, clock, 1, failed=1.0)
    assert breaker.phase is Phase.OPEN
    assert breaker.snapshot().reason == "errors"
    assert breaker.snapshot().ratio == 1.0


@pytest.mark.parametrize(("bad", "good", "closed"), [(4, 6, True), (5, 5, False), (20, 80, True)])
def test_the_ratio_decides(clock: Clock, bad: int, good: int, closed: bool) -> None:
    """F69: 20 failures of 100 are what the counters say, and not yet half of the calls."""
    breaker = made(clock)
    calls(breaker, clock, good)
    calls(breaker, clock, bad, failed=1.0)
    assert breaker.closed is closed
    if closed:
        assert breaker.ratio() == pytest.approx(bad / (bad + good))


def test_a_call_weighs_its_failed_keys(clock: Clock) -> None:
    breaker = made(clock)
    calls(breaker, clock, 100, failed=0.2)
    assert breaker.closed
    assert breaker.ratio() == pytest.approx(0.2)


def test_old_calls_leave_the_window(clock: Clock) -> None:
    breaker = made(clock, window_s=10.0)
    calls(breaker, clock, 9, failed=1.0)
    clock.now += 11
    calls(breaker, clock, 9, failed=1.0)
    assert breaker.closed
    assert breaker.snapshot().calls == 9


def test_slow_calls_open_it_though_none_failed(clock: Clock) -> None:
    """F70: one bad replica slows all; a store slower than computing is of no use."""
    breaker = made(clock, slow_s=2.0, slow_ratio=0.8, window_s=60.0)
    calls(breaker, clock, 2)
    calls(breaker, clock, 7, took_s=2.5)
    assert breaker.closed
    calls(breaker, clock, 1, took_s=2.5)
    assert breaker.snapshot().reason == "slow"


def test_a_hung_store_costs_one_deadline(clock: Clock) -> None:
    """design.md, "Guarded backend": one timeout, not one per request, and not ``min_calls`` of them."""
    breaker = made(clock)
    calls(breaker, clock, 50)
    started = clock.now
    clock.now += 5
    breaker.record_timeout(started)
    assert breaker.snapshot().reason == "hung"


def test_one_timeout_beside_good_calls_is_only_counted(clock: Clock) -> None:
    breaker = made(clock)
    started = clock.now
    calls(breaker, clock, 50, took_s=0.1)
    breaker.record_timeout(started)
    assert breaker.closed
    assert 0 < breaker.ratio() < 0.1


def test_traffic_is_refused_until_probes_close_it(clock: Clock) -> None:
    breaker = opened(clock, probes_to_close=3, probe_gap_s=0.2)
    assert breaker.admit() is Admit.REFUSE
    clock.now += 1.9
    assert not breaker.begin_probe()
    for _ in range(3):
        assert breaker.admit() is Admit.REFUSE
        probe(breaker, clock, ok=True)
    assert breaker.closed
    assert breaker.admit() is Admit.PASS
    snapshot = breaker.snapshot()
    assert (snapshot.opened_for_s, snapshot.reason, snapshot.ratio, snapshot.opened_total) == (0.0, "", 0.0, 1)


def test_one_probe_at_a_time(clock: Clock) -> None:
    breaker = opened(clock)
    clock.now += 3
    assert breaker.begin_probe()
    assert breaker.phase is Phase.HALF_OPEN
    assert not breaker.begin_probe()
    assert breaker.probe_in_s() is None


def test_holds_grow_to_their_bound_while_probes_fail(clock: Clock) -> None:
    """F84: half-open probing with growing intervals."""
    breaker = opened(clock, hold_s=2.0, hold_max_s=20.0)
    holds = []
    for _ in range(6):
        holds.append(breaker.probe_in_s())
        probe(breaker, clock, ok=False)
    assert holds == [2.0, 4.0, 8.0, 16.0, 20.0, 20.0]
    assert breaker.opened_total == 1
    assert breaker.snapshot().opened_for_s == pytest.approx(sum(hold or 0 for hold in holds))


def test_one_bad_probe_after_good_ones_opens_again(clock: Clock) -> None:
    breaker = opened(clock, probes_to_close=3)
    probe(breaker, clock, ok=True)
    probe(breaker, clock, ok=True)
    probe(breaker, clock, ok=False)
    assert breaker.phase is Phase.OPEN
    probe(breaker, clock, ok=True)
    probe(breaker, clock, ok=True)
    assert breaker.phase is Phase.HALF_OPEN


def test_a_flapping_store_opens_ever_more_rarely(clock: Clock) -> None:
    """F84: BK toggles; the number of openings in a given time is bounded by the growth of the hold."""
    breaker = made(clock, hold_s=1.0, hold_max_s=60.0, probes_to_close=1, calm_s=60.0)
    until = clock.now + 600
    while clock.now < until:
        calls(breaker, clock, 10, failed=1.0)
        probe(breaker, clock, ok=True)
    assert breaker.opened_total < 20  # 1 + 2 + 4 ... + 60 + 60 ...; without growth 600


def test_a_calm_time_starts_with_the_short_hold_again(clock: Clock) -> None:
    breaker = opened(clock, hold_s=2.0, probes_to_close=1, calm_s=60.0)
    probe(breaker, clock, ok=False)
    probe(breaker, clock, ok=True)
    clock.now += 61
    calls(breaker, clock, 10, failed=1.0)
    assert breaker.probe_in_s() == 2.0


def test_holds_are_jittered_within_their_share(clock: Clock) -> None:
    rng = random.Random(5)
    holds = []
    for _ in range(200):
        breaker = opened(clock, hold_s=10.0, jitter=0.2, uniform=rng.random)  # type: ignore[arg-type]
        holds.append(breaker.probe_in_s() or 0.0)
    assert 8.0 <= min(holds) < 8.5
    assert 11.5 < max(holds) <= 12.0


def test_results_of_calls_from_before_the_change_are_ignored(clock: Clock) -> None:
    breaker = made(clock, probes_to_close=1)
    early = clock.now
    calls(breaker, clock, 10, failed=1.0)
    probe(breaker, clock, ok=True)
    for _ in range(20):  # they were inside the store when it opened
        breaker.record(early, failed=1.0)
        breaker.record_timeout(early)
    assert breaker.closed
    assert breaker.ratio() == 0.0


def test_traffic_may_be_the_probe(clock: Clock) -> None:
    breaker = made(clock, traffic_probes=True, probes_to_close=2)
    calls(breaker, clock, 10, failed=1.0)
    assert breaker.admit() is Admit.REFUSE
    clock.now += 2
    assert breaker.admit() is Admit.PROBE
    assert breaker.admit() is Admit.REFUSE
    breaker.end_probe(True)
    clock.now += 1
    assert breaker.admit() is Admit.PROBE
    breaker.end_probe(True)
    assert breaker.admit() is Admit.PASS


def test_by_hand(clock: Clock) -> None:
    breaker = made(clock)
    breaker.trip("no_threads")
    assert breaker.snapshot().reason == "no_threads"
    clock.now += 2
    assert breaker.begin_probe()
    breaker.reset()
    breaker.end_probe(False)  # nobody waits for it any more
    assert breaker.closed


@pytest.mark.parametrize(
    "wrong",
    [{"window_s": 0}, {"hold_factor": 0.5}, {"min_calls": 0}, {"error_ratio": 0}, {"slow_ratio": 1.5}, {"jitter": 1}],
)
def test_settings_that_cannot_work_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        BreakerSettings(**wrong)  # type: ignore[arg-type]
