"""A msgpack reader written from the format's specification, slow and plain, to judge the fast walk in framing.py."""

FIXED = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
FIXEXT = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
SIZED = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
EXT = {0xC7: 1, 0xC8: 2, 0xC9: 4}
ARRAYS = {0xDC: 2, 0xDD: 4}
MAPS = {0xDE: 2, 0xDF: 4}


class Malformed(Exception):
    """Not one whole msgpack value."""


class TooDeep(Exception):
    """More than ``limit`` containers inside each other."""


def depth_of(data: bytes, limit: int) -> int:
    """Containers inside each other at the deepest place of the one value in ``data``.

    Raises:
        Malformed: cut short, an unknown type byte, or bytes left over. TooDeep: deeper than ``limit``.
    """
    end, deepest = _value(data, 0, 0, limit)
    if end != len(data):
        raise Malformed("bytes left over")
    return deepest


def _take(data: bytes, at: int, count: int) -> int:
    if at + count > len(data):
        raise Malformed("cut short")
    return at + count


def _length(data: bytes, at: int, width: int) -> tuple[int, int]:
    end = _take(data, at, width)
    return int.from_bytes(data[at:end], "big"), end


def _value(data: bytes, at: int, depth: int, limit: int) -> tuple[int, int]:
    kind, at = _length(data, at, 1)
    if kind <= 0x7F or kind >= 0xE0 or kind in (0xC0, 0xC2, 0xC3):
        return at, depth
    if kind in FIXED:
        return _take(data, at, FIXED[kind]), depth
    if kind in FIXEXT:
        return _take(data, at, FIXEXT[kind] + 1), depth
    if 0xA0 <= kind <= 0xBF:
        return _take(data, at, kind & 0x1F), depth
    if kind in SIZED:
        count, at = _length(data, at, SIZED[kind])
        return _take(data, at, count), depth
    if kind in EXT:
        count, at = _length(data, at, EXT[kind])
        return _take(data, at, count + 1), depth
    if kind == 0xC1:
        raise Malformed("type byte 0xc1")
    if kind <= 0x8F:
        children = 2 * (kind & 0x0F)
    elif kind <= 0x9F:
        children = kind & 0x0F
    elif kind in ARRAYS:
        children, at = _length(data, at, ARRAYS[kind])
    else:
        children, at = _length(data, at, MAPS[kind])
        children *= 2
    depth += 1
    if depth > limit:
        raise TooDeep
    deepest = depth
    for _ in range(children):
        at, inner = _value(data, at, depth, limit)
        deepest = max(deepest, inner)
    return at, deepest
