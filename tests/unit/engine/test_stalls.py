"""F4: no progress is told apart from slow progress, by what reports show of each blocker."""

import pytest

from hicache_proto.model import IdleReport
from hicache_proto.transaction import CoordEvent, CoordPhase, See
from hicache_sidecar.engine import causes, idle
from hicache_sidecar.engine.waiting import Stalls


def report(ages=None, **counters):
    return IdleReport(counters=counters, ages_ms=ages or {})


def last(*looks):
    """The verdict after reports of rank 0, one per second."""
    stalls, found = Stalls(), []
    for second, look in enumerate(looks):
        found = stalls.judge({0: look}, float(second))
    return idle.progress(found)[0], found


def test_a_transfer_of_which_nothing_ends_is_stalled():
    verdict, found = last(*[report(ongoing_backup=5)] * 6)
    assert verdict == "stalled"
    assert found[0].still_s == 5.0


@pytest.mark.parametrize(
    "looks",
    [
        [report(ongoing_backup=50 - i) for i in range(6)],
        [report({"ongoing_backup": 900 - i}, ongoing_backup=5) for i in range(6)],  # one ended, one came
        [report(ongoing_backup=5)] * 3,  # not for long enough to say
        [report(ongoing_backup=5)] * 3 + [report()] + [report(ongoing_backup=5)] * 3,  # gone in between
        [report(running_batch=1)] * 9,  # a long answer is no stall
        [report(waiting_queue=4, running_batch=1)] * 9,
    ],
    ids=["fewer", "younger", "short", "gone", "running", "queued"],
)
def test_slow_is_not_stalled(looks):
    assert last(*looks)[0] == "slow"


def test_ranks_are_judged_apart():
    """Rank 1 moves, rank 0 does not, though they report by turns."""
    stalls = Stalls()
    for second in range(6):
        stalls.judge({0: report(storage_queues=3)}, second)
        stalls.judge({1: report(storage_queues=30 - second)}, second + 0.5)
    found = stalls.judge({0: report(storage_queues=3), 1: report(storage_queues=24)}, 6.0)
    assert [idle.stalled(b) for b in found] == [True, False]
    assert idle.progress(found)[1] == "; stalled: storage_queues=3 (rank 0) has not moved for 6 s"


def test_a_drain_that_ran_out_says_which():
    """The refusal carries it in ``details.progress`` and in words."""
    _, found = last(*[report(ongoing_prefetch=2)] * 6)
    event = CoordEvent(See.TIMEOUT, detail="the wait for idle ran out")
    error = causes.cause_of(CoordPhase.FREEZE, event, None, [0], found, verb="swap", drain=True)
    assert error.code == "deadline_exceeded"
    assert error.details["progress"] == "stalled"
    assert "stalled: ongoing_prefetch=2 (rank 0)" in error.message
    assert error.details["blocked_by"] == [{"rank": 0, "name": "ongoing_prefetch", "count": 2, "still_s": 5.0}]
