"""Closes storage sets off the scheduler thread, with a deadline, and never under a live thread (F23, F117, F28).

A set is closed by a thread of its own, so that a store that hangs in its shutdown holds up neither the scheduler
nor the closing of other sets. A set whose threads do not stop in time stays open and is reported as quarantine;
closing is tried again with growing pauses, and the report clears itself when that succeeds.
"""

import logging
import threading
from collections.abc import Callable

import msgspec

from hicache_hooks.adapter import EngineAdapter
from hicache_hooks.builder import Launch, launch_here
from hicache_hooks.faults import Faults

log = logging.getLogger(__name__)

CLOSE_S = 3.0  # one deadline for all threads of a set together
RETRY_FIRST_S = 1.0
RETRY_MAX_S = 60.0


class Closed(msgspec.Struct, frozen=True):
    """How one attempt to close ended: ``stuck`` names threads that still run, ``error`` what the backend said."""

    ticket: int
    stuck: tuple[str, ...] = ()
    error: str = ""


class Closer:
    """Sets on their way out. ``close`` is called on the scheduler thread."""

    def __init__(
        self,
        adapter: EngineAdapter,
        done: Callable[[Closed], None],
        faults: Faults,
        timeout_s: float = CLOSE_S,
        launch: Launch = launch_here,
    ) -> None:
        """``done`` is called off the scheduler thread after each attempt, and must not raise."""
        self._adapter = adapter
        self._done = done
        self._faults = faults
        self._timeout_s = timeout_s
        self._launch = launch
        self._tickets = 0
        self._leaving = threading.Event()
        self._threads: dict[int, threading.Thread] = {}

    def close(self, parked: object) -> int:
        """Start closing; returns the ticket that ``Closed`` will carry."""
        self._tickets += 1
        ticket = self._tickets
        thread = threading.Thread(target=self._run, args=(ticket, parked), name=f"hicache-close-{ticket}", daemon=True)
        self._threads = {key: t for key, t in self._threads.items() if t.ident is None or t.is_alive()}
        self._threads[ticket] = thread
        self._launch(lambda: self._begin(ticket, thread))
        return ticket

    def _begin(self, ticket: int, thread: threading.Thread) -> None:
        try:
            thread.start()
        except RuntimeError as error:  # out of threads: it stays open, and is told as quarantine
            log.error("no thread to close a storage set with: %s", error)
            self._done(Closed(ticket, stuck=("no_thread",), error=str(error)))

    def stop(self, timeout_s: float) -> None:
        """Give up retries and wait for running attempts, ``timeout_s`` seconds for each at most."""
        self._leaving.set()
        for thread in list(self._threads.values()):
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join(timeout_s)

    def _run(self, ticket: int, parked: object) -> None:
        pause_s = RETRY_FIRST_S
        while True:
            closed = self._attempt(ticket, parked)
            self._done(closed)
            if not closed.stuck or self._leaving.wait(pause_s):
                return
            pause_s = min(RETRY_MAX_S, pause_s * 2)

    def _attempt(self, ticket: int, parked: object) -> Closed:
        try:
            self._faults.hit("close", "before_apply")
        except Exception as error:  # nothing was touched yet, so it can be tried again
            return Closed(ticket, stuck=("close_not_begun",), error=str(error))
        try:
            stuck = tuple(self._adapter.close(parked, self._timeout_s))
        except BaseException as error:
            # Its threads ended, or the adapter would have named them: what the store said is only told.
            log.exception("closing a storage set failed")
            return Closed(ticket, error=f"{type(error).__name__}: {error}")
        if stuck:
            log.error("threads did not stop in %.1f s, the backend stays open: %s", self._timeout_s, ", ".join(stuck))
        return Closed(ticket, stuck=stuck)
