"""Requests that the leader pulled while admission is closed: a list in front of the engine's queues, in order.

The gate works at the leader's pull, so that no rank ever sees a request that is held: work requests stay here,
everything else passes. Three kinds need care, for the engine itself does not know of held requests:

* An abort (of one id, of all, of a client that went) ends held requests here with the engine's own answer, and still
  passes, for the engine may have more of them.
* A batch is held whole. An abort takes the named requests out of it; what is left stays a batch.
* A health check is a generate request of a known prefix. It is neither held nor run: the engine is asked to answer
  it with its next heartbeat, as it does for a busy engine.
"""

import logging
from collections.abc import Iterable
from typing import Any, Protocol

log = logging.getLogger(__name__)


class EngineRequests(Protocol):
    """What is needed of the engine's request types."""

    def is_work(self, request: Any) -> bool:
        """True for a generate or embedding request, or a batch of them."""

    def batch_of(self, request: Any) -> list[Any] | None:
        """The requests of a batch; None when it is none."""

    def with_batch(self, request: Any, members: list[Any]) -> Any:
        """The same batch with ``members`` instead."""

    def is_abort(self, request: Any) -> bool:
        """True for an abort."""

    def is_health_check(self, request: Any) -> bool:
        """True for the engine's own health probe."""

    def answer_abort(self, held: Any, abort: Any) -> None:
        """Tell the client of ``held`` that it was aborted, as the engine would."""

    def answer_health(self, request: Any) -> None:
        """Have the health probe answered."""


class Held:
    """The side list of a leader. Scheduler thread only."""

    def __init__(self, engine: EngineRequests) -> None:
        self._engine = engine
        self._list: list[Any] = []
        self.most = 0
        self.aborted = 0

    def __len__(self) -> int:
        return sum(len(self._members(request)) for request in self._list)

    def hold(self, requests: Iterable[Any]) -> list[Any]:
        """Admission is closed: keep the work requests; returns what passes, in order."""
        passing: list[Any] = []
        fresh: list[Any] = []  # kept here first: when a request fails, the engine goes on with what it pulled
        for request in requests:
            if self._engine.is_health_check(request):
                self._engine.answer_health(request)
            elif self._engine.is_work(request):
                fresh.append(request)
            else:
                if (self._list or fresh) and self._engine.is_abort(request):
                    self._list = self._without(self._list, request)
                    fresh = self._without(fresh, request)
                passing.append(request)
        held = [*self._list, *fresh]
        self.most = max(self.most, sum(len(self._members(request)) for request in held))
        self._list = held
        return passing

    def release(self) -> list[Any]:
        """Admission is open again: everything, in the order in which it came."""
        released, self._list = self._list, []
        return released

    def _without(self, requests: list[Any], abort: Any) -> list[Any]:
        kept = []
        for request in requests:
            members = self._members(request)
            left = [member for member in members if not matches(abort, member)]
            for member in members:
                if matches(abort, member):
                    self.aborted += 1
                    self._answer(member, abort)
            if len(left) == len(members):
                kept.append(request)
            elif left:
                kept.append(self._engine.with_batch(request, left))
        return kept

    def _answer(self, held: Any, abort: Any) -> None:
        try:
            self._engine.answer_abort(held, abort)
        except Exception:  # its client is gone; the request is out of the list in any case
            log.exception("the abort of a held request could not be answered")

    def _members(self, request: Any) -> list[Any]:
        batch = self._engine.batch_of(request)
        return [request] if batch is None else batch


def matches(abort: Any, request: Any) -> bool:
    """As the engine matches: all, or an id that begins with the abort's."""
    return bool(abort.abort_all) or (request.rid is not None and request.rid.startswith(abort.rid))
