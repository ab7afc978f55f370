"""Frames of the control socket, and the limits that hold before any byte is decoded.

A frame is a 4-byte big-endian length and one msgpack map. Size is checked from the length alone, nesting
depth by a scan that allocates nothing per element, so that hostile input never reaches the decoder
(failures.md F95: random bytes and huge lengths are dropped and counted).
"""

import re
import struct

from hicache_proto.errors import InvalidRequest, TooLarge

MAX_FRAME_BYTES = 1 << 20  # interface.md: at most 1 MiB
MAX_DEPTH = 32  # interface.md: at most 32 levels
# A hostile 1 MiB of empty arrays costs the walk below 1.6 s of the reader's loop (measured); this bounds it to 0.2 s.
# The largest honest message (256 ranks, or a long history) has a tenth of it.
MAX_ELEMENTS = 1 << 17  # strings and containers in one message
HEADER = struct.Struct(">I")

# One-byte msgpack elements: positive/negative fixint, nil, false, true.
_SCALARS = re.compile(rb"[\x00-\x7f\xc0\xc2\xc3\xe0-\xff]+")
_OPENERS = bytes(range(0x80, 0xA0)) + b"\xdc\xdd\xde\xdf"
# Payload bytes after the type byte for fixed-width elements.
_FIXED = {
    0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8,
    0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17,
}  # fmt: skip
# Width of the length field, and bytes beside the length (ext has a type byte).
_SIZED = {
    0xC4: (1, 0),
    0xC5: (2, 0),
    0xC6: (4, 0),
    0xC7: (1, 1),
    0xC8: (2, 1),
    0xC9: (4, 1),
    0xD9: (1, 0),
    0xDA: (2, 0),
    0xDB: (4, 0),
}
_CONTAINERS = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}


def encode_frame(payload: bytes) -> bytes:
    """Prefix one encoded message with its length.

    Raises:
        TooLarge: the payload is over 1 MiB.
    """
    if len(payload) > MAX_FRAME_BYTES:
        raise TooLarge(f"frame of {len(payload)} bytes: at most {MAX_FRAME_BYTES}")
    return HEADER.pack(len(payload)) + payload


def frame_length(header: bytes) -> int:
    """Length named by a 4-byte header.

    Raises:
        TooLarge: over 1 MiB; nothing of the frame was read.
        InvalidRequest: zero, which no message can have.
    """
    (length,) = HEADER.unpack(header)
    if length > MAX_FRAME_BYTES:
        raise TooLarge(f"frame of {length} bytes: at most {MAX_FRAME_BYTES}")
    if length == 0:
        raise InvalidRequest("empty frame")
    return int(length)


def check_depth(payload: bytes, limit: int = MAX_DEPTH, *, free: int | None = None) -> None:
    """Walk the msgpack structure of one message without decoding it.

    Args:
        free: a message with at most so many openers of containers is not walked, since it cannot nest deeper than
            that; None: ``limit``.

    Raises:
        InvalidRequest: nested deeper than ``limit``, over ``MAX_ELEMENTS``, cut short, an unknown type byte, or bytes
            left over.
    """
    # A message with no more opener bytes than levels allowed cannot nest deeper; the decoder checks the rest.
    if len(payload) - len(payload.translate(None, _OPENERS)) <= (limit if free is None else free):
        return
    size, pos, budget = len(payload), 0, MAX_ELEMENTS
    remaining = [1]  # elements still to come, per open container; the outermost holds the message itself
    while remaining:
        if remaining[-1] == 0:
            remaining.pop()
            continue
        if pos >= size:
            raise InvalidRequest("msgpack message is cut short")
        run = _SCALARS.match(payload, pos, min(size, pos + remaining[-1]))
        if run is not None:
            remaining[-1] -= run.end() - pos
            pos = run.end()
            continue
        budget -= 1
        if budget < 0:
            raise InvalidRequest(f"message has more than {MAX_ELEMENTS} strings and containers")
        kind = payload[pos]
        pos += 1
        remaining[-1] -= 1
        children = -1
        if 0x80 <= kind <= 0x8F:
            children = 2 * (kind & 0x0F)
        elif kind <= 0x9F:
            children = kind & 0x0F
        elif kind <= 0xBF:
            pos += kind & 0x1F
        elif kind in _FIXED:
            pos += _FIXED[kind]
        elif kind in _SIZED:
            width, extra = _SIZED[kind]
            pos += width + extra + int.from_bytes(payload[pos : pos + width], "big")
        elif kind in _CONTAINERS:
            width, per_entry = _CONTAINERS[kind]
            children = per_entry * int.from_bytes(payload[pos : pos + width], "big")
            pos += width
        else:
            raise InvalidRequest(f"not msgpack: type byte 0x{kind:02x}")
        if children >= 0:
            if len(remaining) > limit:
                raise InvalidRequest(f"message is nested deeper than {limit} levels")
            remaining.append(children)
    if pos != size:
        raise InvalidRequest("bytes after the end of the message" if pos < size else "msgpack message is cut short")
