"""Backend ``hf3fs``: one file per rank on a 3FS mount, moved by USRBIO, with its index inside.

**Never run on a live 3FS**: developed and tested over an emulated ring (README, "hf3fs"). Each rank owns its own file,
``<prefix>.<namespace>.<host>.<n>.bin``: the first ``n`` that no other process of this host holds, so that replicas and
restarted ranks find a file of their own. Metadata needs no server (``hf3fs_index.py``); the ring is behind
``hf3fs_ring.py``. A page that exists already is kept.
"""

import errno
import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Any, ClassVar

from hicache_hooks.backends import hf3fs_ring
from hicache_hooks.backends.base import Got, Manifest, StoreContext
from hicache_hooks.backends.hf3fs_index import IndexFile, Slots, digest
from hicache_hooks.backends.hf3fs_options import Hf3fsOptions, slots_of
from hicache_hooks.backends.hf3fs_ring import Clients, Lane, RingFailed
from hicache_hooks.backends.native import OpenState
from hicache_hooks.backends.options import invalid
from hicache_hooks.backends.registry import BackendSpec
from hicache_hooks.backends.slots import open_locked
from hicache_hooks.backends.upkeep import Upkeep, part_or_raise
from hicache_proto.model import LAYOUTS

MAX_FILES = 256  # ranks of one host and namespace
CLOSE_WAIT_S = 5.0


