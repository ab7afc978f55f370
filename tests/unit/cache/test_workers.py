"""Worker threads: every item ends once, dead threads are replaced, stuck ones are named, stalls are seen."""

import threading
import time
from collections.abc import Callable

import pytest
from tests.unit.cache.support import WAIT_S

from hicache_hooks.cache.workers import Workers


class Job:
    """Counts how it ended."""

    def __init__(self, act: Callable[[], None] = lambda: None) -> None:
        self.act = act
        self.ended: list[str] = []
        self.through = threading.Event()

    def _end(self, how: str) -> None:
        self.ended.append(how)
        self.through.set()

    def run(self) -> None:
        self.act()
        self._end("ran")

    def failed(self, error: BaseException) -> None:
        self._end(f"failed {type(error).__name__}")

    def cancelled(self) -> None:
        self._end("cancelled")


def _raise(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


def _stop(workers: Workers[Job], timeout_s: float = WAIT_S) -> list[str]:
    workers.signal_stop()
    return workers.join(time.monotonic() + timeout_s)


def test_an_exception_fails_its_item_alone() -> None:
    """F38: every third item raises; the thread goes on and is the same one."""
    workers: Workers[Job] = Workers("w", 1)
    workers.start()
    thread = workers._slots[0].thread
    jobs = [Job(_raise(OSError("no"))) if i % 3 == 2 else Job() for i in range(300)]
    assert workers.submit(jobs)
    assert workers.wait_idle(time.monotonic() + WAIT_S)
    assert [job.ended for job in jobs] == [["failed OSError"] if i % 3 == 2 else ["ran"] for i in range(300)]
    assert workers._slots[0].thread is thread
    assert workers.reports()[0].restarts == 0
    assert _stop(workers) == []


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt()])
def test_a_thread_that_dies_is_replaced_at_once(error: BaseException) -> None:
    """F38: the item is acknowledged, the next one runs on the replacement."""
    workers: Workers[Job] = Workers("w", 1)
    workers.start()
    killer, after = Job(_raise(error)), Job()
    began = time.monotonic()
    workers.submit([killer, after])
    assert after.through.wait(WAIT_S)
    assert time.monotonic() - began < 1.0
    assert killer.ended == [f"failed {type(error).__name__}"]
    report = workers.reports()[0]
    assert (report.alive, report.restarts) == (True, 1)
    assert _stop(workers) == []


def test_the_first_thread_starts_the_others_when_work_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 7: an attach waits for one thread per direction; a busy one does not keep the second item waiting."""
    hold = threading.Event()
    by: list[str] = []
    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda it: (by.append(threading.current_thread().name), start(it)))
    workers: Workers[Job] = Workers("w", 3)
    workers.start()
    assert (by, workers.alive, [r.name for r in workers.reports()]) == (["MainThread"], 1, ["w-0"])
    first, second = Job(lambda: bool(hold.wait(WAIT_S)) and None), Job()
    assert workers.submit([first])
    assert workers.submit([second])
    assert second.through.wait(WAIT_S)
    assert [(r.name, r.alive, r.restarts) for r in workers.reports()] == [(f"w-{i}", True, 0) for i in range(3)]
    assert by == ["MainThread", "w-0", "w-0"]
    hold.set()
    assert _stop(workers) == []
    assert (first.ended, workers.alive) == (["ran"], 0)


def test_who_submits_while_the_others_are_started_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler submits; starting a thread may take milliseconds on a loaded machine."""
    starting, go_on = threading.Event(), threading.Event()
    start = threading.Thread.start

    def slow(it: threading.Thread) -> None:
        if it.name == "w-1":
            starting.set()
            assert go_on.wait(WAIT_S)
        start(it)

    monkeypatch.setattr(threading.Thread, "start", slow)
    workers: Workers[Job] = Workers("w", 3)
    workers.start()
    jobs = [Job(), Job()]
    assert workers.submit(jobs[:1])
    assert starting.wait(WAIT_S)
    scheduler = threading.Thread(target=workers.submit, args=(jobs[1:],), name="scheduler", daemon=True)
    scheduler.start()
    scheduler.join(1.0)
    waited = scheduler.is_alive()
    go_on.set()
    assert not waited
    assert all(job.through.wait(WAIT_S) for job in jobs)
    assert _stop(workers) == []


