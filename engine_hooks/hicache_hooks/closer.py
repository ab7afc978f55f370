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
from hicache_hooks.faults import Faults
from hicache_hooks.helpers import Helpers

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
        helpers: Helpers | None = None,
    ) -> None:
        """``done`` is called off the scheduler thread after each attempt, and must not raise."""
        self._adapter = adapter
        self._done = done
        self._faults = faults
        self._timeout_s = timeout_s
        self._helpers = helpers or Helpers()
        self._tickets = 0
        self._leaving = threading.Event()
        self._running: dict[int, threading.Event] = {}  # set when its thread is through

    def close(self, parked: object) -> int:
        """Start closing; returns the ticket that ``Closed`` will carry."""
        self._tickets += 1
        ticket = self._tickets
        over = threading.Event()
        self._running = {key: event for key, event in self._running.items() if not event.is_set()}
        self._running[ticket] = over
        self._helpers.run(
            lambda: self._run(ticket, parked, over),
            f"hicache-close-{ticket}",
            lambda error: self._no_thread(ticket, over, error),
        )
        return ticket

    def _no_thread(self, ticket: int, over: threading.Event, error: RuntimeError) -> None:
        """Out of threads: the set stays open, and is told as quarantine."""
        log.error("no thread to close a storage set with: %s", error)
        over.set()
        self._done(Closed(ticket, stuck=("no_thread",), error=str(error)))

    def stop(self, timeout_s: float) -> None:
        """Give up retries and wait for running attempts, ``timeout_s`` seconds for each at most."""
        self._leaving.set()
        for over in list(self._running.values()):
            over.wait(timeout_s)

    def _run(self, ticket: int, parked: object, over: threading.Event) -> None:
        pause_s = RETRY_FIRST_S
        try:
            while True:
                closed = self._attempt(ticket, parked)
                self._done(closed)
                if not closed.stuck or self._leaving.wait(pause_s):
                    return
                pause_s = min(RETRY_MAX_S, pause_s * 2)
        finally:
            over.set()

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
