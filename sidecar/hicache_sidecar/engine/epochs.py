"""Tells that a store lost all it held (F70): an event per change and rank, from the ranks' reports.

It is news, never a failure: nothing here reaches the failover. A change is told once. Its number counts up over all
stores of one process, so a new connection of the same process, or another store in it, is neither told twice nor left
out; what a process shows when it is first met happened before our time, and only the status has it.
"""

import logging

from hicache_sidecar.engine.events import EventHub
from hicache_sidecar.engine.moves import Process, process_of
from hicache_sidecar.engine.registry import Registry, Session

log = logging.getLogger("hicache_sidecar.engine")


class StoreEpochs:
    """Listens to a registry."""

    def __init__(self, registry: Registry, hub: EventHub) -> None:
        self._hub = hub
        self._told: dict[int, tuple[Process, int]] = {}  # by rank: its process, and the last change told of it
        registry.on_session.append(self._met)
        registry.on_report.append(self._look)

    def _met(self, session: Session) -> None:
        if session.hello.role != "rank" or not session.alive:
            return
        known = self._told.get(session.rank)
        if known is None or known[0] != process_of(session):
            self._told[session.rank] = process_of(session), _number(session)
        else:
            self._look(session)

    def _look(self, session: Session) -> None:
        guard = session.report.guard
        change = guard.epoch_change if guard is not None else None
        known = self._told.get(session.rank)
        if guard is None or change is None or known is None or change.n <= known[1]:
            return
        self._told[session.rank] = known[0], change.n
        log.warning(
            "rank %d: backend %s lost what it held (epoch %s -> %s, %s); its pages are written again",
            session.rank, guard.name, change.old, change.new, change.how,
        )  # fmt: skip
        self._hub.publish(
            "store_epoch_changed",
            rank=session.rank,
            backend=guard.name,
            old=change.old,
            new=change.new,
            how=change.how,
        )


def _number(session: Session) -> int:
    guard = session.report.guard
    return guard.epoch_change.n if guard is not None and guard.epoch_change is not None else 0