def test_when_the_system_has_no_more_threads_the_first_one_does_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    workers: Workers[Job] = Workers("w", 3)
    workers.start()
    start = threading.Thread.start

    def no_more(it: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_more)
    jobs = [Job() for _ in range(10)]
    assert workers.submit(jobs)
    assert workers.wait_idle(time.monotonic() + WAIT_S)
    assert [job.ended for job in jobs] == [["ran"]] * 10
    assert [r.alive for r in workers.reports()] == [True, False, False]
    monkeypatch.setattr(threading.Thread, "start", start)
    late = Job()
    assert workers.submit([late])  # there are threads again
    assert late.through.wait(WAIT_S)
    assert [r.alive for r in workers.reports()] == [True, True, True]
    assert _stop(workers) == []


def test_a_stuck_thread_is_named_with_its_stack_and_the_others_stop() -> None:
    """F23: one shared deadline; retry after unblocking succeeds."""
    release, inside = threading.Event(), threading.Event()

    def stuck_in_the_store() -> None:
        inside.set()
        release.wait(WAIT_S)

    workers: Workers[Job] = Workers("w", 4)
    workers.start()
    job = Job(stuck_in_the_store)
    workers.submit([job])
    assert inside.wait(WAIT_S)
    began = time.monotonic()
    stuck = _stop(workers, 0.3)
    assert time.monotonic() - began < 0.8
    assert len(stuck) == 1
    assert "stuck_in_the_store" in workers.stuck[stuck[0]]
    assert workers.alive == 1
    release.set()
    assert _stop(workers) == []
    assert job.ended == ["ran"]
    assert workers.stuck == {}


def test_queued_items_end_as_cancelled() -> None:
    """F119: nothing that was accepted disappears."""
    hold, taken = threading.Event(), threading.Event()

    def busy() -> None:
        taken.set()
        hold.wait(WAIT_S)

    workers: Workers[Job] = Workers("w", 1)
    workers.start()
    first = Job(busy)
    rest = [Job() for _ in range(50)]
    workers.submit([first, *rest])
    assert taken.wait(WAIT_S)
    assert workers.signal_stop() == 50
    assert all(job.ended == ["cancelled"] for job in rest)
    assert not workers.submit([Job()])
    hold.set()
    assert workers.join(time.monotonic() + WAIT_S) == []
    assert first.ended == ["ran"]


def test_a_stall_is_seen_and_idleness_is_none() -> None:
    """F39: work without a completion; independent of exceptions."""
    hold = threading.Event()
    workers: Workers[Job] = Workers("w", 2, stall_after_s=0.05)
    workers.start()
    assert [r.stalled_s for r in workers.reports()] == [0.0], "the second starts with the first item"
    job = Job(lambda: bool(hold.wait(WAIT_S)) and None)
    workers.submit([job])
    deadline = time.monotonic() + WAIT_S
    while not any(r.stalled_s for r in workers.reports()):
        assert time.monotonic() < deadline
        workers.wait_idle(time.monotonic() + 0.02)
    assert sorted(r.stalled_s > 0 for r in workers.reports()) == [False, True]  # the idle thread is fine
    hold.set()
    assert job.through.wait(WAIT_S)
    assert workers.wait_idle(time.monotonic() + WAIT_S)
    assert not any(r.stalled_s for r in workers.reports())
    assert _stop(workers) == []


def test_ten_thousand_items_pass_quickly_and_idle_threads_cost_nothing() -> None:
    """F4: nobody polls. The CPU time of half a second with four idle threads is measured."""
    workers: Workers[Job] = Workers("w", 4)
    workers.start()
    jobs = [Job() for _ in range(10_000)]
    began = time.monotonic()
    workers.submit(jobs)
    assert workers.wait_idle(began + 5.0)
    assert all(job.ended == ["ran"] for job in jobs)
    before = time.process_time()
    threading.Event().wait(0.5)
    assert time.process_time() - before < 0.05
    assert _stop(workers) == []
