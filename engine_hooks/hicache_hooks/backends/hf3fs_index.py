"""Which slot of the file holds which key: in memory for speed, in the file so that it outlives the process.

Rules

1. A slot's entry is written after its page, and taken away before the slot is written again. So whoever reads the
   index, also after a crash at any point, finds only slots whose page was complete. (What a power cut reorders is
   found by the page's own check, and is a miss.)
2. A reader pins its slots. A pinned slot is never given out; one whose key was removed meanwhile is free when the
   last reader has left.
3. A full file gives out the slot that was used least recently. After a restart, order of writing takes its place.
4. A slot of which a write is *late* (timed out, may still land) is lost until the process ends.
5. The header names namespace, page length and geometry; a file that says anything else is not ours to change.
"""

import os
import struct
import threading
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

from hicache_hooks.backends.hf3fs_options import BLOCK, ENTRY_BYTES, index_bytes

_HEADER = struct.Struct("<8sIQQQ16s")
_ENTRY = struct.Struct("<16sQQI")  # key, sequence, slot, checksum
_MAGIC, _VERSION = b"HiC3FS\n\0", 1
_LOAD_BYTES = 4 << 20  # of the index, per read


def digest(key: str) -> bytes:
    """What stands for a key. The page's own check compares the key again."""
    return blake2b(key.encode(), digest_size=16).digest()


class ForeignFile(RuntimeError):
    """A file of that name is there, and is not this rank's."""


class IndexFile:
    """Header and entries in the file ``fd``. Calls for different slots may run at once."""

    def __init__(self, fd: int, slots: int, page_bytes: int, file_size: int, namespace: str) -> None:
        self._fd = fd
        self._slots = slots
        self._salt = zlib.crc32(namespace.encode())
        self._head = _HEADER.pack(_MAGIC, _VERSION, page_bytes, slots, file_size,
                                  blake2b(namespace.encode(), digest_size=16).digest())  # fmt: skip
        self.data_at = BLOCK + index_bytes(slots)

    def prepare(self) -> bool:
        """Check the header, or write it into an empty file; True when entries may be there.

        Raises:
            ForeignFile: see rule 5. OSError.
        """
        have = os.pread(self._fd, len(self._head), 0)
        if have == self._head:
            return True
        if have.strip(b"\0"):
            raise ForeignFile("the file of that name was made with another configuration, or is no store of ours")
        _write_all(self._fd, self._head.ljust(BLOCK, b"\0"), 0)
        return False

    def intact(self) -> bool:
        """False when the header is not what ``prepare`` left."""
        return os.pread(self._fd, len(self._head), 0) == self._head

    def load(self) -> list[tuple[int, bytes, int]]:
        """Every good entry as (sequence, key, slot), oldest first."""
        found = []
        total = self._slots * ENTRY_BYTES
        for at in range(0, total, _LOAD_BYTES):
            block = os.pread(self._fd, min(_LOAD_BYTES, total - at), BLOCK + at)
            if not block.strip(b"\0"):
                continue  # never written: most of a new terabyte
            for i in range(len(block) // ENTRY_BYTES):
                key, seq, slot, crc = _ENTRY.unpack_from(block, i * ENTRY_BYTES)
                if seq and slot == at // ENTRY_BYTES + i and crc == self._sum(key, seq, slot):
                    found.append((seq, key, slot))
        return sorted(found)

    def put(self, slot: int, key: bytes, seq: int) -> None:
        """The page of ``slot`` is complete."""
        entry = _ENTRY.pack(key, seq, slot, self._sum(key, seq, slot)).ljust(ENTRY_BYTES, b"\0")
        _write_all(self._fd, entry, BLOCK + slot * ENTRY_BYTES)

    def drop(self, slot: int) -> None:
        """Nothing is in ``slot`` from now on."""
        _write_all(self._fd, bytes(ENTRY_BYTES), BLOCK + slot * ENTRY_BYTES)

    def _sum(self, key: bytes, seq: int, slot: int) -> int:
        return zlib.crc32(struct.pack("<16sQQ", key, seq, slot), self._salt)


def _write_all(fd: int, data: bytes, at: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], at + done)


