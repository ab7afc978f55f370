"""Frames from one control connection: length first, then bytes, then depth, then the decoder (failures.md F95).

Deadlines: HELLO_S for the first frame, FRAME_S for the rest of a frame once its first byte came, IDLE_S between frames
while nothing is asked for. A cancelled wait loses nothing: received bytes stay in the buffer.
"""

from collections.abc import Callable

import trio

from hicache_proto.errors import InvalidRequest
from hicache_proto.framing import HEADER, frame_length

HELLO_S = 5.0  # a client speaks first and at once
FRAME_S = 10.0  # 1 MiB over a local socket takes milliseconds
IDLE_S = 600.0  # an open connection costs a few KiB; ten minutes of silence without a request is a leak
_CHUNK = 64 << 10


class FrameReader:
    """Cuts a byte stream into payloads."""

    def __init__(self, stream: trio.abc.ReceiveStream) -> None:
        self._stream = stream
        self._buffer = bytearray()

    async def first(self) -> bytes | None:
        """The first payload, or None when the client left.

        Raises:
            trio.TooSlowError: nothing complete within HELLO_S.
            HicacheError: the length is not allowed, or the stream was cut inside a frame.
        """
        with trio.fail_after(HELLO_S):
            return await self._payload() if self._buffer or await self._fill() else None

    async def next(self, busy: Callable[[], bool]) -> bytes | None:
        """The next payload; None when the client left, or said nothing for IDLE_S while not ``busy()``.

        Raises:
            trio.TooSlowError: a frame that began did not end within FRAME_S.
            HicacheError: as ``first``.
        """
        while not self._buffer:
            with trio.move_on_after(IDLE_S) as scope:
                if not await self._fill():
                    return None
            if scope.cancelled_caught and not busy():
                return None
        if self._whole():
            return await self._payload()  # nothing to wait for
        with trio.fail_after(FRAME_S):
            return await self._payload()

    def _whole(self) -> bool:
        """A frame is in the buffer from its first byte to its last."""
        return (
            len(self._buffer) >= HEADER.size and len(self._buffer) - HEADER.size >= HEADER.unpack_from(self._buffer)[0]
        )

    async def _payload(self) -> bytes:
        await self._need(HEADER.size)
        length = frame_length(bytes(self._buffer[: HEADER.size]))  # refuses before a byte of the payload is kept
        end = HEADER.size + length
        await self._need(end)
        payload = bytes(self._buffer[HEADER.size : end])
        del self._buffer[:end]
        return payload

    async def _need(self, size: int) -> None:
        while len(self._buffer) < size:
            if not await self._fill():
                raise InvalidRequest("the connection ended inside a frame", details={"reason": "truncated"})

    async def _fill(self) -> bool:
        data = await self._stream.receive_some(_CHUNK)
        self._buffer += data
        return bool(data)
