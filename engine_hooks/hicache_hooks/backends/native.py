"""What our wrappers of native clients share: when a client may be called, and which memory it may touch.

Native clients end the process where Python would raise: a call after ``close`` is a segmentation fault in Mooncake, a
call in a forked child hangs it, and a buffer outside the registered memory is refused by RDMA hardware, late, or not
noticed at all over TCP. So we ask these questions before every call, ourselves.
"""

import ctypes
import os
import threading
import time
from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

REPLACED_S = 5.0  # the guard's own deadline of a call


class OpenState:
    """Counts the calls inside a client; nobody enters a closed one, and nobody closes it under a call."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._pid = 0  # of the process that opened it; 0: not open
        self._inside = 0
        self._held = False  # somebody is, or wants to be, alone

    def opened(self) -> None:
        """From now on calls may enter."""
        with self._changed:
            self._pid = os.getpid()

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Around every call of the client.

        Raises:
            RuntimeError: it is not open, or was opened by another process than this one.
            TimeoutError: it is being replaced (``alone``), and that takes too long.
        """
        with self._changed:
            if self._held and not self._changed.wait_for(lambda: not self._held, REPLACED_S):
                raise TimeoutError(f"the {self._name} client is being replaced")
            self._check()
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    def _check(self) -> None:
        if self._pid != os.getpid():
            why = "was opened before a fork" if self._pid else "is not open"
            raise RuntimeError(f"the {self._name} client {why}")

    @contextmanager
    def alone(self, timeout_s: float) -> Iterator[None]:
        """Around the replacement of the client, by one thread at a time: nobody is inside, and who comes waits.

        Raises:
            RuntimeError: as ``inside``.
            TimeoutError: calls are still inside after ``timeout_s``.
        """
        with self._changed:
            self._check()
            self._held = True
            try:
                if not self._changed.wait_for(lambda: self._inside == 0, timeout_s):
                    raise TimeoutError(f"{self._inside} calls are still inside the {self._name} client")
                self._check()
                self._inside = 1
            except BaseException:
                self._held = False
                self._changed.notify_all()
                raise
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._held = False
                self._changed.notify_all()

    def shut(self, timeout_s: float) -> bool:
        """Let nobody in any more, and wait for those inside.

        Returns:
            True when the caller may destroy the client now; False: it was not open, or is another process's.

        Raises:
            TimeoutError: calls are still inside; the client must be left alone for good.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            pid, self._pid = self._pid, 0
            if pid != os.getpid():
                return False
            while self._inside:
                if not self._changed.wait(max(0.0, deadline - time.monotonic())) and self._inside:
                    raise TimeoutError(f"{self._inside} calls are still inside the {self._name} client")
        return True


class Turns:
    """One writer of a key at a time within this process, where a store cannot take two."""

    def __init__(self, wait_s: float) -> None:
        """``wait_s``: after so long a writer goes on beside the other, who is probably stuck."""
        self._wait_s = wait_s
        self._changed = threading.Condition()
        self._busy: set[str] = set()

    @contextmanager
    def of(self, keys: Collection[str]) -> Iterator[None]:
        """Around a put of ``keys``. All at once: taking them one by one could deadlock two batches."""
        with self._changed:
            self._changed.wait_for(lambda: self._busy.isdisjoint(keys), self._wait_s)
            mine = set(keys) - self._busy
            self._busy |= mine
        try:
            yield
        finally:
            with self._changed:
                self._busy -= mine
                self._changed.notify_all()


def address_of(view: memoryview) -> int:
    """Address of a writable, contiguous view.

    Raises:
        TypeError, ValueError: it is read-only, or not contiguous.
    """
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


class Ranges:
    """Registered memory: disjoint ``[start, end)`` intervals. Changed by one thread, read by many."""

    def __init__(self) -> None:
        self._spans: list[tuple[int, int]] = []  # sorted; replaced whole, so that readers need no lock

    def add(self, start: int, nbytes: int) -> bool:
        """Note a range. False: all of it is registered already.

        Raises:
            ValueError: empty, or it overlaps a registered range without lying in it.
        """
        end = start + nbytes
        if nbytes < 1:
            raise ValueError("an empty memory range")
        if self.covers(start, nbytes):
            return False
        if any(start < b and a < end for a, b in self._spans):
            raise ValueError("a memory range overlaps one that is registered already")
        self._spans = sorted([*self._spans, (start, end)])
        return True

    def drop(self, start: int) -> None:
        """Forget the range that begins at ``start``."""
        self._spans = [span for span in self._spans if span[0] != start]

    def starts(self) -> list[int]:
        """Where the ranges begin."""
        return [start for start, _ in self._spans]

    def nbytes(self) -> int:
        """Bytes registered."""
        return sum(end - start for start, end in self._spans)

    def covers(self, start: int, nbytes: int) -> bool:
        """True when ``[start, start + nbytes)`` lies in one range."""
        spans = self._spans
        i = bisect_right(spans, (start, 1 << 64)) - 1
        return i >= 0 and start + nbytes <= spans[i][1]

    def addresses(self, pages: Sequence[memoryview], page_bytes: int) -> list[int]:
        """Addresses of page buffers.

        Raises:
            ValueError: a page has another length, or lies outside the registered memory.
        """
        found = []
        for page in pages:
            if page.nbytes != page_bytes:
                raise ValueError(f"page buffer of {page.nbytes} bytes, expected {page_bytes}")
            address = address_of(page)
            if not self.covers(address, page_bytes):
                raise ValueError("a page buffer outside the registered host memory")
            found.append(address)
        return found
