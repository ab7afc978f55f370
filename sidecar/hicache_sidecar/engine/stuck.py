"""Tells that threads stand in a store's call, and that they are out of it again (F39): events, from the ranks' reports.

Status and metrics show it while it lasts; the events are what is left of it afterwards. Names differ from call to
call (a thread that was given up is replaced), so each is told when it is first seen, and the end once none is left.
"""

import logging

from hicache_sidecar.engine.events import EventHub
from hicache_sidecar.engine.registry import Registry, Session
from hicache_sidecar.engine.status import stuck_threads

log = logging.getLogger("hicache_sidecar.engine")


class StuckThreads:
    """Listens to a registry."""

    def __init__(self, registry: Registry, hub: EventHub) -> None:
        self._hub = hub
        self._seen: dict[int, tuple[str, set[str]]] = {}  # by rank: its session, the threads that were told of
        registry.on_report.append(self._look)

    def _look(self, session: Session) -> None:
        if session.hello.role != "rank":
            return
        now = set(stuck_threads(session.report))
        owner, told = self._seen.get(session.rank, ("", set()))
        if owner != session.id:
            told = set()  # another process, or a new connection of it: what hangs there is told anew
        fresh = now - told
        if fresh:
            names = sorted(fresh)
            log.warning("rank %d: stuck inside the store: %s", session.rank, ", ".join(names))
            self._hub.publish("storage_stuck", rank=session.rank, threads=names)
        elif told and not now:
            log.info("rank %d: no thread is stuck inside the store any more", session.rank)
            self._hub.publish("storage_unstuck", rank=session.rank)
        self._seen[session.rank] = session.id, (told | now if now else set())
