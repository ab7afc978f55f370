"""The marker by which a directory says that it is still the store that it was (F70): ``pages/<namespace>/epoch``.

Who removes the pages, or mounts something else in their place, takes the marker along; the next look makes another one.
Of several processes that make it at once one wins, and all of them read the winner's. It is touched at every look, so
that a cleaner of old files takes it last.
"""

import os
import secrets
from collections.abc import Callable
from contextlib import suppress

from hicache_hooks.backends.file_paths import FILE_MODE, StorePaths, TempArea

_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_CHARS = 16  # of a name


class EpochFile:
    """The marker of one namespace below one root. ``recover`` makes directories again that somebody removed."""

    def __init__(self, paths: StorePaths, temp: TempArea, recover: Callable[[], None]) -> None:
        self._path = f"{paths.pages}/epoch"
        self._temp = temp
        self._recover = recover

    def name(self) -> str:
        """The present epoch; a new one when there is none.

        Raises:
            OSError: the directory is not usable.
        """
        found = self._read()
        if not found:
            self._write(os.link)
            found = self._read()
        with suppress(OSError):
            os.utime(self._path, follow_symlinks=False)
        return found

    def renew(self) -> None:
        """The pages were cleared: other processes must see it too.

        Raises:
            OSError: the directory is not usable.
        """
        self._write(os.replace)

    def _read(self) -> str:
        try:
            fd = os.open(self._path, _READ)
        except FileNotFoundError:
            return ""
        try:
            return os.read(fd, _CHARS).decode("ascii", "replace")
        finally:
            os.close(fd)

    def _write(self, publish: Callable[[str, str], None]) -> None:
        try:
            self._publish(publish)
        except FileNotFoundError:
            self._recover()
            self._publish(publish)

    def _publish(self, publish: Callable[[str, str], None]) -> None:
        temp = self._fill()
        try:
            publish(temp, self._path)
        except FileExistsError:
            if not self._read():  # torn by a power cut: nobody's
                os.replace(temp, self._path)
        except FileNotFoundError:
            raise
        except OSError:
            if publish is not os.link:
                raise
            os.replace(temp, self._path)  # a file system without links: the last one wins
        finally:
            with suppress(OSError):
                os.unlink(temp)

    def _fill(self) -> str:
        temp = self._temp.name()
        fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
        try:
            os.write(fd, secrets.token_hex(_CHARS // 2).encode())
        finally:
            os.close(fd)
        return temp
