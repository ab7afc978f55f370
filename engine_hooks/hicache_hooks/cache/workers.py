"""Worker threads behind one queue: the shape of prefetch, backup and GPU transfer threads.

Rules

1. Every item that was accepted ends exactly once: ``run`` returned, ``failed(item, error)`` or ``cancelled(item)``.
2. An exception is caught per item and acknowledged, so that its pages are freed (F38). A thread that dies all the
   same (``SystemExit`` from a vendor's library) acknowledges its item first and starts its replacement itself.
3. Threads sleep on the queue's condition; nobody polls (F4).
4. Stopping signals all, then joins all against one deadline; who does not return is named, with its stack, and
   left alone: a thread inside a native call cannot be ended (F23). Queued items end as cancelled (F119).
5. "Stalled" is work without a completion for too long, whatever the reason (F39).
6. A thread whose item is given up (``give_up``) keeps that item and its memory until it is back, and another thread
   takes its place; so one hung call does not stop the queue. There are at most ``LATE_PER_THREAD`` such threads per
   place (F46). Above that the place stays empty; with no place left, queued work ends as cancelled.
7. ``start`` starts the first thread, and that one starts the others when its first item comes: eight threads, one
   after the other, were a third of an attach. The submitting thread (the scheduler) never starts a healthy one.
"""

import itertools
import logging
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Generic, Protocol, TypeVar

from hicache_proto.model import ThreadReport

log = logging.getLogger(__name__)

LATE_PER_THREAD = 2
_here = threading.local()


def current_run() -> "Run | None":
    """What this thread runs; None when it is no worker. ``Workers.give_up`` takes it."""
    return getattr(_here, "run", None)


class Item(Protocol):
    """A piece of work."""

    def run(self) -> None:
        """Do it; runs on a worker thread, may take time, may raise."""

    def failed(self, error: BaseException) -> None:
        """``run`` raised. Must not raise."""

    def cancelled(self) -> None:
        """It will not run. Must not raise."""

    def late(self) -> None:
        """``run`` was given up: nobody waits for it, but it goes on, and will end as the others. Must not raise."""


T = TypeVar("T", bound=Item)


class WorkQueue(Generic[T]):
    """Unbounded here: the controller bounds the pages that its items may hold (F44)."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def put(self, items: Iterable[T]) -> bool:
        """Append items; False, and nothing queued, when closed."""
        with self._changed:
            if self._closed:
                return False
            before = len(self._items)
            self._items.extend(items)
            self._changed.notify(len(self._items) - before)
            return True

    def take(self, taken: Callable[[], None]) -> T | None:
        """The next item; None when the queue is closed. Ends by ``close`` at the latest.

        ``taken`` is called under the lock: at no moment is an item neither queued nor running.
        """
        with self._changed:
            while not self._items and not self._closed:
                self._changed.wait()
            if self._closed:
                return None
            taken()
            return self._items.popleft()

    def close(self) -> list[T]:
        """Refuse new items, wake everybody, and return what was left."""
        with self._changed:
            self._closed = True
            left = list(self._items)
            self._items.clear()
            self._changed.notify_all()
            return left

    def drain(self) -> list[T]:
        """Take everything out; new items are still accepted."""
        with self._changed:
            left = list(self._items)
            self._items.clear()
            return left

    def __len__(self) -> int:
        return len(self._items)


class Run:
    """One item on one thread: what can be given up."""

    __slots__ = ("item", "since", "workers")

    def __init__(self, workers: "Workers[Any]") -> None:
        self.workers = workers
        self.item: Item | None = None
        self.since = time.monotonic()


class _Slot:
    """One place for a thread; the thread in it may be replaced."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.thread: threading.Thread | None = None
        self.run: Run | None = None
        self.restarts = 0


