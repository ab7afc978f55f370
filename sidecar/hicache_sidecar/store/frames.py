"""Frames of the journal file, and how a torn tail is told from damage.

File: ``MAGIC``, then frames without gaps, then zeros (space reserved ahead). One frame is

    4 bytes  b"HJR\\xa5"
    4 bytes  payload length, big-endian
    8 bytes  sequence number, from 1 in each file
    16 bytes blake2b over the 16 bytes above and the payload
    payload  (msgpack)
    4 bytes  END, no byte of which is zero

Every frame is fsynced before the next is written, so a crash can tear the last one only, and what it leaves is a
frame with holes: bytes not written are zeros (or lie behind the end of the file), either from some byte to the
end, or in whole sectors, since a disk writes sectors in any order but each whole. A frame that does not verify
and has no such hole was complete once: that is damage, and it is never cut silently, for it may hold an OUTCOME
on which other machines acted. Damage is also anything that does not verify with a good frame behind it.
"""

import struct
from hashlib import blake2b

import msgspec

MAGIC = b"hicache journal 1\n"
_MARK = b"HJR\xa5"
_END = b"\xe5END"
_HEAD = struct.Struct(">4sIQ")
_DIGEST_BYTES = 16
OVERHEAD = _HEAD.size + _DIGEST_BYTES + len(_END)
SECTOR = 512  # the smallest unit that a disk writes whole


class Scan(msgspec.Struct, frozen=True):
    """What ``scan`` found. ``end``: offset after the last good frame. ``damage``: ("", or why the rest is bad)."""

    payloads: list[bytes]
    offsets: list[int]
    end: int
    torn: int = 0  # bytes of a torn last frame after ``end``; to be cut
    damage: str = ""
    damage_at: int = 0


def frame(seq: int, payload: bytes) -> bytes:
    """One frame, ready to be written."""
    head = _HEAD.pack(_MARK, len(payload), seq)
    return head + blake2b(head + payload, digest_size=_DIGEST_BYTES).digest() + payload + _END


def _payload_at(data: bytes, offset: int) -> tuple[int, bytes, bytes] | None:
    """(sequence number, payload, end mark as found) of the frame at ``offset``, None if it does not verify."""
    start = offset + _HEAD.size + _DIGEST_BYTES
    if start > len(data):
        return None
    mark, length, seq = _HEAD.unpack_from(data, offset)
    stop = start + length
    if mark != _MARK or stop > len(data):
        return None
    head, digest, payload = data[offset : offset + _HEAD.size], data[start - _DIGEST_BYTES : start], data[start:stop]
    if blake2b(head + payload, digest_size=_DIGEST_BYTES).digest() != digest:
        return None
    return seq, payload, data[stop : stop + len(_END)]


def _hole(data: bytes, start: int, stop: int) -> bool:
    """True if some sector's part of ``data[start:stop]`` was never written."""
    while start < stop:
        edge = min(stop, (start // SECTOR + 1) * SECTOR)
        if not any(data[start:edge]):
            return True
        start = edge
    return False


def _good_frame_behind(data: bytes, offset: int) -> bool:
    at = data.find(_MARK, offset + 1)
    while at >= 0:
        if _payload_at(data, at) is not None:
            return True
        at = data.find(_MARK, at + 1)
    return False


def _judge(data: bytes, offset: int) -> tuple[int, str]:
    """(torn bytes, damage) for a frame at ``offset`` that is not good; (0, "") is the clean end."""
    stop = len(data.rstrip(b"\0"))
    if stop <= offset:
        return 0, ""
    if _good_frame_behind(data, offset):
        return 0, "a record does not verify, and good records follow it"
    found = _payload_at(data, offset)
    if found is not None:  # all of it is right but the end mark
        mark = found[2].rstrip(b"\0")
        return (stop - offset, "") if _END.startswith(mark) else (0, "the last record's end mark is wrong")
    if not data[:stop].endswith(_END) or _hole(data, offset, stop):
        return stop - offset, ""
    return 0, "the last record was complete, and does not verify"


def scan(data: bytes) -> Scan:
    """Read all frames of a file's content. Never raises: damage is reported with its offset."""
    if data[: len(MAGIC)] != MAGIC:
        why = "the file is empty" if not data.rstrip(b"\0") else "this is no journal of version 1"
        return Scan([], [], len(MAGIC), damage=why)
    payloads: list[bytes] = []
    offsets: list[int] = []
    at = len(MAGIC)
    while True:
        found = _payload_at(data, at)
        if found is None or found[2] != _END:
            torn, damage = _judge(data, at)
            return Scan(payloads, offsets, at, torn=torn, damage=damage, damage_at=at)
        seq, payload, _ = found
        if seq != len(payloads) + 1:
            why = f"record {seq} stands where {len(payloads) + 1} belongs"
            return Scan(payloads, offsets, at, damage=why, damage_at=at)
        payloads.append(payload)
        offsets.append(at)
        at += len(payload) + OVERHEAD
