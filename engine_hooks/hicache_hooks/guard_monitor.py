"""The guard's one thread: it sleeps until the next deadline or probe is due, and nobody polls (F4).

``wake`` is on the path of every call, so it costs one comparison while the thread would wake early enough anyway.
"""

import logging
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

_NEVER = float("inf")


class Monitor:
    """Calls ``tick`` when it said that it wants to be called, and when somebody wakes it."""

    def __init__(self, tick: Callable[[], float | None], name: str) -> None:
        """``tick`` does what is due and returns the seconds until it wants to run again; None: when woken."""
        self._tick = tick
        self._name = name
        self._changed = threading.Condition()
        self._wakes_at = _NEVER  # never while ``tick`` runs: whoever wakes it then is heard
        self._asked = False
        self._stopped = False
        self._thread: threading.Thread | None = None

    def wake(self, at: float) -> None:
        """Run ``tick`` at ``at`` (``time.monotonic``) at the latest. Starts the thread when there is none."""
        if self._wakes_at <= at and self._thread is not None:
            return
        with self._changed:
            self._asked = True
            self._changed.notify()
            if self._thread is None and not self._stopped:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # out of threads: the next call tries again
                    log.error("no thread to watch the store's deadlines: %s", error)
                    return
                self._thread = thread

    def stop(self, timeout_s: float = 1.0) -> None:
        """End the thread. It may be called by the thread itself. Idempotent."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._stopped:
                    return
                self._asked = False
            wait_s: float | None = 1.0
            try:
                wait_s = self._tick()
            except Exception:  # a defect of ours: the deadlines must go on being watched
                log.exception("the guard's monitor")
            with self._changed:
                if not self._stopped and not self._asked:
                    self._wakes_at = _NEVER if wait_s is None else time.monotonic() + wait_s
                    self._changed.wait(wait_s)
                    self._wakes_at = _NEVER
