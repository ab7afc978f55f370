"""SGLang's storage threads: which of them are busy, which are dead, and how they are brought back.

A thread is idle exactly while it waits in its own queue: the frame above its function is ``Queue.get``. Everything
else counts as busy (inside a backend call, computing hashes, compiling the hash extension, in a collective), so that
no kind of work has to be known by name. The engine's stop joins each thread for up to 10 s on the scheduler thread;
it is never called while one of them is busy.

When such a join has failed, the stock engine never recovers: the stop event stays set, the threads that could stop
are gone, storage still counts as enabled, and the next request waits for a backup that nobody takes. ``repair``
clears the event and starts the missing threads on the queues that exist; a thread that was stuck goes on by itself.
"""

import logging
import queue
import sys
import threading
from types import FrameType
from typing import Any

from hicache_proto.model import ThreadReport

log = logging.getLogger(__name__)

# Attribute of the controller -> the function that the thread runs.
THREADS = {
    "prefetch_thread": "prefetch_thread_func",
    "prefetch_io_aux_thread": "prefetch_io_aux_func",
    "prefetch_sync_thread": "prefetch_sync_thread_func",
    "backup_thread": "backup_thread_func",
}
QUEUES = ("prefetch_queue", "backup_queue", "prefetch_buffer", "prefetch_sync_queue")
_GET = queue.Queue.get.__code__


class StorageThreads:
    """The four threads of one cache controller. Any thread, but ``repair``."""

    def __init__(self, controller: Any) -> None:
        self._controller = controller
        self._restarts = dict.fromkeys(THREADS, 0)

    def counters(self) -> dict[str, int]:
        """``storage_calls``: threads that are busy; ``storage_queues``: entries that no thread has taken."""
        return {"storage_calls": len(self.busy()), "storage_queues": queued(self._controller)}

    def busy(self) -> list[str]:
        """Threads that do something else than wait in their queue."""
        alive = {name: thread for name, thread in self._threads().items() if thread.is_alive()}
        if not alive:
            return []
        frames = sys._current_frames()
        try:
            return [name for name, thread in alive.items() if not waits(frames.get(thread.ident or 0), THREADS[name])]
        finally:
            del frames  # they hold every local of every thread

    def dead(self) -> list[str]:
        """Threads that storage needs and that are gone, or will go at their next look at the stop event."""
        controller = self._controller
        if not controller.enable_storage:
            return []
        threads = self._threads()
        if controller.storage_stop_event.is_set():
            return sorted(THREADS)
        return sorted(name for name in THREADS if name not in threads or not threads[name].is_alive())

    def reports(self) -> list[ThreadReport]:
        """For status; nothing while storage is off."""
        if not self._controller.enable_storage:
            return []
        threads = self._threads()
        return [
            ThreadReport(name=name, alive=name in threads and threads[name].is_alive(), restarts=self._restarts[name])
            for name in THREADS
        ]

    def repair(self) -> list[str]:
        """Start the threads that are missing; returns their names. *scheduler* thread, so that no stop runs meanwhile.

        Only while storage is on. The queues stay: what was put there while nobody looked is worked off now.
        """
        controller = self._controller
        if not self.dead():
            return []
        controller.storage_stop_event.clear()
        threads = self._threads()
        started = []
        for name, function in THREADS.items():
            if name in threads and threads[name].is_alive():
                continue  # stuck in a call; it goes on, now that the event is clear
            thread = threading.Thread(target=getattr(controller, function), daemon=True)
            setattr(controller, name, thread)
            thread.start()
            self._restarts[name] += 1
            started.append(name)
        if started:
            log.warning("storage threads were gone and have been started again: %s", ", ".join(started))
        return started

    def _threads(self) -> dict[str, threading.Thread]:
        found = {name: getattr(self._controller, name, None) for name in THREADS}
        return {name: thread for name, thread in found.items() if thread is not None}


class NoThreads:
    """Where there is no storage at all."""

    def counters(self) -> dict[str, int]:
        """Nothing is ever busy."""
        return {"storage_calls": 0, "storage_queues": 0}

    def repair(self) -> list[str]:
        """Nothing to do."""
        return []


def queued(controller: Any) -> int:
    """Entries of the storage queues; wake-up marks (None) are none."""
    queues = (getattr(controller, name, None) for name in QUEUES)
    return sum(1 for each in queues if each is not None for item in tuple(each.queue) if item is not None)


def waits(frame: FrameType | None, function: str) -> bool:
    """True when the thread whose innermost frame is ``frame`` waits in ``Queue.get`` called by ``function`` itself.

    A thread without a frame has not begun or is about to end: it waits for nothing, and does nothing.
    """
    if frame is None:
        return True
    below: FrameType | None = None
    while frame is not None:
        if frame.f_code.co_name == function:
            return below is not None and below.f_code is _GET
        below, frame = frame, frame.f_back
    return False