class Workers(Generic[T]):
    """``count`` threads named ``<name>-<i>``."""

    def __init__(self, name: str, count: int, *, stall_after_s: float = 10.0) -> None:
        self.name = name
        self.stall_after_s = stall_after_s
        self.stuck: dict[str, str] = {}  # name -> stack, of the last stop
        self._queue: WorkQueue[T] = WorkQueue()
        self._slots = [_Slot(f"{name}-{i}") for i in range(count)]
        self._late: dict[threading.Thread, Run] = {}
        self._serial = itertools.count(1)
        self._started = self._stopping = False
        self._growing = self._grown = False  # the others are being started, or were
        self._moved = time.monotonic()  # last completion, or when work came to an idle queue
        self._done = threading.Condition()
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the first thread (rule 7).

        Raises:
            RuntimeError: the system gives no more threads.
        """
        for slot in self._slots[:1]:
            self._spawn(slot)
        self._started = True

    def _grow(self) -> None:
        """Start the others, once. *worker* thread."""
        with self._lock:
            if self._growing or self._stopping:
                return
            self._growing = True
            for slot in self._slots:
                if slot.thread is None:
                    self._replace(slot)
            self._grown = True  # not before: who submits meanwhile must not wait for the lock to fill these places

    def _spawn(self, slot: _Slot) -> None:
        # Daemon threads: a thread stuck in a native call must not keep the process from ending.
        slot.thread = threading.Thread(target=self._main, args=(slot,), name=slot.name, daemon=True)
        slot.thread.start()

    def submit(self, items: Iterable[T]) -> bool:
        """Queue items; False when stopped, or when no thread is left to run them."""
        if self._grown and any(slot.thread is None for slot in self._slots):
            self._heal()
        if not self.usable:
            return False
        if not self.working:
            self._moved = time.monotonic()
        return self._queue.put(items)

    @property
    def usable(self) -> bool:
        """False when every thread hangs in an item that was given up, and no more may be started."""
        return not self._started or any(slot.thread is not None for slot in self._slots)

    @property
    def working(self) -> bool:
        """True while anything is queued or running."""
        return len(self._queue) > 0 or self.calls > 0

    @property
    def calls(self) -> int:
        """Threads inside an item that somebody waits for."""
        return sum(slot.run is not None for slot in self._slots)

    @property
    def queued(self) -> int:
        """Items that wait."""
        return len(self._queue)

    def _main(self, slot: _Slot) -> None:
        try:
            self._loop(slot)
        except BaseException as error:
            log.error("thread %s died: %r", slot.name, error)
            left: list[T] = []
            with self._lock:
                if not self._stopping and slot.thread is threading.current_thread():
                    slot.restarts += 1
                    self._replace(slot)
                if not self.usable:  # nobody is left to run them
                    left = self._queue.drain()
            self._cancel(left)

    def _replace(self, slot: _Slot) -> None:
        try:
            self._spawn(slot)
        except RuntimeError as error:  # out of threads: the place stays empty, and the others do its work
            slot.thread = None
            log.error("no thread for %s: %s", slot.name, error)

    def _heal(self) -> None:
        """Fill empty places, as far as rule 6 allows."""
        with self._lock:
            for slot in self._slots:
                if slot.thread is None and not self._stopping and self._may_start():
                    slot.restarts += 1
                    self._replace(slot)

    def _may_start(self) -> bool:
        return len(self._late) <= LATE_PER_THREAD * len(self._slots)

    def _loop(self, slot: _Slot) -> None:
        while True:
            run = Run(self)
            item = self._queue.take(lambda run=run: self._took(slot, run))  # type: ignore[misc]
            if item is None:
                return
            run.item = item
            _here.run = run
            try:
                if not self._growing:
                    self._grow()
                item.run()
            except Exception as error:
                item.failed(error)
            except BaseException as error:
                item.failed(error)
                raise
            finally:
                mine = self._ended(slot, run)
            del item, run  # an idle thread must not keep the last batch's tensors alive (F43)
            if not mine:
                return

    @staticmethod
    def _took(slot: _Slot, run: Run) -> None:
        run.since = time.monotonic()
        slot.run = run

    def _ended(self, slot: _Slot, run: Run) -> bool:
        """An item is through; False when its thread was replaced and has to go."""
        _here.run = None
        with self._lock:
            run.item = None
            mine = slot.run is run
            if mine:
                slot.run = None
            else:
                self._late.pop(threading.current_thread(), None)
                if slot.thread is None and not self._stopping:  # its place is still empty
                    slot.thread = threading.current_thread()
                    mine = True
        self._moved = time.monotonic()
        with self._done:
            self._done.notify_all()
        return mine

    def give_up(self, run: Run) -> None:
        """Nobody waits for this run any more (rule 6). It ended meanwhile: nothing. *any* thread."""
        left: list[T] = []
        with self._lock:
            slot = next((slot for slot in self._slots if slot.run is run), None)
            if slot is None or slot.thread is None or run.item is None:
                return
            item = run.item
            slot.thread.name = f"{slot.name}-late-{next(self._serial)}"  # reports tell the two apart by name
            self._late[slot.thread] = run
            slot.run, slot.thread = None, None
            if not self._stopping and self._may_start():
                slot.restarts += 1
                self._replace(slot)
            if not self.usable:
                left = self._queue.drain()
        item.late()
        self._cancel(left)

    def _cancel(self, items: list[T]) -> None:
        for item in items:
            item.cancelled()
        with self._done:
            self._done.notify_all()

    def signal_stop(self) -> int:
        """Refuse new work, end what is queued as cancelled, wake all threads; returns how many were cancelled."""
        with self._lock:
            self._stopping = True
        left = self._queue.close()
        for item in left:
            item.cancelled()
        return len(left)

    def wait_idle(self, deadline: float) -> bool:
        """Wait until nothing is queued or running, or ``deadline`` (``time.monotonic``)."""
        with self._done:
            return self._done.wait_for(lambda: not self.working, max(0.0, deadline - time.monotonic()))

    def join(self, deadline: float) -> list[str]:
        """Wait for the threads until ``deadline``; names of those that still run. After ``signal_stop``."""
        stuck: dict[str, str] = {}
        for thread in self._threads():
            if thread.ident is None:
                continue
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                frame = sys._current_frames().get(thread.ident)
                stack = "".join(traceback.format_stack(frame)) if frame is not None else "(no Python frame)"
                stuck[thread.name] = stack
                log.error("thread %s did not stop; it stands in:\n%s", thread.name, stack)
        self.stuck = stuck
        return list(stuck)

    def _threads(self) -> list[threading.Thread]:
        with self._lock:
            return [*(slot.thread for slot in self._slots if slot.thread is not None), *self._late]

    @property
    def alive(self) -> int:
        """Threads that run, given up or not."""
        return sum(thread.is_alive() for thread in self._threads())

    def reports(self) -> list[ThreadReport]:
        """Liveness, restarts and stall; an idle thread is never stalled, and one not needed yet is not there."""
        now = time.monotonic()
        with self._lock:
            slots = self._slots if self._grown else self._slots[:1]
            late = [(thread.name, run.since) for thread, run in self._late.items()]
        return [
            *(
                ThreadReport(
                    name=slot.name,
                    alive=slot.thread is not None and slot.thread.is_alive(),
                    restarts=slot.restarts,
                    stalled_s=self._stalled_s(slot),
                )
                for slot in slots
            ),
            *(ThreadReport(name=name, stalled_s=now - since) for name, since in late),
        ]

    def _stalled_s(self, slot: _Slot) -> float:
        run = slot.run
        since = run.since if run is not None else self._moved if self._queue else time.monotonic()
        still_s = time.monotonic() - since
        return still_s if still_s >= self.stall_after_s else 0.0