class Slots:
    """Keys and slots in memory (rules 2 to 4). Thread-safe; no I/O under the lock."""

    def __init__(self, count: int, entries: Sequence[tuple[int, bytes, int]] = ()) -> None:
        """``entries`` as ``IndexFile.load`` gives them: of two with one key the later counts."""
        self.count = count
        self._lock = threading.Condition()
        self._by_key: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        for _, key, slot in entries:
            self._by_key.pop(key, None)
            self._by_key[key] = slot
        used = set(self._by_key.values())
        self._fresh = max(used, default=-1) + 1  # slots from here on were never given out
        self._free = [slot for slot in range(self._fresh) if slot not in used]
        self._pins: dict[int, int] = {}
        self._gone: set[int] = set()  # removed while pinned
        self._writing: set[bytes] = set()
        self._seq = entries[-1][0] if entries else 0
        self.lost = 0
        self.evicted = 0

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        """Which keys are stored."""
        with self._lock:
            return [key in self._by_key for key in keys]

    def pin(self, keys: Sequence[bytes]) -> list[int | None]:
        """Their slots, held until ``unpin``; used just now."""
        with self._lock:
            found = [self._by_key.get(key) for key in keys]
            for key, slot in zip(keys, found, strict=True):
                if slot is not None:
                    self._by_key.move_to_end(key)
                    self._pins[slot] = self._pins.get(slot, 0) + 1
            return found

    def unpin(self, slots: Sequence[int | None]) -> None:
        """The reader left."""
        with self._lock:
            for slot in slots:
                if slot is None:
                    continue
                left = self._pins.pop(slot) - 1
                if left:
                    self._pins[slot] = left
                elif slot in self._gone:
                    self._gone.discard(slot)
                    self._free.append(slot)

    def reserve(self, key: bytes) -> tuple[int, bool] | None:
        """A slot to write ``key`` into, and whether another key's entry must be dropped first.

        None: it is stored, another thread writes it, or every slot is in use.
        """
        with self._lock:
            if key in self._by_key:  # somebody needs it just now: it is not the one to make room for another
                self._by_key.move_to_end(key)
                return None
            if key in self._writing:
                return None
            slot, stale = self._take()
            if slot is None:
                return None
            self._writing.add(key)
            return slot, stale

    def _take(self) -> tuple[int | None, bool]:
        if self._free:
            return self._free.pop(), False
        if self._fresh < self.count:
            self._fresh += 1
            return self._fresh - 1, False
        for key, slot in self._by_key.items():
            if slot not in self._pins:
                del self._by_key[key]
                self.evicted += 1
                return slot, True
        return None, False

    def next_seq(self) -> int:
        """A number for the next entry; higher is later, over restarts too."""
        with self._lock:
            self._seq += 1
            return self._seq

    def wait_written(self, keys: Sequence[bytes], timeout_s: float) -> None:
        """Until no other thread writes one of ``keys``, or the time is up: two requests often store one prefix."""
        with self._lock:
            self._lock.wait_for(lambda: self._writing.isdisjoint(keys), timeout_s)

    def publish(self, key: bytes, slot: int) -> None:
        """Page and entry are written."""
        with self._lock:
            self._writing.discard(key)
            self._by_key[key] = slot
            self._lock.notify_all()

    def give_back(self, key: bytes, slot: int, *, late: bool = False) -> None:
        """The write failed; ``late``: it may still land (rule 4)."""
        with self._lock:
            self._writing.discard(key)
            self._lock.notify_all()
            if late:
                self.lost += 1
            else:
                self._free.append(slot)

    def remove(self, keys: Sequence[bytes] | None = None) -> list[int]:
        """Forget keys (None: all); returns their slots, whose entries the caller drops before ``freed``."""
        with self._lock:
            names = list(self._by_key) if keys is None else [key for key in dict.fromkeys(keys) if key in self._by_key]
            return [self._by_key.pop(key) for key in names]

    def freed(self, slots: Sequence[int]) -> None:
        """Slots of removed keys may be given out once nobody reads them."""
        with self._lock:
            for slot in slots:
                if slot in self._pins:
                    self._gone.add(slot)
                else:
                    self._free.append(slot)

    @property
    def used(self) -> int:
        """Keys stored."""
        return len(self._by_key)
