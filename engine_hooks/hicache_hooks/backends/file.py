"""Backend ``file``: one file per page in a directory, which several processes may share.

Writes go to a temporary name and arrive by rename, so a page is there whole or not at all; nothing is synced, since a
page torn by a power cut fails its check and is a miss. Reads go straight into the page buffer.
"""

import os
import stat
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, ClassVar, Self

import msgspec

from hicache_hooks.backends.base import Got, Manifest, StoreContext
from hicache_hooks.backends.file_epoch import EpochFile
from hicache_hooks.backends.file_paths import DIR_MODE, FILE_MODE, StorePaths, TempArea, page_files, safe
from hicache_hooks.backends.free_space import FULL, FreeSpace
from hicache_hooks.backends.options import BackendOptions, StoreFacts, invalid, parse_size
from hicache_hooks.backends.quota import Quota
from hicache_hooks.backends.registry import BackendSpec
from hicache_proto.model import LAYOUTS

PATH_ENV = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"
MIN_PAGES = 4  # the canary's pages must fit
BAD_KEPT = 16  # pages set aside that are kept for a look
# No links and no waiting: the directory may be shared with others.
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


def _doc(text: str, **limits: Any) -> msgspec.Meta:
    return msgspec.Meta(description=text, **limits)


class FileOptions(BackendOptions, frozen=True, kw_only=True):
    """Options of ``file``; sizes are bytes or strings such as "10gb" (powers of 1024)."""

    file_storage_path: Annotated[str | None, _doc(f"directory, created when missing; else ${PATH_ENV}")] = None
    max_size: Annotated[int | str | None, _doc("most bytes below the directory; null: no quota")] = None
    min_free_space: Annotated[
        int | str | None, _doc("bytes that stay free on the file system; null: 2 % of it, at most 1 GiB")
    ] = None
    eviction_ratio: Annotated[float, _doc("share of max_size that one eviction frees", gt=0, le=0.9)] = 0.1

    def effective(self, env: Mapping[str, str]) -> Self:
        """Path absolute, sizes in bytes."""
        path = self.file_storage_path or env.get(PATH_ENV)
        if not path:
            raise invalid("file_storage_path", f"must be given (or {PATH_ENV} on the engine's host)", "missing_option")
        if not os.path.isabs(path):
            raise invalid("file_storage_path", "must be an absolute path")
        sizes = {
            name: None if value is None else parse_size(value, name)
            for name, value in (("max_size", self.max_size), ("min_free_space", self.min_free_space))
        }
        return msgspec.structs.replace(self, file_storage_path=os.path.normpath(path), **sizes)

    def check(self, facts: StoreFacts) -> list[str]:
        """The quota must hold a few pages (F49)."""
        if facts.page_bytes < 1:
            raise invalid("page_bytes", "of this engine is below one", "bad_geometry")
        if isinstance(self.max_size, int):
            pages = self.max_size // facts.page_bytes
            if pages < MIN_PAGES:
                raise invalid(
                    "max_size", f"holds {pages} pages of {facts.page_bytes} bytes; needs {MIN_PAGES}", "bad_geometry"
                )
            if pages < facts.l2_pages:
                return [f"max_size holds {pages} pages, fewer than the host pool's {facts.l2_pages}"]
        return []


