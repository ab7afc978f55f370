"""GET /events: the event stream as server-sent events.

Each event is ``id:``, ``event:`` (its kind) and ``data:`` (the whole ``EventDocument`` as JSON). A comment goes out
every KEEPALIVE_S, so that proxies keep the connection and a dead client is noticed by a failed write. A client that
stops reading is cut by the write deadline of the HTTP listener; until then one event waits here and the rest in
the service's own bounded buffer.
"""

from collections.abc import AsyncIterator

import msgspec
import trio
from starlette.types import Receive, Send

from hicache_proto.api import EventDocument
from hicache_sidecar.server.connection import closing_events

KEEPALIVE_S = 15.0


def format_event(event: EventDocument) -> bytes:
    """One event. JSON has no raw line breaks, so ``data:`` is one line whatever the event holds."""
    kind = "".join(char for char in event.kind if char.isprintable())
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (event.id, kind.encode(), msgspec.json.encode(event))


async def stream(events: AsyncIterator[EventDocument], receive: Receive, send: Send, closing: trio.Event) -> None:
    """Send events until the client leaves, the iterator ends, or the daemon stops.

    Args:
        closing: set when the daemon stops.
    """
    inbox, outbox = trio.open_memory_channel[EventDocument](0)
    await send({
        "type": "http.response.start",
        "status": 200,
        "headers": [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-store"),
            (b"x-accel-buffering", b"no"),
        ],
    })  # fmt: skip
    async with trio.open_nursery() as nursery:

        async def pump() -> None:
            async with inbox, closing_events(events):
                async for event in events:
                    await inbox.send(event)

        async def until_left() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            nursery.cancel_scope.cancel()

        async def until_stopped() -> None:
            await closing.wait()
            nursery.cancel_scope.cancel()

        nursery.start_soon(pump)
        nursery.start_soon(until_left)
        nursery.start_soon(until_stopped)
        with outbox:
            await _write(outbox, send)
        nursery.cancel_scope.cancel()
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _write(outbox: trio.MemoryReceiveChannel[EventDocument], send: Send) -> None:
    while True:
        chunk = b": keep-alive\n\n"
        with trio.move_on_after(KEEPALIVE_S):
            try:
                chunk = format_event(await outbox.receive())
            except trio.EndOfChannel:
                return
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
