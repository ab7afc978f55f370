"""Stateless calls, answered without the scheduler: report, validate, describe, bypass, clear.

Called on the agent thread. What may take long (files are read, packages looked for, a store emptied) runs on a helper
thread, so that heartbeats go on; their number is bounded, and a call over the bound is refused at once (F46).
"""

import logging
import threading
from collections.abc import Callable
from typing import Any, Protocol

from hicache_hooks.adapter import EngineAdapter
from hicache_hooks.helpers import Helpers
from hicache_proto.errors import HicacheError, Internal, UnsupportedByEngine
from hicache_proto.hooklink import AskReport, Bypass, Call, ClearNamespace, Describe, SetView, Validate
from hicache_proto.model import Plan

log = logging.getLogger(__name__)

MAX_HELPERS = 4

Result = tuple[Plan | None, dict[str, Any] | None]


class Answers(Protocol):
    """Where answers go."""

    def answer(
        self,
        call: Call,
        *,
        ok: bool,
        error: HicacheError | None = None,
        plan: Plan | None = None,
        data: dict[str, Any] | None = None,
    ) -> None: ...

    def changed(self) -> None: ...


class Queries:
    """Answers the stateless calls of one rank."""

    def __init__(self, adapter: EngineAdapter, out: Answers, helpers: Helpers | None = None) -> None:
        self._adapter = adapter
        self._out = out
        self._helpers = helpers or Helpers()
        self._slots = threading.BoundedSemaphore(MAX_HELPERS)

    def take(self, call: Call) -> bool:
        """Answer ``call``, or return False when it belongs to the scheduler thread. Never raises."""
        match call.body:
            case AskReport():
                self._out.answer(call, ok=True)
            case Bypass(enabled=enabled):
                self._run(call, lambda: (None, {"was": self._adapter.set_bypass(enabled)}))
                self._out.changed()
            case Validate(target=target, mode=mode, swap=swap):
                self._help(call, lambda: (self._adapter.validate(target, mode=mode, swap=swap), None))
            case Describe():
                self._help(call, lambda: (None, {"backends": self._adapter.describe_backends()}))
            case ClearNamespace(namespace=namespace):
                self._help(call, lambda: (None, {"deleted": self._adapter.clear(namespace)}))
            case SetView():
                error = UnsupportedByEngine("a rank has no view of its own to set", details={"reason": "not_frontend"})
                self._out.answer(call, ok=False, error=error)
            case _:
                return False
        return True

    def _help(self, call: Call, work: Callable[[], Result]) -> None:
        if not self._slots.acquire(blocking=False):
            error = Internal(f"{MAX_HELPERS} queries run already", details={"reason": "helpers_busy"})
            self._out.answer(call, ok=False, error=error)
            return

        def run() -> None:
            try:
                self._run(call, work)
            finally:
                self._slots.release()

        def no_thread(failure: RuntimeError) -> None:
            self._slots.release()
            self._out.answer(call, ok=False, error=Internal(f"no thread: {failure}", details={"reason": "no_thread"}))

        self._helpers.run(run, f"hicache-{call.phase}", no_thread)

    def _run(self, call: Call, work: Callable[[], Result]) -> None:
        try:
            plan, data = work()
        except HicacheError as error:
            self._out.answer(call, ok=False, error=error)
        except Exception as error:
            log.exception("%s failed", call.phase)
            wrapped = Internal(f"{type(error).__name__}: {error}", details={"reason": "query_failed"})
            self._out.answer(call, ok=False, error=wrapped)
        else:
            self._out.answer(call, ok=True, plan=plan, data=data)
