"""Worker threads behind one queue: the shape of prefetch, backup and GPU transfer threads.

Rules

1. Every item that was accepted ends exactly once: ``run`` returned, ``failed(item, error)`` or ``cancelled(item)``.
2. An exception is caught per item and acknowledged, so that its pages are freed (F38). A thread that dies all the
   same (``SystemExit`` from a vendor's library) acknowledges its item first and starts its replacement itself.
3. Threads sleep on the queue's condition; nobody polls (F4).
4. Stopping signals all, then joins all against one deadline; who does not return is named, with its stack, and
   left alone: a thread inside a native call cannot be ended (F23). Queued items end as cancelled (F119).
5. "Stalled" is work without a completion for too long, whatever the reason (F39).
"""

import logging
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

from hicache_proto.model import ThreadReport

log = logging.getLogger(__name__)


class Item(Protocol):
    """A piece of work."""

    def run(self) -> None:
        """Do it; runs on a worker thread, may take time, may raise."""

    def failed(self, error: BaseException) -> None:
        """``run`` raised. Must not raise."""

    def cancelled(self) -> None:
        """It will not run. Must not raise."""


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

    def __len__(self) -> int:
        return len(self._items)


class _Slot:
    """One place for a thread; the thread in it may be replaced."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.thread: threading.Thread | None = None
        self.busy_since: float | None = None
        self.restarts = 0

    def take(self) -> None:
        self.busy_since = time.monotonic()


class Workers(Generic[T]):
    """``count`` threads named ``<name>-<i>``."""

    def __init__(self, name: str, count: int, *, stall_after_s: float = 10.0) -> None:
        self.name = name
        self.stall_after_s = stall_after_s
        self.stuck: dict[str, str] = {}  # name -> stack, of the last stop
        self._queue: WorkQueue[T] = WorkQueue()
        self._slots = [_Slot(f"{name}-{i}") for i in range(count)]
        self._stopping = False
        self._moved = time.monotonic()  # last completion, or when work came to an idle queue
        self._done = threading.Condition()
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start all threads.

        Raises:
            RuntimeError: the system gives no more threads.
        """
        for slot in self._slots:
            self._spawn(slot)

    def _spawn(self, slot: _Slot) -> None:
        # Daemon threads: a thread stuck in a native call must not keep the process from ending.
        slot.thread = threading.Thread(target=self._main, args=(slot,), name=slot.name, daemon=True)
        slot.thread.start()

    def submit(self, items: Iterable[T]) -> bool:
        """Queue items; False when stopped."""
        if not self.working:
            self._moved = time.monotonic()
        return self._queue.put(items)

    @property
    def working(self) -> bool:
        """True while anything is queued or running."""
        return len(self._queue) > 0 or self.calls > 0

    @property
    def calls(self) -> int:
        """Threads inside an item."""
        return sum(slot.busy_since is not None for slot in self._slots)

    @property
    def queued(self) -> int:
        """Items that wait."""
        return len(self._queue)

    def _main(self, slot: _Slot) -> None:
        try:
            self._loop(slot)
        except BaseException as error:
            log.error("thread %s died: %r", slot.name, error)
            with self._lock:
                if not self._stopping:
                    slot.restarts += 1
                    self._spawn(slot)

    def _loop(self, slot: _Slot) -> None:
        while (item := self._queue.take(slot.take)) is not None:
            try:
                item.run()
            except Exception as error:
                item.failed(error)
            except BaseException as error:
                item.failed(error)
                raise
            finally:
                slot.busy_since = None
                self._moved = time.monotonic()
                with self._done:
                    self._done.notify_all()
            del item  # an idle thread must not keep the last batch's tensors alive (F43)

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
        for slot in self._slots:
            thread = slot.thread
            if thread is None or thread.ident is None:
                continue
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                frame = sys._current_frames().get(thread.ident)
                stack = "".join(traceback.format_stack(frame)) if frame is not None else "(no Python frame)"
                stuck[slot.name] = stack
                log.error("thread %s did not stop; it stands in:\n%s", slot.name, stack)
        self.stuck = stuck
        return list(stuck)

    @property
    def alive(self) -> int:
        """Threads that run."""
        return sum(1 for slot in self._slots if slot.thread is not None and slot.thread.is_alive())

    def reports(self) -> list[ThreadReport]:
        """Liveness, restarts and stall of each thread; an idle thread is never stalled."""
        return [
            ThreadReport(
                name=slot.name,
                alive=slot.thread is not None and slot.thread.is_alive(),
                restarts=slot.restarts,
                stalled_s=self._stalled_s(slot),
            )
            for slot in self._slots
        ]

    def _stalled_s(self, slot: _Slot) -> float:
        since = slot.busy_since
        if since is None:
            since = self._moved if self._queue else time.monotonic()
        still_s = time.monotonic() - since
        return still_s if still_s >= self.stall_after_s else 0.0
