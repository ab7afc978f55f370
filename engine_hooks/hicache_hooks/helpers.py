"""Threads for what may take long: validating, building, closing. Handing over a job never waits.

Starting a thread waits until it runs, and for the interpreter lock on the way: a millisecond, three times in every
operation. So a thread that has ended its job stays for the next one, for ``IDLE_S``, which is longer than an operation
and too short to be called a leak. A job that hangs keeps its thread; the next job gets another one.
"""

import logging
import queue
import threading
from collections.abc import Callable
from functools import partial

log = logging.getLogger(__name__)

Job = Callable[[], None]
Launch = Callable[[Job], None]
"""Runs a short job on a thread that may wait: ``LinkAgent.run_soon``."""
Postpone = Callable[[Job], bool]
"""Takes a wake-up, to give it a moment later, and says True; or False: give it now. Any thread; never waits."""

IDLE_S = 2.0
IDLE_NAME = "hicache-helper"


def never(job: Job) -> bool:
    """Every wake-up is given at once."""
    del job
    return False


def launch_here(job: Job) -> None:
    """Run it in the caller: where no agent runs."""
    job()


class _Thread:
    """One thread and the way to give it its next job; None ends it."""

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[tuple[Job, str] | None] = queue.SimpleQueue()
        self.thread: threading.Thread | None = None


class Helpers:
    """The helper threads of one rank. Thread-safe."""

    def __init__(self, launch: Launch = launch_here, idle_s: float = IDLE_S, postpone: Postpone = never) -> None:
        """``launch`` starts threads where the caller of ``run`` must not wait."""
        self._postpone = postpone
        self._launch = launch
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._idle: list[_Thread] = []
        self._stopped = False

    def run(self, job: Job, name: str, failed: Callable[[RuntimeError], None]) -> None:
        """Run ``job`` on a thread called ``name``. Returns at once; never raises.

        Args:
            job: must not raise; if it does, that is logged.
            failed: called instead of ``job`` when the system gives no thread.
        """
        with self._lock:
            helper = self._idle.pop() if self._idle else None
        if helper is not None:
            wake = partial(helper.jobs.put, (job, name))
            if not self._postpone(wake):
                wake()
        else:
            self._launch(lambda: self._start(job, name, failed))

    def stop(self, timeout_s: float) -> None:
        """End the threads that have nothing to do, and let the others end after their job. Idempotent."""
        with self._lock:
            self._stopped = True
            leaving, self._idle = self._idle, []
        for helper in leaving:
            helper.jobs.put(None)
        for helper in leaving:
            if helper.thread is not None and helper.thread is not threading.current_thread():
                helper.thread.join(timeout_s)

    def _start(self, job: Job, name: str, failed: Callable[[RuntimeError], None]) -> None:
        helper = _Thread()
        helper.jobs.put((job, name))
        helper.thread = threading.Thread(target=self._work, args=(helper,), name=name, daemon=True)
        try:
            helper.thread.start()
        except RuntimeError as error:
            failed(error)

    def _work(self, helper: _Thread) -> None:
        thread = threading.current_thread()
        while (given := self._next(helper)) is not None:
            job, thread.name = given
            try:
                job()
            except BaseException:
                log.exception("a job of thread %s failed", thread.name)
            del job, given  # what it held must not live on while the thread waits
            thread.name = IDLE_NAME
            with self._lock:
                if self._stopped:
                    return
                self._idle.append(helper)

    def _next(self, helper: _Thread) -> tuple[Job, str] | None:
        try:
            return helper.jobs.get(timeout=self._idle_s)
        except queue.Empty:
            with self._lock:
                if helper in self._idle:
                    self._idle.remove(helper)
                    return None
        return helper.jobs.get()  # taken out by somebody who is about to hand a job over
