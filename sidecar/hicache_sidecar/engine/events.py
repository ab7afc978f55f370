"""Numbered events with a bounded memory: what ``/events``, ``watch`` and logs see of the engine side.

A listener never slows a publisher: it reads the ring at its own pace, and one that fell behind the ring is told so
by a fresh snapshot. Numbers start at the daemon's start time in microseconds, so that a ``Last-Event-ID`` of an
earlier daemon is always older than the ring, never mistaken for a number of this one.
"""

import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from typing import Any

import trio

from hicache_proto.api import EventDocument

RING = 1024  # events kept: some minutes of the busiest operations


def now_iso() -> str:
    """Wall time for people."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


class EventHub:
    """Publishes events; any number of followers."""

    def __init__(self, *, first_id: int | None = None) -> None:
        self._next = time.time_ns() // 1000 if first_id is None else first_id
        self._ring: deque[EventDocument] = deque(maxlen=RING)
        self._lot = trio.lowlevel.ParkingLot()

    def publish(self, kind: str, **data: Any) -> None:
        """Append one event and wake the followers. ``data`` must be free of secrets."""
        self._ring.append(EventDocument(id=self._next, kind=kind, at=now_iso(), data=data))
        self._next += 1
        self._lot.unpark_all()

    @property
    def last_id(self) -> int:
        """Number of the last event published."""
        return self._next - 1

    async def follow(
        self, snapshot: Callable[[], dict[str, Any]], last_event_id: int | None = None
    ) -> AsyncIterator[EventDocument]:
        """Events after ``last_event_id``; a snapshot first, when there is none or the ring no longer reaches back.

        The snapshot's number is that of the last event that it contains; ``oldest_event_id`` in it is the first one
        that can still be had, and ``missed_after`` says that there is a gap, and after which event.
        """
        at = last_event_id
        while True:
            oldest = self._ring[0].id if self._ring else self._next
            if at is None or at < oldest - 1 or at > self.last_id:
                gap = {} if at is None else {"missed_after": at}
                at = self.last_id
                yield EventDocument(
                    id=at, kind="snapshot", at=now_iso(), data=snapshot() | gap | {"oldest_event_id": oldest}
                )
                continue
            fresh = [event for event in self._ring if event.id > at]
            for event in fresh:
                at = event.id
                yield event
            if not fresh:
                await self._lot.park()
