"""Builds a storage set off the scheduler thread, one at a time (design.md, rule 9).

A builder cannot be stopped from outside: native set-up code may hang for minutes, or for ever. So it is never waited
for. It hands its result to the scheduler thread as a ``Built``, which gives it back to be closed when its operation is
over. While one runs the next PREPARE is refused (``busy``).

A builder that nobody waits for any more gets ``GIVE_UP_S`` to end. Then it is *given up*: the next PREPARE may build,
and what the old one still makes is closed when it comes (``Built.late``). ``MAX_GIVEN_UP`` bounds such threads and the
memory that they hold; beyond it the last one keeps the next PREPARE waiting, until one of them is back.
"""

import logging
import sys
import threading
import traceback
from collections.abc import Callable

import msgspec

from hicache_hooks.abandoned import THREADS
from hicache_hooks.adapter import EngineAdapter
from hicache_hooks.faults import Faults
from hicache_hooks.helpers import Helpers
from hicache_proto.errors import HicacheError, PrepareFailed
from hicache_proto.model import TargetState

log = logging.getLogger(__name__)

GIVE_UP_S = 5.0  # most set-ups have seen by then that they were cancelled; an operation has 120 s
MAX_GIVEN_UP = 2  # each may hold a store's whole memory


class Built(msgspec.Struct, frozen=True):
    """A builder's end. ``result`` is the adapter's opaque set, meaningful when ``error`` is None.

    ``late``: this builder was given up before, and that was its end for the table; ``result`` is to be closed.
    """

    n: int
    result: object = None
    error: HicacheError | None = None
    late: bool = False


class _Attempt:
    """One running builder. ``ended`` and ``given_up`` change under the builder's lock: one of them comes first."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.cancelled = threading.Event()
        self.ended = threading.Event()
        self.given_up = False
        self.thread: threading.Thread | None = None


class Builder:
    """The one builder of a rank. ``start`` and ``cancel`` are called on the scheduler thread."""

    def __init__(
        self,
        adapter: EngineAdapter,
        done: Callable[[Built], None],
        faults: Faults,
        helpers: Helpers | None = None,
        give_up_s: float = GIVE_UP_S,
    ) -> None:
        """``done`` is called off the scheduler thread and must not raise: once per ``start``, and once more (``late``)
        with what a builder made that had been given up."""
        self._adapter = adapter
        self._done = done
        self._faults = faults
        self._helpers = helpers or Helpers()
        self._give_up_s = give_up_s
        self._lock = threading.Lock()
        self._running: _Attempt | None = None
        self._given_up = 0  # that still run

    @property
    def busy(self) -> int | None:
        """The operation whose builder still runs, dead or not; None when there is none, or it was given up."""
        running = self._running
        return None if running is None else running.n

    def start(self, n: int, target: TargetState) -> None:
        """Start building for operation ``n``.

        Raises:
            PrepareFailed: an older builder still runs.
        """
        older = self.busy
        if older is not None:
            raise busy_error(older)
        attempt = self._running = _Attempt(n)
        self._helpers.run(
            lambda: self._run(attempt, target), f"hicache-build-{n}", lambda error: self._no_thread(attempt, error)
        )

    def _no_thread(self, attempt: _Attempt, error: RuntimeError) -> None:
        message = f"cannot start a builder thread: {error}"
        self._end(attempt, Built(n=attempt.n, error=PrepareFailed(message, details={"reason": "no_thread"})))

    def cancel(self) -> None:
        """Tell a running builder that nobody waits any more; it stops at its next look, or is given up. Idempotent."""
        running = self._running
        if running is None or running.cancelled.is_set():
            return
        running.cancelled.set()
        self._helpers.run(
            lambda: self._watch(running), f"hicache-build-watch-{running.n}", lambda error: _unwatched(running, error)
        )

    def _run(self, attempt: _Attempt, target: TargetState) -> None:
        n = attempt.n
        attempt.thread = threading.current_thread()
        try:
            self._faults.hit("build", "before_apply")
            built = Built(n=n, result=self._adapter.build(target, attempt.cancelled.is_set))
        except HicacheError as error:
            built = Built(n=n, error=error)
        except BaseException as error:
            log.exception("operation %d: building the storage set failed", n)
            message = f"{type(error).__name__}: {error}"
            built = Built(n=n, error=PrepareFailed(message, details={"reason": "build_raised"}))
        self._end(attempt, built)

    def _end(self, attempt: _Attempt, built: Built) -> None:
        with self._lock:
            attempt.ended.set()
            if attempt.given_up:
                self._given_up -= 1
                THREADS.back()
                built = msgspec.structs.replace(built, late=True)
            else:
                self._running = None
        if not built.late:
            self._done(built)
            return
        log.warning("operation %d: its builder, given up before, has ended", built.n)
        if built.error is None:
            self._done(built)

    def _watch(self, attempt: _Attempt) -> None:
        """Give ``attempt`` up when it does not end; where too many were given up, wait for one to come back."""
        while not attempt.ended.wait(self._give_up_s):
            with self._lock:
                if attempt.ended.is_set():
                    return
                attempt.given_up = self._given_up < MAX_GIVEN_UP
                if attempt.given_up:
                    self._given_up += 1
                    THREADS.add()
                    self._running = None
            if attempt.given_up:
                log.error("operation %d: its builder does not end and is given up:\n%s", attempt.n, _stack(attempt))
                self._done(Built(n=attempt.n, error=_given_up(attempt.n)))
                return


def _stack(attempt: _Attempt) -> str:
    """Where its thread stands (F23)."""
    thread = attempt.thread
    frame = None if thread is None else sys._current_frames().get(thread.ident or 0)
    return "(no Python frame)" if frame is None else "".join(traceback.format_stack(frame))


def _unwatched(attempt: _Attempt, error: RuntimeError) -> None:
    log.error("operation %d: no thread to watch its builder with, it is waited for: %s", attempt.n, error)


def _given_up(n: int) -> PrepareFailed:
    return PrepareFailed(f"the builder of operation {n} did not end and was given up", details={"reason": "given_up"})


def busy_error(n: int) -> PrepareFailed:
    """The refusal of a PREPARE while operation ``n``'s builder runs."""
    return PrepareFailed(
        f"the builder of operation {n} has not ended yet",
        details={"reason": "builder_busy", "running": n},
        hint="repeat when the earlier attempt has given up; an engine restart ends it for good",
    )