class FileStore:
    """The ``Backend`` (see base.py)."""

    manifest: ClassVar[Manifest] = Manifest(
        name="file",
        layouts=LAYOUTS,
        parallel_axes=("tp", "pp"),
        summary="one file per page; POSIX file systems, shared or local",
    )

    def __init__(self, options: FileOptions, context: StoreContext) -> None:
        """``options`` must be effective ones. No I/O."""
        root = options.file_storage_path
        max_size, floor = options.max_size, options.min_free_space
        if root is None or isinstance(max_size, str) or isinstance(floor, str):
            raise invalid("file_storage_path", "was not resolved", "missing_option")
        self._page_bytes = context.page_bytes
        self._paths = StorePaths(root, context.namespace)
        self._temp = TempArea(self._paths.tmp)
        self._quota = Quota(self._paths, self._temp, max_size, options.eviction_ratio)
        self._space = FreeSpace(root, floor)
        self._epoch = EpochFile(self._paths, self._temp, self._recover)
        self._open = False
        self._upkeep = threading.Lock()

    def open(self) -> None:
        """Create what is missing, remove what crashed writers left.

        Raises:
            OSError: the directory cannot be used.
        """
        self._paths.make()
        self._quota.open()
        self._quota.forget(self._temp.open())
        self._open = True

    def register(self, pool: memoryview) -> None:
        """Plain files need none."""

    def close(self) -> None:
        """Idempotent; also after an ``open`` that failed half-way."""
        self._open = False
        self._temp.close()
        self._quota.close()

    def _usable(self) -> None:
        if not self._open:
            raise RuntimeError("the file store is not open")

    # -------------------------------------------------------------- traffic

    def batch_put(self, keys: Sequence[str], pages: Sequence[memoryview]) -> list[bool | None]:
        """A page that exists already is kept. False: no space. None: this page could not be written.

        Raises:
            OSError: not one could be written, for another reason than space.
        """
        self._usable()
        done: dict[str, bool | None] = {}
        todo: dict[str, memoryview] = {}
        for key, page in zip(keys, pages, strict=True):
            if page.nbytes != self._page_bytes:
                raise ValueError(f"page buffer of {page.nbytes} bytes, expected {self._page_bytes}")
            if self._touch(key):
                done[key] = True
            else:
                todo[key] = page
        if todo:
            self._put_new(todo, done)
        return [done.get(key, False) for key in keys]

    def _put_new(self, todo: dict[str, memoryview], done: dict[str, bool | None]) -> None:
        try:
            room = self._space.room(len(todo), self._page_bytes)
        except FileNotFoundError:
            self._recover()
            room = self._space.room(len(todo), self._page_bytes)
        try:
            granted = self._quota.reserve(room, self._page_bytes) if room else 0
        except OSError as exc:
            if exc.errno not in FULL:
                raise
            granted = 0
            self._space.refused()
        used = 0
        failed: OSError | None = None
        try:
            for key, page in list(todo.items())[:granted]:
                try:
                    used += self._write(self._paths.page(key), page)
                except OSError as exc:
                    if exc.errno in FULL:
                        self._space.refused()
                        break
                    failed, done[key] = exc, None
                else:
                    done[key] = True
        finally:
            self._quota.settle(granted * self._page_bytes, used)
        if used:
            self._space.written()
        elif failed is not None:  # pages that were there prove no write (F69)
            raise failed

    def _write(self, path: str, page: memoryview) -> int:
        """Write one page; returns by how many bytes the store grew."""
        temp = self._temp.name()
        try:
            try:
                fd = os.open(temp, _WRITE, FILE_MODE)
            except FileNotFoundError:
                self._recover()
                temp = self._temp.name()
                fd = os.open(temp, _WRITE, FILE_MODE)
            try:
                _write_all(fd, page)
            finally:
                os.close(fd)  # network file systems report a full disk here
            try:
                os.rename(temp, path)
            except FileNotFoundError:  # first page of this shard, or somebody cleaned up
                os.makedirs(os.path.dirname(path), DIR_MODE, exist_ok=True)
                os.rename(temp, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temp)
            raise
        return self._page_bytes

    def _recover(self) -> None:
        """Somebody removed our directories (a cron job, an operator): make them again."""
        with self._upkeep:
            self._paths.make()
            if self._temp.remake():
                self._quota.reopen()

    def batch_get(self, keys: Sequence[str], pages: Sequence[memoryview]) -> list[Got]:
        """A file of another length is a miss and is set aside."""
        self._usable()
        return [self._read(key, page) for key, page in zip(keys, pages, strict=True)]

    def _read(self, key: str, page: memoryview) -> Got:
        try:
            fd = os.open(self._paths.page(key), _READ)
        except FileNotFoundError:
            return Got.MISS
        except OSError:
            return Got.ERROR
        try:
            whole = _read_all(fd, page)
            if whole:
                with suppress(OSError):  # recency (quota.py, rule 3); not worth a failed read
                    os.utime(fd)
        except OSError:
            return Got.ERROR
        finally:
            os.close(fd)
        if not whole:
            self.set_aside(key, "short")
            return Got.MISS
        return Got.HIT

    def batch_exists(self, keys: Sequence[str]) -> list[bool]:
        """A file of another length does not count."""
        self._usable()
        return [self._size(key) == self._page_bytes for key in keys]

    def _size(self, key: str) -> int:
        try:
            info = os.stat(self._paths.page(key), follow_symlinks=False)
        except OSError:
            return -1
        return info.st_size if stat.S_ISREG(info.st_mode) else -1

    def _touch(self, key: str) -> bool:
        if self._size(key) != self._page_bytes:
            return False
        with suppress(OSError):
            os.utime(self._paths.page(key), follow_symlinks=False)
        return True

    # -------------------------------------------------------------- upkeep

    def delete(self, keys: Sequence[str]) -> int:
        """Remove pages; missing ones are no error."""
        self._usable()
        gone = 0
        freed = 0
        for key in keys:
            size = max(0, self._size(key))
            with suppress(FileNotFoundError):
                os.unlink(self._paths.page(key))
                gone += 1
                freed += size
        self._quota.removed(freed)
        return gone

    def set_aside(self, key: str, reason: str) -> None:
        """Move the page out of the way; the last few are kept in ``bad/``."""
        self._usable()
        path = self._paths.page(key)
        with self._upkeep, suppress(OSError):
            os.makedirs(self._paths.bad, DIR_MODE, exist_ok=True)
            os.rename(path, f"{self._paths.bad}/{os.path.basename(path)}.{safe(reason.replace(' ', '-'))[:40]}")
            with os.scandir(self._paths.bad) as found:
                kept = sorted((e.stat(follow_symlinks=False).st_mtime_ns, e.path) for e in found)
            for _, old in kept[:-BAD_KEPT]:
                size = os.stat(old, follow_symlinks=False).st_size
                os.unlink(old)
                self._quota.removed(size)

    def clear(self) -> int:
        """Delete every page of this namespace, nothing else (F68).

        Raises:
            OSError: some could not be deleted; all others were.
        """
        self._usable()
        gone = freed = stuck = 0
        for entry in page_files(self._paths.pages):
            try:
                size = entry.stat(follow_symlinks=False).st_size
                os.unlink(entry.path)
            except FileNotFoundError:
                continue
            except OSError:
                stuck += 1
            else:
                gone += 1
                freed += size
        self._quota.removed(freed)
        if stuck:
            raise OSError(f"{stuck} pages could not be deleted, {gone} were")
        self._epoch.renew()
        return gone

    def epoch(self) -> str:
        """See ``Backend``. Raises OSError when the directory cannot be used."""
        self._usable()
        return self._epoch.name()

    def health(self) -> dict[str, Any]:
        """Facts for status.

        Raises:
            OSError: the directory is not there any more.
        """
        self._usable()
        free, floor = self._space.measure()
        usage = self._quota.ledger.usage()
        return {
            "path": self._paths.root,
            "free_bytes": free,
            "min_free_space": floor,
            "used_bytes": usage.stored if usage else None,
            "reserved_bytes": usage.reserved if usage else None,
            "max_size": self._quota.max_size,
            "evicted_pages": self._quota.evicted,
            "unremovable_pages": self._quota.unremovable,
            "no_space": self._space.reason or None,
            "direct_io": False,
            "direct_io_reason": "this backend uses the page cache",
        }


def _write_all(fd: int, page: memoryview) -> None:
    done = 0
    while done < page.nbytes:
        done += os.pwrite(fd, page[done:] if done else page, done)


def _read_all(fd: int, page: memoryview) -> bool:
    done = 0
    while done < page.nbytes:
        n = os.preadv(fd, [page[done:] if done else page], done)
        if n == 0:
            return False
        done += n
    return True


SPEC = BackendSpec(
    manifest=lambda options, env: FileStore.manifest,
    options=FileOptions,
    create=lambda options, context, env: FileStore(options, context),
    missing=list,
    layouts=FileStore.manifest.layouts,
    notes=("nothing to install; works on any POSIX file system, shared or local",),
)
