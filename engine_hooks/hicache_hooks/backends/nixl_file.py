"""``nixl`` on files (plugins POSIX, GDS, GDS_MT, 3FS): one file per page in one of several directories.

As in ``file.py`` a page arrives by rename, so it is there whole or not at all. Sizes are looked at before each read:
a short file is a miss, whatever the plugin would say about it (NIXL below 1.5.1 says DONE). Directories are routed by
a stable hash of the key; adding one moves most pages out of sight, as in SGLang.
"""

import functools
import mmap
import os
import stat
import time
import zlib
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any

from hicache_hooks.backends.base import Got, StoreContext
from hicache_hooks.backends.file_epoch import EpochFile
from hicache_hooks.backends.file_paths import DIR_MODE, FILE_MODE, StorePaths, TempArea, page_files, safe
from hicache_hooks.backends.free_space import FULL, FreeSpace
from hicache_hooks.backends.nixl_agent import TransferFailed, address_of
from hicache_hooks.backends.nixl_cleaner import Cleaner
from hicache_hooks.backends.nixl_lanes import Lanes
from hicache_hooks.backends.nixl_options import NixlOptions
from hicache_proto.errors import PrepareFailed

_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_WRITE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
BLOCK = 4096  # of O_DIRECT: the smallest that every file system takes
# A page read again within it is not marked as used again: a write to its inode at each read, for nothing.
TOUCH_S = 60.0


class _Directory:
    """One of the directories."""

    def __init__(self, root: str, namespace: str) -> None:
        self.paths = StorePaths(root, namespace)
        self.temp = TempArea(self.paths.tmp)
        self.space = FreeSpace(root, 0)
        self.direct = False
        self.direct_reason = ""
        self.epoch = EpochFile(self.paths, self.temp, self.recover)

    def recover(self) -> None:
        """Somebody removed our directories: make them again."""
        self.paths.make()
        self.temp.remake()

    def open(self, want_direct: bool) -> None:
        self.paths.make()
        self.temp.open()
        self.direct_reason = _no_direct(self.temp.name()) if want_direct else "switched off (use_direct_io)"
        self.direct = not self.direct_reason

    def flags(self, direct: bool) -> int:
        return os.O_DIRECT if direct and self.direct else 0


