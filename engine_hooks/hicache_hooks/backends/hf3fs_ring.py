"""The seam to 3FS USRBIO: the Python module ``hf3fs_fuse.io``, used as it documents itself. Nothing else knows it.

Rules

1. Results come in the order of completion, so each is told apart by where its part of the shared memory begins
   (``base_off``), never by its place in the list. A time-out shows only as a shorter list.
2. After a submission that did not complete, requests may still be in the ring and write into its memory. That client
   is *spoilt*: it is never used again and its memory is kept until the process ends. Another takes its place, so
   that a ring that hung for a while costs no re-attach (F84); what that keeps of memory is bounded by
   ``REPLACEMENTS``.
3. Pages are copied in before ``prepare`` (a prepared request may run at once), and out only after their result: a late
   request touches neither our caller's page nor one that another caller owns.
"""

import contextlib
import importlib
import mmap
import os
import secrets
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

MODULE = "hf3fs_fuse.io"
PACKAGE = "hf3fs_fuse (3FS's USRBIO bindings, built from a 3FS checkout)"
HOLES_ARE_ERRORS = 2  # flag of a read ring: a hole in the file is an error instead of zeros
REPLACEMENTS = 4  # lanes per client and direction that may take a spoilt one's place; each keeps its memory
_SPOILT: list[object] = []  # rule 2


class RingFailed(OSError):
    """A submission was refused, or did not complete in time (``spoilt``)."""

    def __init__(self, message: str, *, late: Sequence[int] = (), spoilt: bool = False) -> None:
        super().__init__(message)
        self.late = tuple(late)  # requests that may still run, by their place in the call
        self.spoilt = spoilt


def load() -> Any:
    """The module. Raises ImportError where 3FS is not installed."""
    return importlib.import_module(MODULE)


def missing() -> list[str]:
    """What this host lacks."""
    try:
        load()
    except ImportError:
        return [PACKAGE]
    return []


class SharedPages:
    """Named shared memory, as ``make_iovec`` wants it (``name``, ``buf``); its name lives only for that call.

    Not ``multiprocessing.shared_memory``: that starts a tracker process beside the engine.
    """

    def __init__(self, nbytes: int) -> None:
        self.name = f"hicache-{os.getpid()}-{secrets.token_hex(8)}"
        fd = os.open(f"/dev/shm/{self.name}", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.ftruncate(fd, nbytes)
            self._map = mmap.mmap(fd, nbytes)
        except BaseException:
            self.unlink()
            raise
        finally:
            os.close(fd)
        self.buf = memoryview(self._map)

    def unlink(self) -> None:
        """Take the name away; the memory stays mapped."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"/dev/shm/{self.name}")

    def close(self) -> None:
        """Unmap. What a binding still holds keeps the mapping, not us."""
        with contextlib.suppress(BufferError):
            self.buf.release()
            self._map.close()


class Lane:
    """One direction of a client: memory for ``entries`` pages and a ring over it. One thread at a time."""

    def __init__(self, io: Any, mount: str, fd: int, entries: int, page_bytes: int, *, read: bool) -> None:
        self._fd, self._entries, self._page_bytes, self._read = fd, entries, page_bytes, read
        self._shared = SharedPages(entries * page_bytes)
        try:
            self._iov = io.make_iovec(self._shared, mount)
            self._ring = io.make_ioring(
                mount, entries, for_read=read, timeout=1, numa=-1, flags=HOLES_ARE_ERRORS if read else 0
            )
        except BaseException:
            self._iov = None
            self._shared.close()
            raise
        finally:
            self._shared.unlink()

    def run(self, offsets: Sequence[int], pages: Sequence[memoryview], timeout_s: float) -> list[bool]:
        """Move at most ``entries`` pages; True per page that moved whole.

        Raises:
            RingFailed: see the class.
        """
        size = self._page_bytes
        if not self._read:
            for i, page in enumerate(pages):
                self._shared.buf[i * size : (i + 1) * size] = page
        prepared = 0
        try:
            for i, offset in enumerate(offsets):
                self._ring.prepare(self._iov[i * size : (i + 1) * size], self._read, self._fd, offset)
                prepared += 1
            done = self._ring.submit().wait(min_results=len(offsets), timeout=timedelta(seconds=timeout_s))
        except Exception as exc:  # the binding raises OSError, and ValueError or out_of_range's IndexError
            number = f" (errno {exc.errno})" if isinstance(exc, OSError) and exc.errno else ""
            raise RingFailed(
                f"the ring refused: {type(exc).__name__}{number}", late=range(prepared), spoilt=prepared > 0
            ) from None
        moved = [False] * len(offsets)
        answered = set()
        for result in done:
            place = result.base_off // size
            answered.add(place)
            moved[place] = result.result == size
        late = [i for i in range(len(offsets)) if i not in answered]
        if late:
            raise RingFailed(f"{len(late)} of {len(offsets)} requests did not complete", late=late, spoilt=True)
        if self._read:
            for i, page in enumerate(pages):
                if moved[i]:
                    page[:] = self._shared.buf[i * size : (i + 1) * size]
        return moved

    def close(self) -> None:
        """Let ring and memory go; the binding frees them with its objects."""
        self._ring = self._iov = None
        self._shared.close()


class Clients:
    """``numjobs`` clients; a batch takes one that is free. Lanes are made when first used."""

    def __init__(self, io: Any, mount: str, fd: int, *, numjobs: int, entries: int, page_bytes: int) -> None:
        self.entries = entries
        self._parts = io, mount, fd, entries, page_bytes
        self._numjobs = numjobs
        self._changed = threading.Condition()
        self._idle: dict[bool, list[Lane]] = {True: [], False: []}
        self._made = {True: 0, False: 0}
        self._replacements = dict.fromkeys((True, False), REPLACEMENTS * numjobs)
        self._lost = {True: 0, False: 0}  # places that stay with a spoilt lane
        self.spoilt = 0

    @property
    def exhausted(self) -> bool:
        """True when a direction has no lane left, and none that may be made: only another attach brings them back."""
        return self._gone(True) or self._gone(False)

    def _gone(self, read: bool) -> bool:
        return self._lost[read] >= self._numjobs

    def take(self, *, read: bool, timeout_s: float) -> Lane:
        """A lane of that direction, given back by ``give``.

        Raises:
            RingFailed: all were busy for ``timeout_s``, or none is left. OSError: one could not be made.
        """
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._idle[read] or self._made[read] < self._numjobs or self._gone(read), timeout_s
            ):
                raise RingFailed("every client is busy")
            if self._gone(read):
                raise RingFailed("every client has a request that never ended: the store needs to be attached again")
            if self._idle[read]:
                return self._idle[read].pop()
            self._made[read] += 1
        try:
            return Lane(*self._parts, read=read)
        except BaseException:
            with self._changed:
                self._made[read] -= 1
                self._changed.notify()
            raise

    def give(self, lane: Lane, *, read: bool, spoilt: bool = False) -> None:
        """Back again; a spoilt one is kept aside, and leaves its place to another as long as those last (rule 2)."""
        with self._changed:
            if spoilt:
                _SPOILT.append(lane)
                self.spoilt += 1
                if self._replacements[read]:
                    self._replacements[read] -= 1
                    self._made[read] -= 1
                else:
                    self._lost[read] += 1
            else:
                self._idle[read].append(lane)
            self._changed.notify_all()

    def close(self) -> None:
        """After the last call."""
        with self._changed:
            lanes = [lane for found in self._idle.values() for lane in found]
            self._idle = {True: [], False: []}
        for lane in lanes:
            lane.close()
