"""EMULATED 3FS USRBIO: the module ``hf3fs_fuse.io`` with its names, over plain files. It is not 3FS.

A directory is a "mount" when it holds ``3fs-virt/iovs``. One thread per process plays the FUSE daemon: requests run
after ``submit``, and end in another order than they were prepared in. It refuses what the real one refuses: a file
outside the mount, a descriptor that is not registered or registered twice, a ring of the other direction, memory
outside the iovec, a full ring, shared memory without a name in /dev/shm; and, stricter than the real one, requests
that are not aligned to 4 KiB, which our client never makes.

``<mount>/3fs-virt/faults.json`` harms it, read at each submission: ``{"errno": 5}``, ``{"short": 100}`` (bytes of a
read), ``{"hang": true}`` (requests run when the file is gone), ``{"every": 3}`` (which requests; default all).
"""

import errno
import json
import os
import queue
import threading
import time
import uuid
from typing import Any

BLOCK = 4096
HOLES_ARE_ERRORS = 2
_registered: dict[int, str] = {}
_lock = threading.Lock()
_daemon: "queue.SimpleQueue[Any] | None" = None


def extract_mount_point(path: str) -> str | None:
    """The nearest directory above ``path`` that looks like a mount."""
    at = os.path.realpath(path)
    while at != "/":
        if os.path.isdir(f"{at}/3fs-virt/iovs"):
            return at
        at = os.path.dirname(at)
    return None


def register_fd(fd: int, flags: int = 0) -> None:
    """Refuses files that are not on a mount, and a second registration."""
    path = os.readlink(f"/proc/self/fd/{fd}")
    if extract_mount_point(path) is None:
        raise OSError(errno.EBADF, "not a file of a mount")
    with _lock:
        if fd in _registered:
            raise OSError(errno.EINVAL, "registered twice")
        _registered[fd] = path


def deregister_fd(fd: int) -> None:
    """Unknown descriptors are ignored, as the real one does."""
    with _lock:
        _registered.pop(fd, None)


class iovec:  # the real name
    """Named shared memory; slices say where they begin."""

    def __init__(self, buf: memoryview, base_off: int, link: str) -> None:
        self.buf, self.base_off, self.link = buf, base_off, link
        self.result = 0

    def __getitem__(self, part: slice) -> "iovec":
        start, stop, step = part.indices(len(self.buf))
        if step != 1:
            raise ValueError("step not 1 when slicing iovec")
        return iovec(self.buf[start:stop], self.base_off + start, "")

    def __del__(self) -> None:
        if self.link:
            os.unlink(self.link)


def make_iovec(shm: Any, mount: str, block_size: int = 0, numa: int = -1) -> iovec:
    """``shm`` has ``name`` and ``buf``; the daemon finds it through a link on the mount."""
    target = f"/dev/shm/{shm.name}"
    if os.path.getsize(target) < len(shm.buf):
        raise OSError(errno.EINVAL, "the shared memory is shorter than the buffer")
    link = f"{mount}/3fs-virt/iovs/{uuid.uuid4()}"
    os.symlink(target, link)
    return iovec(memoryview(shm.buf), 0, link)


def make_ioring(
    mount: str, entries: int, for_read: bool = True, io_depth: int = 0, priority: int | None = None,
    timeout: int | None = None, numa: int = -1, flags: int = 0,
) -> "ioring":  # fmt: skip
    """A ring of ``entries`` requests of one direction."""
    if not os.path.isdir(f"{mount}/3fs-virt/iovs"):
        raise OSError(errno.ENODEV, "no such mount")
    return ioring(mount, entries, for_read, flags)


class ioring:
    """Prepared requests wait for ``submit``; finished ones for ``wait``."""

    def __init__(self, mount: str, entries: int, for_read: bool, flags: int) -> None:
        self._mount, self._entries, self._for_read, self._flags = mount, entries, for_read, flags
        self._changed = threading.Condition()
        self._prepared: list[tuple[iovec, int, int]] = []
        self._inside = 0
        self._done: list[iovec] = []
        self._count = 0

    def prepare(self, iov: iovec, read: bool, fd: int, off: int, userdata: object = None) -> "ioring":
        if not isinstance(iov, iovec) or iov.link:
            raise TypeError("a slice of an iovec is needed")
        if read != self._for_read:
            raise OSError(errno.EINVAL, "a ring of the other direction")
        if fd not in _registered:
            raise OSError(errno.EBADF, "not registered")
        if not len(iov.buf) or off < 0:
            raise IndexError("the iov is out of range")
        if off % BLOCK or len(iov.buf) % BLOCK or iov.base_off % BLOCK:
            raise OSError(errno.EINVAL, "not aligned")
        with self._changed:
            if len(self._prepared) + self._inside + len(self._done) >= self._entries:
                raise OSError(errno.EAGAIN, "the ring is full")
            self._prepared.append((iov, fd, off))
        return self

    def submit(self) -> "ioring":
        with self._changed:
            work, self._prepared = self._prepared, []
            self._inside += len(work)
        _to_daemon((self, work))
        return self

    def wait(self, *, max_results: int = 0, min_results: int = 0, timeout: Any = None) -> list[iovec]:
        limit = None if timeout is None else timeout.total_seconds()
        with self._changed:
            self._changed.wait_for(lambda: len(self._done) >= min_results, limit)
            done, self._done = self._done, []
        return done

    # ---- the daemon's side

    def _run(self, work: list[tuple[iovec, int, int]], faults: dict[str, Any]) -> None:
        for iov, fd, off in reversed(work):
            self._count += 1
            harmed = faults if self._count % int(faults.get("every", 1)) == 0 else {}
            iov.result = self._one(iov, fd, off, harmed)
            with self._changed:
                self._inside -= 1
                self._done.append(iov)
                self._changed.notify_all()

    def _one(self, iov: iovec, fd: int, off: int, faults: dict[str, Any]) -> int:
        if "errno" in faults:
            return -int(faults["errno"])
        try:
            if not self._for_read:
                return os.pwrite(fd, iov.buf, off)
            if self._flags & HOLES_ARE_ERRORS and os.lseek(fd, off, os.SEEK_DATA) != off:
                return -errno.ENODATA
            return min(os.preadv(fd, [iov.buf], off), int(faults.get("short", len(iov.buf))))
        except OSError as exc:
            return -(exc.errno or errno.EIO)


def _faults(mount: str) -> dict[str, Any]:
    try:
        with open(f"{mount}/3fs-virt/faults.json") as file:
            return dict(json.load(file))
    except FileNotFoundError:
        return {}


def _to_daemon(item: Any) -> None:
    global _daemon
    with _lock:
        if _daemon is None:
            _daemon = queue.SimpleQueue()
            threading.Thread(target=_serve, args=(_daemon,), name="emulated-3fs-daemon", daemon=True).start()
        _daemon.put(item)


def _serve(todo: "queue.SimpleQueue[Any]") -> None:
    while True:
        ring, work = todo.get()
        faults = _faults(ring._mount)
        while faults.get("hang"):
            time.sleep(0.01)  # pace of a poll: the fault is a file
            faults = _faults(ring._mount)
        ring._run(work, faults)
        del ring, work
