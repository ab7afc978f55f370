"""Wake-ups that leave when the scheduler sleeps: kept in an idle pass alone, in order, and never lost."""

import threading
from collections.abc import Iterator

import pytest
from tests.unit.sglang.test_held import Work
from tests.unit.sglang.test_pull import Scheduler
from tests.unit.sglang.test_wake import LONG_MS, Sleeper

from hicache_hooks.helpers import Helpers
from hicache_hooks.hook import RankHook
from hicache_hooks.sglang import pull as pulling
from hicache_hooks.sglang.quiet import Quiet
from hicache_proto.hooklink import Hold, Release


def test_jobs_are_kept_in_order_until_the_end() -> None:
    quiet, ran = Quiet(), list[int]()
    assert not quiet.postpone(lambda: ran.append(0))  # not quiet: the caller runs it itself
    quiet.begin()
    assert all(quiet.postpone(lambda number=number: ran.append(number)) for number in (1, 2))  # type: ignore[misc]
    assert ran == []
    quiet.end()
    quiet.end()
    assert ran == [1, 2]
    assert not quiet.postpone(lambda: ran.append(3))


def test_other_threads_are_not_kept_waiting() -> None:
    quiet, said = Quiet(), list[bool]()
    quiet.begin()
    thread = threading.Thread(target=lambda: said.append(quiet.postpone(lambda: None)))
    thread.start()
    thread.join()
    assert said == [False]


def test_a_job_that_fails_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    quiet, ran = Quiet(), list[int]()
    quiet.begin()
    quiet.postpone(lambda: ran.append(1 // 0))
    quiet.postpone(lambda: ran.append(2))
    quiet.end()
    assert ran == [2]
    assert "ZeroDivisionError" in caplog.text


@pytest.fixture
def sleeper() -> Sleeper:
    return Sleeper()


@pytest.fixture
def scheduler(sleeper: Sleeper) -> Iterator[Scheduler]:
    made = Scheduler(sleeper=sleeper)
    yield made
    made.hook.close()
    pulling.install(None)


def test_an_idle_pass_keeps_wake_ups_until_the_sleep(scheduler: Scheduler, sleeper: Sleeper) -> None:
    ran: list[str] = []
    scheduler.waker.wake()
    assert sleeper.poller.poll(LONG_MS)
    scheduler.loop()
    assert scheduler.quiet.postpone(lambda: ran.append("x"))
    assert ran == []
    sleeper.poller.poll(0)
    assert ran == ["x"]


def test_a_pass_that_pulled_or_did_not_sleep_keeps_nothing(scheduler: Scheduler, sleeper: Sleeper) -> None:
    """It may be a forward of seconds: nobody's answer waits for that."""
    scheduler.loop()
    assert not scheduler.quiet.on
    sleeper.poller.poll(0)
    scheduler.loop(Work("a"))
    assert not scheduler.quiet.on
    scheduler.loop()
    assert not scheduler.quiet.on


def test_a_pass_without_a_sleep_gives_what_the_one_before_kept(scheduler: Scheduler, sleeper: Sleeper) -> None:
    ran: list[str] = []
    sleeper.poller.poll(0)
    scheduler.loop()
    assert scheduler.quiet.postpone(lambda: ran.append("x"))
    scheduler.loop()
    assert ran == ["x"]


def test_released_requests_end_the_quiet(scheduler: Scheduler, sleeper: Sleeper) -> None:
    scheduler.send(Hold(name="drain", hold_s=30))
    assert scheduler.loop(Work("a")) == []
    sleeper.poller.poll(0)
    scheduler.send(Release(name="drain"))
    assert scheduler.loop() == [Work("a")]
    assert not scheduler.quiet.on


class Waits:
    """A ``Postpone`` that keeps everything."""

    def __init__(self) -> None:
        self.jobs: list[object] = []

    def __call__(self, job: object) -> bool:
        self.jobs.append(job)
        return True


def test_an_agents_end_is_never_kept(scheduler: Scheduler) -> None:
    """``stop`` waits for the agent's thread: its wake-up must not wait for a sleep that never comes."""
    keeps = Waits()
    hook = RankHook(
        scheduler.hook._adapter, "ipc:///nowhere", engine_id="e", incarnation="i", postpone=keeps, start=False
    )
    hook.agent.start()
    hook.agent.changed()
    assert len(keeps.jobs) == 1
    assert hook.agent.stop(timeout_s=10)
    hook.close()


def test_a_helpers_job_is_kept_and_runs_when_given(scheduler: Scheduler) -> None:
    keeps, ran = Waits(), threading.Event()
    helpers = Helpers(postpone=keeps)
    first = threading.Event()
    helpers.run(first.set, "one", lambda error: None)  # no idle thread yet: it is started
    assert first.wait(10)
    deadline = threading.Event()
    for _ in range(1000):
        if helpers._idle:
            break
        deadline.wait(0.01)
    helpers.run(ran.set, "two", lambda error: None)
    assert len(keeps.jobs) == 1
    assert not ran.is_set()
    keeps.jobs[0]()  # type: ignore[operator]
    assert ran.wait(10)
    helpers.stop(10)
