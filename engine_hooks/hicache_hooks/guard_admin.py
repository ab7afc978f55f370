"""Calls of a store that are no traffic and that somebody waits for: ``clear`` and ``health``. Each has a deadline.

Such a call runs on a thread of its own. Who asked waits for it until its limit and is told then; the call goes on, is
reported as stuck, and keeps the store open until it is back (rule 4 of guard.py). Until then the same is refused at
once: there is one thread per kind (F46).
"""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from hicache_hooks.describe import describe_exception
from hicache_hooks.guard_watch import Watch
from hicache_proto.errors import PrepareFailed

if TYPE_CHECKING:
    from hicache_hooks.deadlines import Call

T = TypeVar("T")

CLEAR_S = 600.0  # a million pages, deleted one by one; the operation that asked waits for less


class StillRunning(TimeoutError):
    """It was given up now, or an earlier one of its kind has not come back."""


class StoreClosing(RuntimeError):
    """Nobody may call the store any more."""


def not_cleared(failed: BaseException) -> PrepareFailed:
    """The answer to who asked for a clear. Texts of the store's own exceptions are left out (F94)."""
    late = isinstance(failed, StillRunning)
    said = str(failed) if late or isinstance(failed, StoreClosing) else describe_exception(failed)
    details = {"reason": "clear_late" if late else "clear_failed"}
    return PrepareFailed(f"the store could not be cleared: {said}", details=details)


class _Run:
    """One call. ``entered`` is None as long as it has not reached the store."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.entered: Call | None = None
        self.result: Any = None
        self.failed: BaseException | None = None


class AdminCalls:
    """See the module's text. Thread-safe."""

    def __init__(
        self,
        name: str,
        watch: Watch,
        lock: threading.Lock,
        closing: Callable[[], bool],
        left: Callable[[], None],
    ) -> None:
        """``lock``: the guard's; ``closing`` is asked under it; ``left``: a call has left the store."""
        self._name = name
        self._watch = watch
        self._lock = lock
        self._closing = closing
        self._left = left
        self._running: set[str] = set()

    def run(self, kind: str, call: Callable[[], T], limit_s: float) -> T:
        """Its result.

        Raises:
            StillRunning: not back within ``limit_s``, or an earlier one is still inside.
            StoreClosing: the store is being closed.
            RuntimeError: the system gives no thread.
            BaseException: what ``call`` raised.
        """
        run = _Run()
        with self._lock:
            if kind in self._running:
                raise StillRunning(f"an earlier {kind} still runs")
            self._running.add(kind)
        thread = threading.Thread(
            target=self._main, args=(run, kind, call, limit_s), name=f"hicache-{kind}-{self._name}", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:
            with self._lock:
                self._running.discard(kind)
            raise
        if not run.done.wait(limit_s) and self._gave_up(run):
            raise StillRunning(f"no answer within {limit_s:g} s; it goes on")
        if run.failed is not None:
            raise run.failed
        return cast("T", run.result)

    def _gave_up(self, run: _Run) -> bool:
        """False: it came back in this moment."""
        with self._lock:
            if run.done.is_set():
                return False
            if run.entered is not None:
                self._watch.give_up(run.entered)
            return True

    def _main(self, run: _Run, kind: str, call: Callable[[], Any], limit_s: float) -> None:
        with self._lock:
            if self._closing():
                run.failed = StoreClosing("the store is being closed")
            else:
                run.entered = self._watch.enter(kind, 0, limit_s=limit_s)
        if run.entered is not None:
            try:
                run.result = call()
            except BaseException as exc:  # the thread is ours, the exception is for who asked
                run.failed = exc
        with self._lock:
            self._running.discard(kind)
            if run.entered is not None:
                self._watch.leave(run.entered)
            run.done.set()
        self._left()
