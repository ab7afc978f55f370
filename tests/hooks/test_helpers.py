"""Helper threads: a job is handed over without a wait, and no thread outlives its use."""

import threading

import pytest

from hicache_hooks.helpers import IDLE_NAME, Helpers

WAIT_S = 10.0


def failed(error: RuntimeError) -> None:
    raise AssertionError(error)


def run(helpers: Helpers, name: str = "hicache-test") -> tuple[threading.Thread, str]:
    """The thread that ran a job, and what it was called then."""
    seen: list[tuple[threading.Thread, str]] = []
    over = threading.Event()

    def job() -> None:
        seen.append((threading.current_thread(), threading.current_thread().name))
        over.set()

    helpers.run(job, name, failed)
    assert over.wait(WAIT_S)
    return seen[0]


def wait_idle(helpers: Helpers, threads: int) -> None:
    """Until so many threads wait for a job."""
    limit = threading.Event()
    for _ in range(1000):
        if len(helpers._idle) == threads:
            return
        limit.wait(0.01)
    raise AssertionError("not idle")


def test_a_thread_is_used_again_under_the_jobs_name() -> None:
    helpers = Helpers(idle_s=60.0)
    first, name = run(helpers, "hicache-build-1")
    assert name == "hicache-build-1"
    wait_idle(helpers, 1)
    assert first.name == IDLE_NAME
    second, name = run(helpers, "hicache-close-7")
    assert (second, name) == (first, "hicache-close-7")
    wait_idle(helpers, 1)
    helpers.stop(WAIT_S)
    assert not first.is_alive()


def test_a_job_that_hangs_does_not_hold_up_the_next() -> None:
    helpers = Helpers(idle_s=60.0)
    entered, free = threading.Event(), threading.Event()

    def hang() -> None:
        entered.set()
        free.wait(WAIT_S)

    helpers.run(hang, "hicache-hung", failed)
    assert entered.wait(WAIT_S)
    other, _ = run(helpers)
    assert other.name != "hicache-hung"
    free.set()
    wait_idle(helpers, 2)
    helpers.stop(WAIT_S)


def test_an_unused_thread_ends_by_itself() -> None:
    helpers = Helpers(idle_s=0.01)
    thread, _ = run(helpers)
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert helpers._idle == []
    run(helpers)[0].join(WAIT_S)


def test_a_job_handed_to_a_thread_that_was_about_to_leave_is_run() -> None:
    """Both look under the lock: either it was taken and gets its job, or it left and another one is started."""
    helpers = Helpers(idle_s=0.0005)
    for _ in range(300):
        run(helpers)


def test_a_job_that_raises_costs_no_thread(caplog: pytest.LogCaptureFixture) -> None:
    helpers = Helpers(idle_s=60.0)

    def bad() -> None:
        raise SystemExit

    helpers.run(bad, "hicache-bad", failed)
    wait_idle(helpers, 1)
    assert "hicache-bad failed" in caplog.text
    run(helpers)
    wait_idle(helpers, 1)
    helpers.stop(WAIT_S)


def test_no_thread_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    told: list[RuntimeError] = []
    Helpers().run(lambda: None, "hicache-none", told.append)
    assert [str(error) for error in told] == ["can't start new thread"]


def test_a_job_under_way_ends_after_stop() -> None:
    helpers = Helpers(idle_s=60.0)
    entered, free, over = threading.Event(), threading.Event(), threading.Event()

    def job() -> None:
        entered.set()
        free.wait(WAIT_S)
        over.set()

    helpers.run(job, "hicache-late", failed)
    assert entered.wait(WAIT_S)
    thread = next(t for t in threading.enumerate() if t.name == "hicache-late")
    helpers.stop(WAIT_S)
    free.set()
    assert over.wait(WAIT_S)
    thread.join(WAIT_S)
    assert not thread.is_alive()
