"""Calls with a deadline: each runs on a thread of a small pool, and a caller that waited long enough goes on.

Only for calls that an abandoned run cannot hurt: one that reads or writes nothing but memory of its own (SGLang's copy
path: fresh scratch pages in, copies of pages out). A zero-copy call must never come here: the pages that it still
touches after it was given up may be another request's by then.

A thread whose call was abandoned stays inside the store until the store lets go, then serves again. Their number is
bounded (F46): over the bound a call is refused at once, as if it had timed out.
"""

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

log = logging.getLogger(__name__)

MAX_ABANDONED = 4  # one per engine thread that calls a store, and one to spare

T = TypeVar("T")


class CallTimedOut(TimeoutError):
    """The call ran past its deadline, or too many earlier ones still do."""


class CallDropped(Exception):
    """``drop_all`` ended the wait."""


class _Job(Generic[T]):
    __slots__ = ("abandoned", "dropped", "error", "finished", "left", "result", "thread", "wake", "work")

    def __init__(self, work: Callable[[], T], left: Callable[[], None]) -> None:
        self.work = work
        self.left = left
        self.wake = threading.Event()
        self.finished = self.abandoned = self.dropped = False
        self.result: T | None = None
        self.thread = ""  # that runs it
        self.error: BaseException | None = None


class CallThreads:
    """See the module's text. Any thread."""

    def __init__(self, name: str, max_abandoned: int = MAX_ABANDONED) -> None:
        self._name = name
        self._max = max_abandoned
        self._lock = threading.Lock()
        self._idle: list[SimpleQueue[_Job[Any] | None]] = []
        self._waiting: set[_Job[Any]] = set()
        self._given_up: set[_Job[Any]] = set()
        self._serial = 0
        self._ended = False

    @property
    def abandoned(self) -> int:
        """Calls that were given up and are still inside the store."""
        return len(self._given_up)

    def abandoned_in(self) -> list[str]:
        """The threads that these calls run on, sorted."""
        with self._lock:
            return sorted(job.thread for job in self._given_up)

    def call(self, work: Callable[[], T], deadline_s: float, left: Callable[[], None]) -> T:
        """Run ``work`` and return what it returns.

        Args:
            deadline_s: how long to wait, in seconds.
            left: called exactly once, when the store is left or was never entered; late for an abandoned call.

        Raises:
            CallTimedOut: ``deadline_s`` has passed; ``work`` may still run.
            CallDropped: ``drop_all`` was called meanwhile.
            BaseException: whatever ``work`` raised.
        """
        job = _Job(work, left)
        with self._lock:
            if len(self._given_up) >= self._max:
                refused = True
            else:
                refused = False
                self._waiting.add(job)
                queue = self._idle.pop() if self._idle else None
        if refused:
            left()
            raise CallTimedOut(f"{self._max} earlier calls are still inside the store")
        if queue is None:
            queue = self._start(job)
        queue.put(job)
        job.wake.wait(deadline_s)
        return self._collect(job)

    def drop_all(self) -> None:
        """Everybody who waits goes on at once."""
        with self._lock:
            for job in self._waiting:
                job.dropped = True
                job.wake.set()

    def end(self) -> None:
        """Idle threads end, and those that are inside the store when they leave it. Idempotent."""
        with self._lock:
            self._ended = True
            idle, self._idle = self._idle, []
        for queue in idle:
            queue.put(None)

    def _start(self, job: "_Job[Any]") -> "SimpleQueue[_Job[Any] | None]":
        queue: SimpleQueue[_Job[Any] | None] = SimpleQueue()
        with self._lock:
            self._serial += 1
            name = f"{self._name}-{self._serial}"
        try:
            threading.Thread(target=self._run, args=(queue,), name=name, daemon=True).start()
        except RuntimeError:
            with self._lock:
                self._waiting.discard(job)
            job.left()
            raise
        return queue

    def _collect(self, job: "_Job[T]") -> T:
        with self._lock:
            self._waiting.discard(job)
            if not job.finished:
                job.abandoned = True
                self._given_up.add(job)
        if not job.finished:
            if job.dropped:
                raise CallDropped
            raise CallTimedOut("no answer within the deadline")
        if job.error is not None:
            raise job.error
        return job.result  # type: ignore[return-value]  # finished without error: work's own result

    def _run(self, queue: "SimpleQueue[_Job[Any] | None]") -> None:
        while True:
            job = queue.get()
            if job is None:
                return
            self._serve(job)
            del job  # what it holds (pages of memory) must not wait for the next call
            with self._lock:
                if self._ended:
                    return
                self._idle.append(queue)

    def _serve(self, job: "_Job[Any]") -> None:
        error: BaseException | None = None
        result: Any = None
        job.thread = threading.current_thread().name
        if not job.abandoned:
            try:
                result = job.work()
            except BaseException as exc:  # SystemExit and its like must not end the thread
                error = exc
        try:
            job.left()
        except Exception:
            log.exception("after a store call")
        with self._lock:
            if job.abandoned:
                self._given_up.discard(job)
                return
            job.result, job.error, job.finished = result, error, True
        job.wake.set()
