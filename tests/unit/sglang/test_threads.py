"""SGLang's storage threads, on real threads: which are busy, which are dead, and how they come back (F38)."""

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.rigs.procs import POLL_S

from hicache_hooks.sglang.threads import THREADS, StorageThreads

DEADLINE_S = 10.0


class Controller:
    """The engine's controller, as far as its threads go: names, queues and loops are its own."""

    def __init__(self) -> None:
        self.enable_storage = True
        self.storage_stop_event = threading.Event()
        self.prefetch_queue: queue.Queue[Any] = queue.Queue()
        self.backup_queue: queue.Queue[Any] = queue.Queue()
        self.prefetch_buffer: queue.Queue[Any] = queue.Queue()
        self.prefetch_sync_queue: queue.Queue[Any] = queue.Queue()
        self.release = threading.Event()
        self.done: list[Any] = []
        for name, function in THREADS.items():
            thread = threading.Thread(target=getattr(self, function), daemon=True)
            setattr(self, name, thread)
            thread.start()

    def prefetch_thread_func(self) -> None:
        while not self.storage_stop_event.is_set():
            try:
                operation = self.prefetch_queue.get(block=True, timeout=1)
            except queue.Empty:
                continue
            if operation is not None:
                self.work(operation)

    def prefetch_io_aux_func(self) -> None:
        while not self.storage_stop_event.is_set():
            try:
                self.prefetch_buffer.get(block=True, timeout=1)
            except queue.Empty:
                continue

    def prefetch_sync_thread_func(self) -> None:
        while not self.storage_stop_event.is_set():
            try:
                self.prefetch_sync_queue.get(block=True, timeout=1)
            except queue.Empty:
                continue

    def backup_thread_func(self) -> None:
        while not self.storage_stop_event.is_set():
            try:
                operation = self.backup_queue.get(block=True, timeout=1)
            except queue.Empty:
                continue
            if operation is not None:
                self.work(operation)

    def work(self, operation: Any) -> None:
        """A store that hangs: in a queue of its own, which must not look like the thread's own wait."""
        inner: queue.Queue[Any] = queue.Queue()
        while not self.release.is_set():
            try:
                inner.get(timeout=0.02)
            except queue.Empty:
                continue
        self.done.append(operation)

    def stop(self) -> None:
        """As the engine stops them, with a join that gives up at once."""
        self.storage_stop_event.set()
        for source in (self.prefetch_queue, self.backup_queue, self.prefetch_buffer, self.prefetch_sync_queue):
            source.put(None)


def until(condition: Callable[[], bool]) -> None:
    deadline = threading.Event()
    for _ in range(int(DEADLINE_S / POLL_S)):
        if condition():
            return
        deadline.wait(POLL_S)
    raise AssertionError("not in time")


@pytest.fixture
def controller() -> Iterator[Controller]:
    made = Controller()
    yield made
    made.release.set()
    made.stop()
    for name in THREADS:
        getattr(made, name).join(DEADLINE_S)


def test_waiting_threads_are_idle(controller: Controller) -> None:
    threads = StorageThreads(controller)
    until(lambda: threads.busy() == [])
    assert threads.counters() == {"storage_calls": 0, "storage_queues": 0}
    assert threads.dead() == []
    assert [(t.name, t.alive) for t in threads.reports()] == [(name, True) for name in THREADS]


def test_a_thread_inside_a_call_is_busy_and_queued_work_is_counted(controller: Controller) -> None:
    """F11: the engine's verdict says idle here. A store's own queue is not the thread's."""
    threads = StorageThreads(controller)
    until(lambda: threads.busy() == [])
    for operation in ("one", "two", None):
        controller.backup_queue.put(operation)
    until(lambda: threads.busy() == ["backup_thread"])
    until(lambda: threads.counters()["storage_queues"] == 1)  # "two"; None only wakes
    controller.release.set()
    until(lambda: threads.counters() == {"storage_calls": 0, "storage_queues": 0})
    assert controller.done == ["one", "two"]


def test_dead_threads_are_found_and_started_again(controller: Controller) -> None:
    """The engine's failed stop leaves three threads gone and one stuck; afterwards all four work."""
    threads = StorageThreads(controller)
    controller.prefetch_queue.put("stuck")
    until(lambda: threads.busy() == ["prefetch_thread"])
    controller.stop()
    until(lambda: not controller.backup_thread.is_alive())  # type: ignore[attr-defined]
    assert threads.dead() == sorted(THREADS)
    until(lambda: sum(getattr(controller, name).is_alive() for name in THREADS) == 1)
    started = threads.repair()
    assert sorted(started) == ["backup_thread", "prefetch_io_aux_thread", "prefetch_sync_thread"]
    assert threads.dead() == []
    assert {t.name: t.restarts for t in threads.reports()}["backup_thread"] == 1
    controller.backup_queue.put("later")
    controller.release.set()
    until(lambda: sorted(controller.done) == ["later", "stuck"])
    controller.prefetch_queue.put("again")
    until(lambda: "again" in controller.done)


def test_nothing_is_repaired_while_storage_is_off(controller: Controller) -> None:
    threads = StorageThreads(controller)
    controller.enable_storage = False
    controller.stop()
    until(lambda: not any(getattr(controller, name).is_alive() for name in THREADS))
    assert threads.dead() == []
    assert threads.reports() == []
    assert threads.repair() == []
    assert controller.storage_stop_event.is_set()


def test_a_healthy_set_is_not_touched(controller: Controller) -> None:
    before = [getattr(controller, name) for name in THREADS]
    assert StorageThreads(controller).repair() == []
    assert [getattr(controller, name) for name in THREADS] == before