class NixlFiles:
    """The store behind ``nixl.NixlStore``; ``transfers`` belongs to it."""

    def __init__(self, options: NixlOptions, context: StoreContext, transfers: Lanes) -> None:
        """No I/O."""
        roots = (options.storage_dir or "").split(",")
        self._dirs = [_Directory(root, context.namespace) for root in roots]
        self._page_bytes = context.page_bytes
        self._transfers = transfers
        self._want_direct = bool(options.use_direct_io)
        self._cleaner = Cleaner(
            [item.paths for item in self._dirs],
            options.l3_cleaner_high_watermark,
            options.l3_cleaner_low_watermark,
            enabled=options.l3_cleaner_enabled and context.tp_rank == 0,
        )

    # ------------------------------------------------------------ life

    def open(self) -> None:
        """Make the directories, probe direct I/O, and see that a short file is not reported as read.

        Raises:
            OSError: a directory cannot be used.
            PrepareFailed: this NIXL reads short files without an error; reason ``short_reads``.
        """
        for item in self._dirs:
            item.open(self._want_direct)
        self._probe_short()
        self._cleaner.start()

    def _probe_short(self) -> None:
        scratch = _scratch()
        self._transfers.register(scratch)
        name = self._dirs[0].temp.name()
        fd = os.open(name, _WRITE, FILE_MODE)
        read = True
        try:
            os.ftruncate(fd, BLOCK)
            try:
                self._transfers.run("READ", [scratch], [(fd, "")], None)
            except TransferFailed:
                read = False
        finally:
            os.close(fd)
            os.unlink(name)
        if read:
            raise PrepareFailed(
                "this NIXL reports a short file as read; 1.5.1 does not", details={"reason": "short_reads"}
            )

    def close(self) -> None:
        """Idempotent."""
        self._cleaner.stop()
        for item in self._dirs:
            item.temp.close()

    # ------------------------------------------------------------ traffic

    def put(self, keys: Sequence[str], pages: Sequence[memoryview]) -> list[bool | None]:
        """See ``Backend.batch_put``.

        Raises:
            OSError: the directories failed, and not one page that was to be written is stored.
        """
        done: dict[str, bool | None] = {}
        todo: dict[str, memoryview] = {}
        for key, page in zip(keys, pages, strict=True):
            if self._touch(key):
                done[key] = True
            else:
                todo[key] = page
        failed: OSError | None = None
        for item, mine in self._by_directory(list(todo)):
            try:
                done |= self._put(item, mine, [todo[key] for key in mine])
            except OSError as exc:
                failed = exc
                done |= dict.fromkeys(mine)
        if failed is not None and not any(done.get(key) for key in todo):  # pages that were there prove no write (F69)
            raise failed
        return [done.get(key, False) for key in keys]

    def _put(self, item: _Directory, keys: list[str], pages: list[memoryview]) -> dict[str, bool | None]:
        """Results of the keys that there was room for. Raises OSError when one failed and none was stored."""
        try:
            room = item.space.room(len(keys), self._page_bytes)
        except FileNotFoundError:
            item.recover()
            room = item.space.room(len(keys), self._page_bytes)
        done: dict[str, bool | None] = {}
        failed: OSError | None = None
        temps: list[tuple[str, memoryview, str, int]] = []  # key, page, name and descriptor of its temporary file
        written: list[bool | None] = []
        try:
            with ExitStack() as stack:
                for key, page in zip(keys[:room], pages[:room], strict=True):
                    try:
                        temps.append((key, page, *self._temporary(item, stack, page)))
                    except OSError as exc:
                        if exc.errno in FULL:  # no inode left
                            item.space.refused()
                            break
                        failed, done[key] = exc, None
                if temps:
                    written = self._write(item, [row[1] for row in temps], [row[3] for row in temps])
            # Every descriptor is closed now: network file systems report a full disk there.
            for (key, _, name, _), ok in zip(temps, written, strict=True):
                done[key] = ok
                if ok:
                    try:
                        self._publish(item, name, key)
                    except OSError as exc:
                        failed, done[key] = exc, None
        finally:
            for key, _, name, _ in temps:
                if not done.get(key):
                    with suppress(OSError):
                        os.unlink(name)
        if any(done.values()):
            item.space.written()
        elif failed is not None:
            raise failed
        return done

    def _temporary(self, item: _Directory, stack: ExitStack, page: memoryview) -> tuple[str, int]:
        flags = _WRITE | item.flags(item.direct and _aligned(page))
        name = item.temp.name()
        try:
            fd = os.open(name, flags, FILE_MODE)
        except FileNotFoundError:
            item.recover()
            name = item.temp.name()
            fd = os.open(name, flags, FILE_MODE)
        stack.callback(os.close, fd)
        return name, fd

    def _write(self, item: _Directory, pages: list[memoryview], fds: list[int]) -> list[bool | None]:
        """As ``put``. Raises TransferFailed when nothing was written, and the file system is not full."""
        try:
            self._transfers.run("WRITE", pages, [(fd, "") for fd in fds], None)
            return [True] * len(pages)
        except TransferFailed as exc:
            failed = exc
        # Nobody says which page failed: singly, until the file system is full.
        done: list[bool | None] = []
        for page, fd in zip(pages, fds, strict=True):
            ok: bool | None = None
            if not item.space.reason:
                with suppress(TransferFailed):
                    self._transfers.run("WRITE", [page], [(fd, "")], None)
                    ok = True
                if not ok and item.space.measure()[0] < self._page_bytes:
                    item.space.refused()
            done.append(False if item.space.reason and not ok else ok)
        if not any(done) and not item.space.reason:
            raise failed
        return done

    def _publish(self, item: _Directory, name: str, key: str) -> None:
        path = item.paths.page(key)
        try:
            os.rename(name, path)
        except FileNotFoundError:  # first page of this shard, or somebody cleaned up
            os.makedirs(os.path.dirname(path), DIR_MODE, exist_ok=True)
            os.rename(name, path)

    def get(self, keys: Sequence[str], pages: Sequence[memoryview]) -> list[Got]:
        """See ``Backend.batch_get``."""
        results = [Got.MISS] * len(keys)
        there: list[tuple[int, int]] = []
        old: set[int] = set()  # descriptors
        before = time.time() - TOUCH_S
        try:
            for i, key in enumerate(keys):
                fd, results[i], mtime = self._open_page(key, pages[i])
                if fd >= 0:
                    there.append((i, fd))
                    if mtime < before:
                        old.add(fd)
            if there:
                for (i, fd), good in zip(there, self._read(pages, there), strict=True):
                    results[i] = Got.HIT if good else Got.ERROR
                    if good and fd in old:
                        with suppress(OSError):  # recency for the cleaner
                            os.utime(fd)
        finally:
            for _, fd in there:
                with suppress(OSError):
                    os.close(fd)
        return results

    def _read(self, pages: Sequence[memoryview], there: list[tuple[int, int]]) -> list[bool]:
        try:
            self._transfers.run("READ", [pages[i] for i, _ in there], [(fd, "") for _, fd in there], None)
            return [True] * len(there)
        except TransferFailed:
            if len(there) == 1:
                return [False]
        good = []
        for i, fd in there:
            try:
                self._transfers.run("READ", [pages[i]], [(fd, "")], None)
                good.append(True)
            except TransferFailed:
                good.append(False)
        return good

    def _open_page(self, key: str, page: memoryview) -> tuple[int, Got, float]:
        """Descriptor (-1: none), result so far, time of the last change."""
        item = self._directory(key)
        fd = -1
        try:
            fd = os.open(item.paths.page(key), _READ | item.flags(item.direct and _aligned(page)))
            info = os.fstat(fd)
        except OSError as exc:
            if fd >= 0:
                os.close(fd)
            return -1, Got.MISS if isinstance(exc, FileNotFoundError) else Got.ERROR, 0.0
        if info.st_size != self._page_bytes or not stat.S_ISREG(info.st_mode):
            os.close(fd)
            self.set_aside(key)
            return -1, Got.MISS, 0.0
        return fd, Got.MISS, info.st_mtime

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """A file of another length does not count."""
        return [self._size(key) == self._page_bytes for key in keys]

    # ------------------------------------------------------------ upkeep

    def delete(self, keys: Sequence[str]) -> int:
        """See ``Backend.delete``."""
        gone = 0
        for key in keys:
            with suppress(FileNotFoundError):
                os.unlink(self._directory(key).paths.page(key))
                gone += 1
        return gone

    def set_aside(self, key: str) -> None:
        """Keep the last bad file of this name for a look."""
        paths = self._directory(key).paths
        with suppress(OSError):
            os.replace(paths.page(key), f"{paths.bad}/{safe(key)[-8:]}")

    def clear(self) -> int:
        """See ``Backend.clear``.

        Raises:
            OSError: some could not be deleted; all others were.
        """
        gone = stuck = 0
        for item in self._dirs:
            for entry in page_files(item.paths.pages):
                try:
                    os.unlink(entry.path)
                    gone += 1
                except FileNotFoundError:
                    continue
                except OSError:
                    stuck += 1
        if stuck:
            raise OSError(f"{stuck} pages could not be deleted, {gone} were")
        for item in self._dirs:
            item.epoch.renew()
        return gone

    def epoch(self) -> str:
        """See ``Backend``: one directory that was emptied makes another store. Raises OSError as ``health``."""
        return ",".join(item.epoch.name() for item in self._dirs)

    def health(self) -> dict[str, Any]:
        """Raises OSError when a directory is gone."""
        free = [item.space.measure()[0] for item in self._dirs]
        reasons = {item.paths.root: item.direct_reason for item in self._dirs if item.direct_reason}
        return {
            "path": ",".join(item.paths.root for item in self._dirs),
            "free_bytes": min(free),
            "no_space": next((item.space.reason for item in self._dirs if item.space.reason), None),
            "direct_io": not reasons,
            "direct_io_reason": "; ".join(sorted(set(reasons.values()))) or None,
            "cleaned_pages": self._cleaner.deleted,
        }

    # ------------------------------------------------------------ places

    def _directory(self, key: str) -> _Directory:
        if len(self._dirs) == 1:
            return self._dirs[0]
        return self._dirs[zlib.crc32(key.encode("utf-8", "surrogatepass")) // 256 % len(self._dirs)]

    def _by_directory(self, keys: list[str]) -> list[tuple[_Directory, list[str]]]:
        split: dict[int, list[str]] = {}
        for key in keys:
            split.setdefault(self._dirs.index(self._directory(key)), []).append(key)
        return [(self._dirs[i], mine) for i, mine in split.items()]

    def _size(self, key: str) -> int:
        try:
            info = os.stat(self._directory(key).paths.page(key), follow_symlinks=False)
        except OSError:
            return -1
        return info.st_size if stat.S_ISREG(info.st_mode) else -1

    def _touch(self, key: str) -> bool:
        if self._size(key) != self._page_bytes:
            return False
        with suppress(OSError):
            os.utime(self._directory(key).paths.page(key), follow_symlinks=False)
        return True


@functools.cache
def _scratch() -> memoryview:
    """Memory of the probe: never unmapped, since every agent that is made again registers it again."""
    return memoryview(mmap.mmap(-1, 2 * BLOCK))


def _aligned(page: memoryview) -> bool:
    return page.nbytes % BLOCK == 0 and address_of(page) % BLOCK == 0


def _no_direct(name: str) -> str:
    """Why this file system has no direct I/O, found out with a real write; empty when it has."""
    block = mmap.mmap(-1, BLOCK)
    try:
        fd = os.open(name, _WRITE | os.O_DIRECT, FILE_MODE)
    except OSError as exc:
        return f"the file system refuses O_DIRECT: {os.strerror(exc.errno or 0)}"
    try:
        os.pwrite(fd, block, 0)
    except OSError as exc:
        return "" if exc.errno in FULL else f"a direct write failed: {os.strerror(exc.errno or 0)}"
    finally:
        os.close(fd)
        os.unlink(name)
        block.close()
    return ""
