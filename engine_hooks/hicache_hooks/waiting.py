"""Calls that wait for a state, and how long the scheduler stood still for each kind of step.

Every call is answered exactly once: when ``verdict`` can read the answer off the rank's state, or when its step
raised. What is answered is never stored; a repeat is a new call that reads the present state (rule 5).
Nothing leaves in the middle of a step: reports are read when a message is sent, on another thread, and must not
show the state before the step. So answers and notices are kept until ``settle``, which its owner calls last.
"""

import logging
from typing import Protocol

from hicache_hooks.sets import Sets
from hicache_hooks.verdict import Facts, verdict
from hicache_proto.errors import HicacheError, Internal
from hicache_proto.hooklink import Call
from hicache_proto.transaction import RankRecord

log = logging.getLogger(__name__)

MAX_WAITING = 64  # a coordinator repeats about once a second, and its operations have a deadline


class Outbox(Protocol):
    """Where answers go; every method returns at once and may be called from any thread."""

    def answer(
        self, call: Call, *, ok: bool, error: HicacheError | None = None, stall_us: int | None = None
    ) -> None: ...

    def notice(self, kind: str, detail: str = "") -> None: ...

    def changed(self) -> None: ...


class Waiting:
    """The waiting calls of one rank. Scheduler thread only."""

    def __init__(self, out: Outbox) -> None:
        self._out = out
        self._calls: list[Call] = []
        self._stall_us: dict[str, int] = {}
        self._failed: list[tuple[Call, HicacheError]] = []
        self._notices: list[tuple[str, str]] = []

    def add(self, call: Call) -> None:
        """One more; beyond the bound the oldest is answered at once."""
        self._calls.append(call)
        if len(self._calls) > MAX_WAITING:
            self.fail(self._calls[0], Internal("too many calls wait here", details={"reason": "superseded"}))

    def fail(self, call: Call, error: Exception) -> None:
        """The step of ``call`` raised ``error``."""
        if call not in self._calls:
            return
        self._calls.remove(call)
        if not isinstance(error, HicacheError):
            log.error("operation %d: %s: %s: %s", call.n, call.phase, type(error).__name__, error)
            error = Internal(f"{type(error).__name__}: {error}", details={"reason": "step_failed"})
        self._failed.append((call, error))

    def notice(self, kind: str, detail: str) -> None:
        """Tell the sidecar, once the step is over."""
        self._notices.append((kind, detail))

    def settle(self, record: RankRecord, facts: Facts, sets: Sets) -> bool:
        """Answer every call whose question the present state answers; True when anything was said."""
        failed, self._failed = self._failed, []
        for call, failure in failed:
            self._out.answer(call, ok=False, error=failure, stall_us=self._stall_us.get(call.phase))
        notices, self._notices = self._notices, []
        for kind, detail in notices:
            self._out.notice(kind, detail)
        still = []
        for call in self._calls:
            said = verdict(call, record, facts, sets)
            if said is None:
                still.append(call)
            else:
                error = said if isinstance(said, HicacheError) else None
                self._out.answer(call, ok=error is None, error=error, stall_us=self._stall_us.get(call.phase))
        told = bool(failed or notices or len(still) < len(self._calls))
        self._calls = still
        return told

    def stood_still(self, kind: str, nanoseconds: int) -> None:
        """A step took this long; the longest of its kind in this operation is reported."""
        self._stall_us[kind] = max(nanoseconds // 1000, self._stall_us.get(kind, 0))

    def new_operation(self) -> None:
        """Forget the stalls of the last operation."""
        self._stall_us.clear()
