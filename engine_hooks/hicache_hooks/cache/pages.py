"""Page trailer: what makes a page buffer self-describing, so that every store's bytes are checked by us.

A page buffer is ``payload | padding | trailer``, its length a multiple of 4 KiB (one O_DIRECT write). The trailer
is the last 64 bytes: magic, format version, payload length, namespace fingerprint, hash of the key, checksum. The
checksum (xxh3_64, 14 GB/s here, and xxhash lets other threads run meanwhile) covers payload and trailer, not the
padding.

A wrong field names what happened: another configuration's page (fingerprint), a mixed-up page (key), a torn or
rotten one (checksum).
"""

import struct
from hashlib import blake2b

import xxhash

PAGE_ALIGN = 4096
FORMAT_VERSION = 1
MAGIC = b"HiCpage\n"
# magic, version, reserved (0), payload length, fingerprint, key hash; no padding bytes, so that every bit is compared
_HEAD = struct.Struct("<8sHHIQ16s16s")
_SUM = struct.Struct("<Q")
TRAILER_BYTES = _HEAD.size + _SUM.size


def page_stride(payload_bytes: int) -> int:
    """Length of a page buffer: payload and trailer, rounded up to 4 KiB."""
    return -(-(payload_bytes + TRAILER_BYTES) // PAGE_ALIGN) * PAGE_ALIGN


class PageFormat:
    """Seals and checks page buffers of one namespace. Thread-safe: holds constants only."""

    def __init__(self, payload_bytes: int, namespace: str) -> None:
        """
        Raises:
            ValueError: ``payload_bytes`` below one (F49).
        """
        if payload_bytes < 1:
            raise ValueError(f"bad_geometry: a page holds {payload_bytes} bytes")
        self.payload_bytes = payload_bytes
        self.namespace = namespace
        self.page_bytes = page_stride(payload_bytes)
        self._fingerprint = blake2b(namespace.encode(), digest_size=16).digest()

    def _head(self, key: str) -> bytes:
        digest = blake2b(key.encode(), digest_size=16).digest()
        return _HEAD.pack(MAGIC, FORMAT_VERSION, 0, 0, self.payload_bytes, self._fingerprint, digest)

    def _checksum(self, page: memoryview, head: bytes) -> int:
        # The head seeds the sum instead of a streaming update: one call over the payload, one release of the GIL.
        seed = xxhash.xxh3_64_intdigest(head)
        return xxhash.xxh3_64_intdigest(page[: self.payload_bytes], seed)

    def seal(self, page: memoryview, key: str) -> None:
        """Write the trailer for ``key`` behind the payload that ``page`` holds.

        Raises:
            ValueError: ``page`` has not the length of a page buffer.
        """
        if page.nbytes != self.page_bytes:
            raise ValueError(f"page buffer of {page.nbytes} bytes, expected {self.page_bytes}")
        head = self._head(key)
        page[-TRAILER_BYTES:] = head + _SUM.pack(self._checksum(page, head))

    def check(self, page: memoryview, key: str) -> str | None:
        """None when ``page`` holds the sealed page of ``key``, else why not, in a few words."""
        if page.nbytes != self.page_bytes:
            return "length"
        trailer = bytes(page[-TRAILER_BYTES:])
        head = self._head(key)
        if trailer[: _HEAD.size] != head:
            return self._explain(trailer, head)
        (stored,) = _SUM.unpack_from(trailer, _HEAD.size)
        return None if stored == self._checksum(page, head) else "checksum"

    @staticmethod
    def _explain(trailer: bytes, expected: bytes) -> str:
        got, want = _HEAD.unpack_from(trailer), _HEAD.unpack(expected)
        names = ("magic", "version", "reserved", "reserved", "payload length", "fingerprint", "key")
        return next(name for name, a, b in zip(names, got, want, strict=True) if a != b)
