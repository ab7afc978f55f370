"""Builds a storage set off the scheduler thread, one at a time (design.md, rule 9).

A builder cannot be stopped from outside: native set-up code may hang for minutes. So it is never waited for. It
hands its result to the scheduler thread as a ``Built``, which gives it back to be closed when its operation is
over. While one runs the next PREPARE is refused (``busy``), which bounds threads and memory to one.
"""

import logging
import threading
from collections.abc import Callable

import msgspec

from hicache_hooks.adapter import EngineAdapter
from hicache_hooks.faults import Faults
from hicache_hooks.helpers import Helpers
from hicache_proto.errors import HicacheError, PrepareFailed
from hicache_proto.model import TargetState

log = logging.getLogger(__name__)


class Built(msgspec.Struct, frozen=True):
    """A builder's end. ``result`` is the adapter's opaque set, meaningful when ``error`` is None."""

    n: int
    result: object = None
    error: HicacheError | None = None


class Builder:
    """The one builder of a rank. ``start`` and ``cancel`` are called on the scheduler thread."""

    def __init__(
        self, adapter: EngineAdapter, done: Callable[[Built], None], faults: Faults, helpers: Helpers | None = None
    ) -> None:
        """``done`` is called off the scheduler thread, once per ``start``, and must not raise."""
        self._adapter = adapter
        self._done = done
        self._faults = faults
        self._helpers = helpers or Helpers()
        self._cancelled: threading.Event | None = None
        self._running_n: int | None = None  # written by both threads, each in one store

    @property
    def busy(self) -> int | None:
        """The operation whose builder still runs, dead or not."""
        return self._running_n

    def start(self, n: int, target: TargetState) -> None:
        """Start building for operation ``n``.

        Raises:
            PrepareFailed: an older builder still runs.
        """
        if self._running_n is not None:
            raise busy_error(self._running_n)
        self._running_n = n
        cancelled = self._cancelled = threading.Event()
        self._helpers.run(
            lambda: self._run(n, target, cancelled), f"hicache-build-{n}", lambda error: self._no_thread(n, error)
        )

    def _no_thread(self, n: int, error: RuntimeError) -> None:
        self._running_n = None
        message = f"cannot start a builder thread: {error}"
        self._done(Built(n=n, error=PrepareFailed(message, details={"reason": "no_thread"})))

    def cancel(self) -> None:
        """Tell a running builder that nobody waits any more; it stops at its next look."""
        if self._cancelled is not None:
            self._cancelled.set()

    def _run(self, n: int, target: TargetState, cancelled: threading.Event) -> None:
        try:
            self._faults.hit("build", "before_apply")
            built = Built(n=n, result=self._adapter.build(target, cancelled.is_set))
        except HicacheError as error:
            built = Built(n=n, error=error)
        except BaseException as error:
            log.exception("operation %d: building the storage set failed", n)
            message = f"{type(error).__name__}: {error}"
            built = Built(n=n, error=PrepareFailed(message, details={"reason": "build_raised"}))
        self._running_n = None
        self._done(built)


def busy_error(n: int) -> PrepareFailed:
    """The refusal of a PREPARE while operation ``n``'s builder runs."""
    return PrepareFailed(
        f"the builder of operation {n} has not ended yet",
        details={"reason": "builder_busy", "running": n},
        hint="repeat when the earlier attempt has given up; an engine restart ends it for good",
    )
