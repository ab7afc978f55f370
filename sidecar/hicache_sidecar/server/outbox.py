"""Frames waiting to be written to one control connection, bounded, with one writer.

A client that does not read must cost a bounded amount of memory and never stop anybody else. Results and events wait
for room; progress is dropped when there is none, because the next one says more. Progress may wait ``COMPANY_S`` for
what comes after it: phases last a millisecond or two, and each write wakes the client. The writer gives each batch a
deadline; when it passes, the connection is closed.
"""

from collections import deque

import trio

from hicache_proto import control
from hicache_proto.errors import TooLarge
from hicache_proto.framing import encode_frame

MAX_QUEUED_BYTES = 2 << 20  # two frames of the largest size, or thousands of usual ones
SEND_S = 10.0  # one batch to a client that does not read
COMPANY_S = 0.02  # nobody sees progress later than this; an operation of this length is told in one write
_BATCH_BYTES = 256 << 10  # frames joined into one send (one system call instead of one per frame)


class Outbox:
    """The queue. ``put`` waits for room, ``offer`` does not."""

    def __init__(self) -> None:
        self._frames: deque[bytes] = deque()
        self._bytes = 0
        self._closed = False
        self._urgent = False  # a frame is queued that must not wait for company
        self._due = 0.0  # when those that may must go out
        self._lot = trio.lowlevel.ParkingLot()
        self._room = trio.lowlevel.ParkingLot()

    async def put(self, frame: control.ServerFrame) -> None:
        """Queue a frame that must arrive; one over 1 MiB becomes an error frame with the same id."""
        data = _encode(frame)
        while self._bytes + len(data) > MAX_QUEUED_BYTES and not self._closed:
            await self._room.park()
        self._urgent = True
        self._append(data)

    def offer(self, frame: control.ServerFrame, *, soon: bool = False) -> bool:
        """Queue a frame if there is room for it; with ``soon`` it may wait for company. False: it was dropped."""
        data = _encode(frame)
        if self._closed or self._bytes + len(data) > MAX_QUEUED_BYTES:
            return False
        self._urgent = self._urgent or not soon
        if not self._frames:
            self._due = trio.current_time() + COMPANY_S
        self._append(data)
        return True

    def close(self) -> None:
        """No more frames; ``write_to`` ends after those that are queued."""
        self._closed = True
        self._lot.unpark_all()
        self._room.unpark_all()

    async def write_to(self, stream: trio.abc.SendStream) -> None:
        """Send until closed and empty.

        Raises:
            trio.TooSlowError: the client took nothing for SEND_S seconds.
            trio.BrokenResourceError: the client is gone.
        """
        while True:
            while not self._frames:
                if self._closed:
                    return
                await self._lot.park()
            if not self._urgent and not self._closed:
                with trio.move_on_at(self._due):
                    while not self._urgent and not self._closed:
                        await self._lot.park()
            batch = bytearray()
            while self._frames and len(batch) < _BATCH_BYTES:
                batch += self._frames.popleft()
            self._urgent = self._urgent and bool(self._frames)
            with trio.fail_after(SEND_S):
                await stream.send_all(batch)
            self._bytes -= len(batch)
            self._room.unpark_all()

    def _append(self, data: bytes) -> None:
        if self._closed:
            return
        self._frames.append(data)
        self._bytes += len(data)
        self._lot.unpark_all()


def _encode(frame: control.ServerFrame) -> bytes:
    try:
        return encode_frame(control.encode(frame))
    except TooLarge as exc:
        ident = 0 if isinstance(frame, control.ServerHello) else frame.id
        return encode_frame(control.encode(control.Error(id=ident, error=exc.body())))