class Hf3fsStore:
    """The ``Backend`` (see base.py)."""

    manifest: ClassVar[Manifest] = Manifest(
        name="hf3fs",
        layouts=LAYOUTS,  # pages are copied through the ring's shared memory, whatever lies behind them
        shared=False,
        parallel_axes=("tp", "pp"),
        summary="3FS by USRBIO; never run on a live 3FS",
    )

    def __init__(self, options: Hf3fsOptions, context: StoreContext) -> None:
        """``options`` must be effective ones. No I/O."""
        size, prefix = options.file_size, options.file_path_prefix
        if not isinstance(size, int) or prefix is None or options.numjobs is None or options.entries is None:
            raise invalid("file_size", "was not resolved", "missing_option")
        self._prefix, self._size, self._context = prefix, size, context
        self._numjobs, self._entries = options.numjobs, options.entries
        self._timeout_s = options.client_timeout or 5.0
        self._page_bytes = context.page_bytes
        self._state = OpenState("hf3fs")
        self._fd = -1
        self._registered = False
        self._tidy = Upkeep("hf3fs")
        self._io: Any = None
        self._mount = ""
        self._path = ""
        self._index: IndexFile | None = None
        self._slots = Slots(0)
        self._clients: Clients | None = None
        self._epoch = 0  # times that the file was found emptied

    def open(self) -> None:
        """Claim a file, read its index, register it with the ring.

        Raises:
            ImportError: no USRBIO. OSError: the mount or the file cannot be used. ForeignFile.
        """
        io = hf3fs_ring.load()
        folder = there = os.path.dirname(self._prefix)
        while not os.path.isdir(there):  # nothing is created beside an absent mount
            there = os.path.dirname(there)
        mount = io.extract_mount_point(there)
        if not mount:
            raise OSError(errno.ENODEV, "file_path_prefix does not lie on a 3FS mount")
        os.makedirs(folder, mode=0o700, exist_ok=True)
        try:
            self._fd, self._path = self._claim()
            os.ftruncate(self._fd, self._size)
            count = slots_of(self._size, self._page_bytes)
            index = IndexFile(self._fd, count, self._page_bytes, self._size, self._context.namespace)
            self._slots = Slots(count, index.load() if index.prepare() else ())
            io.register_fd(self._fd)
            self._registered = True
        except BaseException:
            self._io = io
            self._release()
            raise
        self._io, self._mount, self._index = io, mount, index
        self._clients = Clients(
            io, mount, self._fd, numjobs=self._numjobs, entries=self._entries, page_bytes=self._page_bytes
        )
        self._state.opened()

    def _claim(self) -> tuple[int, str]:
        host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:64] or "host"
        space = blake2b(self._context.namespace.encode(), digest_size=8).hexdigest()
        for number in range(MAX_FILES):
            path = f"{self._prefix}.{space}.{host}.{number}.bin"
            fd = open_locked(path)
            if fd is not None:
                return fd, path
        raise OSError(errno.EBUSY, f"all {MAX_FILES} files are in use")

    def register(self, pool: memoryview) -> None:
        """None: pages are copied through the ring's own memory."""

    def close(self) -> None:
        """Idempotent; also after an ``open`` that failed half-way."""
        if not self._state.shut(CLOSE_WAIT_S) and self._fd < 0:
            return
        self._release()

    def _release(self) -> None:
        clients, self._clients, self._index = self._clients, None, None
        if clients is not None:
            clients.close()
        if self._registered:
            self._registered = False
            with suppress(Exception):  # must come before the close: the number may be another file's soon
                self._io.deregister_fd(self._fd)
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    # -------------------------------------------------------------- traffic

    def batch_put(self, keys: Sequence[str], pages: Sequence[memoryview]) -> list[bool | None]:
        """A page that exists already is kept. False: no slot is free, or another thread writes it.

        None: it did not move, or the ring or the file failed before.

        Raises:
            OSError: not one could be written.
        """
        with self._state.inside():
            index, clients = self._parts()
            self._check(pages)
            names = [digest(key) for key in keys]
            todo, failed = self._reserve(index, names, pages)
            if todo:
                failed = self._write(index, clients, todo) or failed
            self._slots.wait_written(names, self._timeout_s)
            stored = self._slots.find(names)
            if failed is None:
                return list(stored)
            if not any(stored):
                raise failed
            return [yes or None for yes in stored]

    def _reserve(
        self, index: IndexFile, names: Sequence[bytes], pages: Sequence[memoryview]
    ) -> tuple[dict[bytes, tuple[int, memoryview]], OSError | None]:
        """Slots for what is new, and why it ended. An old entry goes before the new page comes (index, rule 1).

        A failure costs the slot it was met in, so it is the last one.
        """
        todo: dict[bytes, tuple[int, memoryview]] = {}
        for name, page in zip(names, pages, strict=True):
            taken = self._slots.reserve(name) if name not in todo else None
            if taken is None:
                continue
            slot, stale = taken
            try:
                if stale:
                    index.drop(slot)
            except OSError as exc:
                self._slots.give_back(name, slot, late=True)  # its old entry is still in the file
                return todo, exc
            todo[name] = slot, page
        return todo, None

    def _write(self, index: IndexFile, clients: Clients, todo: dict[bytes, tuple[int, memoryview]]) -> OSError | None:
        """Store what has a slot; returns why it ended before the last page, or that one did not move (F69)."""
        left = dict(todo)
        failed: OSError | None = None
        unmoved: OSError | None = None
        lane: Lane | None = None
        try:
            lane = clients.take(read=False, timeout_s=self._timeout_s)
            while left and failed is None:
                part = list(left.items())[: clients.entries]
                offsets = [index.data_at + slot * self._page_bytes for _, (slot, _) in part]
                try:
                    moved = lane.run(offsets, [page for _, (_, page) in part], self._timeout_s)
                except RingFailed as exc:
                    failed = exc
                    for place, (name, (slot, _)) in enumerate(part):
                        self._slots.give_back(name, slot, late=place in exc.late)
                        del left[name]
                    break
                for (name, (slot, _)), whole in zip(part, moved, strict=True):
                    if not whole:
                        self._slots.give_back(name, slot)
                        unmoved = OSError(errno.EIO, "a page was not written whole")
                    elif failed is None:
                        failed = self._publish(index, name, slot)
                    else:
                        continue
                    del left[name]
        except OSError as exc:  # no lane
            failed = exc
        finally:
            if lane is not None:
                clients.give(lane, read=False, spoilt=isinstance(failed, RingFailed) and failed.spoilt)
            for name, (slot, _) in left.items():
                self._slots.give_back(name, slot)
        return failed or unmoved

    def _publish(self, index: IndexFile, name: bytes, slot: int) -> OSError | None:
        """Write the entry of a page that is whole. One that may be half there is dropped, else its slot is lost."""
        try:
            index.put(slot, name, self._slots.next_seq())
        except OSError as exc:
            lost = False
            try:
                index.drop(slot)
            except OSError:
                lost = True
            self._slots.give_back(name, slot, late=lost)
            return exc
        self._slots.publish(name, slot)
        return None

    def batch_get(self, keys: Sequence[str], pages: Sequence[memoryview]) -> list[Got]:
        """A page that is shorter than it should be is a miss, and is forgotten.

        Raises:
            RingFailed: the ring refused, or a request did not complete, before one page was read; their pages hold
                garbage, as all do that are an error.
        """
        with self._state.inside():
            index, clients = self._parts()
            self._check(pages)
            slots = self._slots.pin([digest(key) for key in keys])
            try:
                wanted = [(i, slot) for i, slot in enumerate(slots) if slot is not None]
                read = self._read(index, clients, [(slot, pages[i]) for i, slot in wanted])
            finally:
                self._slots.unpin(slots)
            out = [Got.MISS] * len(keys)
            for (i, _), result in zip(wanted, read, strict=True):
                out[i] = result
            broken = [digest(keys[i]) for i, _ in wanted if out[i] is Got.MISS]
            if broken:
                self._tidy(lambda: self._remove(index, broken))
            return out

    def _read(self, index: IndexFile, clients: Clients, parts: list[tuple[int, memoryview]]) -> list[Got]:
        if not parts:
            return []
        lane = clients.take(read=True, timeout_s=self._timeout_s)
        spoilt = False
        out: list[Got] = []
        try:
            for at in range(0, len(parts), clients.entries):
                part = parts[at : at + clients.entries]
                offsets = [index.data_at + slot * self._page_bytes for slot, _ in part]
                moved = lane.run(offsets, [page for _, page in part], self._timeout_s)
                out += [Got.HIT if whole else Got.MISS for whole in moved]
        except RingFailed as exc:
            spoilt = exc.spoilt
            return part_or_raise(out, len(parts), exc)
        finally:
            clients.give(lane, read=True, spoilt=spoilt)
        return out

    def batch_exists(self, keys: Sequence[str]) -> list[bool]:
        """From the index in memory: this rank alone writes its file."""
        with self._state.inside():
            self._parts()
            return self._slots.find([digest(key) for key in keys])

    def _parts(self) -> tuple[IndexFile, Clients]:
        if self._index is None or self._clients is None:
            raise RuntimeError("the hf3fs store is not open")
        return self._index, self._clients

    def _check(self, pages: Sequence[memoryview]) -> None:
        for page in pages:
            if page.nbytes != self._page_bytes:
                raise ValueError(f"page buffer of {page.nbytes} bytes, expected {self._page_bytes}")

    # -------------------------------------------------------------- upkeep

    def _remove(self, index: IndexFile, names: Sequence[bytes] | None) -> int:
        if names is not None and not names:
            return 0
        dropped: list[int] = []
        failed: OSError | None = None
        for slot in self._slots.remove(names):
            try:
                index.drop(slot)
                dropped.append(slot)
            except OSError as exc:  # forgotten here; in the file it is still named, so it is not given out again
                failed = exc
        self._slots.freed(dropped)
        if failed is not None:
            raise failed
        return len(dropped)

    def delete(self, keys: Sequence[str]) -> int:
        """Forget pages; missing ones are no error."""
        with self._state.inside():
            return self._remove(self._parts()[0], [digest(key) for key in keys])

    def set_aside(self, key: str, reason: str) -> None:
        """Forget the page: a slot cannot be kept for a look."""
        self.delete([key])

    def clear(self) -> int:
        """Forget every page of this rank's file, which holds this namespace alone (F68)."""
        with self._state.inside():
            return self._remove(self._parts()[0], None)

    def epoch(self) -> str:
        """See ``Backend``: the file, and how often it lost its header under us, and with it every page.

        Raises:
            OSError: the file cannot be used. ForeignFile: it holds something else now.
        """
        with self._state.inside():
            index, _ = self._parts()
            if not index.intact():
                os.ftruncate(self._fd, self._size)
                self._remove(index, None)
                index.prepare()
                self._epoch += 1
            return f"{os.fstat(self._fd).st_ino}.{self._epoch}"

    def health(self) -> dict[str, Any]:
        """Facts for status.

        Raises:
            OSError: the file is not there any more, or is another one.
        """
        with self._state.inside():
            _, clients = self._parts()
            mine, there = os.fstat(self._fd), os.stat(self._path, follow_symlinks=False)
            if (mine.st_dev, mine.st_ino) != (there.st_dev, there.st_ino):
                raise OSError(errno.ESTALE, "the store's file was replaced")
            return {
                "inner": "usrbio",
                "path": self._path,
                "mount": self._mount,
                "pages": self._slots.used,
                "slots": self._slots.count,
                "evicted_pages": self._slots.evicted,
                "lost_slots": self._slots.lost,
                "spoilt_clients": clients.spoilt,
                "needs_reattach": clients.exhausted,
                "never_run_on_a_live_3fs": True,
            }


def _create(options: Any, context: StoreContext, env: Mapping[str, str]) -> Hf3fsStore:
    del env
    return Hf3fsStore(options, context)


_missing: Callable[[], list[str]] = hf3fs_ring.missing

SPEC = BackendSpec(
    manifest=lambda options, env: Hf3fsStore.manifest,
    options=Hf3fsOptions,
    create=_create,
    missing=_missing,
    layouts=Hf3fsStore.manifest.layouts,
    notes=(
        "needs a 3FS mount and its Python package hf3fs_fuse; no package index has it",
        "tested over an emulated ring; never run on a live 3FS",
    ),
    inner=lambda options: "usrbio",
)
