"""Questions that PREPARE asks a store beside the canary: its health, what it holds (F23, F117).

No request depends on the answer, so a store that does not give it must not keep PREPARE until the operation's
deadline, which names nobody. The question runs on a thread of its own; who asks waits for ``limit_s``. A thread that
is still inside then keeps the store open: ``close`` is left to it.
"""

import logging
import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

from hicache_hooks.abandoned import THREADS
from hicache_hooks.backends.base import Backend
from hicache_hooks.describe import describe_exception
from hicache_proto.errors import PrepareFailed

log = logging.getLogger(__name__)

T = TypeVar("T")


class Asking:
    """One opened store under construction. Used by the builder's thread alone; its own threads come and go."""

    def __init__(self, backend: Backend, limit_s: float) -> None:
        self._backend = backend
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._inside = 0
        self._close_wanted = False

    @property
    def inside(self) -> bool:
        """True while a question has not come back."""
        return self._inside > 0

    def ask(self, what: str, question: Callable[[], T]) -> T:
        """The answer.

        Raises:
            PrepareFailed: none within ``limit_s`` (``details.reason`` = ``<what>_late``), or no thread for it.
            BaseException: what ``question`` raised.
        """
        box: list[Any] = []
        given_up: list[bool] = []

        def run() -> None:
            try:
                answer: Any = question(), None
            except BaseException as exc:  # the thread is ours, the exception is for who asked
                answer = None, exc
            self._leave()  # first: who has the answer may close the store
            box.append(answer)
            with self._lock:
                if given_up:
                    THREADS.back()

        thread = threading.Thread(target=run, name=f"hicache-{what}", daemon=True)
        with self._lock:
            self._inside += 1
        try:
            thread.start()
        except RuntimeError as exc:
            self._leave()
            raise PrepareFailed(f"cannot ask the store: {exc}", details={"reason": "no_thread"}) from None
        thread.join(self._limit_s)
        with self._lock:
            if not box:
                given_up.append(True)
                THREADS.add()
        if given_up:
            raise PrepareFailed(
                f"the store's {what} call has not come back within {self._limit_s:g} s",
                details={"reason": f"{what}_late"},
            )
        answer, failed = box[0]
        if failed is not None:
            raise failed
        return cast("T", answer)

    def close(self) -> None:
        """Close the store, now or when the last question has left it.

        Raises:
            BaseException: what the store's close raised, if it was closed now.
        """
        with self._lock:
            if self._inside:
                self._close_wanted = True
                return
        self._backend.close()

    def _leave(self) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside or not self._close_wanted:
                return
            self._close_wanted = False
        try:
            self._backend.close()
        except BaseException as exc:  # nobody waits for it any more
            log.error("closing a store that answered late failed: %s", describe_exception(exc))
