"""The runtime directory: made or checked, never guessed. There is no fallback to /tmp (failures.md F96).

Sockets at a predictable path that everybody can write to would let any local user answer in the sidecar's place.
"""

import logging
import os
import stat
from collections.abc import Iterable
from pathlib import Path

log = logging.getLogger("hicache.daemon")

RUNTIME_MODE = 0o750  # the group may reach the sockets; their own modes and the peer's uid decide the rest


class PathError(Exception):
    """The directory cannot be used; the text says why and what to do."""


def prepare_runtime_dir(path: Path) -> None:
    """Make the runtime directory if it is missing, and check who can write to it.

    Raises:
        PathError: cannot be made, is no directory, belongs to somebody else, or others can write to it.
    """
    hint = "name one with --runtime-dir, or set RuntimeDirectory= in the unit"
    try:
        path.mkdir(mode=RUNTIME_MODE)
    except FileExistsError:
        pass
    except FileNotFoundError:
        raise PathError(f"runtime directory {path}: {path.parent} does not exist; {hint}") from None
    except OSError as exc:
        raise PathError(f"runtime directory {path}: {exc.strerror}; {hint}") from None
    info = path.stat()
    if not stat.S_ISDIR(info.st_mode):
        raise PathError(f"runtime directory {path} is not a directory; {hint}")
    if info.st_mode & stat.S_IWOTH:
        raise PathError(
            f"runtime directory {path}: everybody can write there, and could put a socket in our place; {hint}"
        )
    if info.st_uid not in (os.geteuid(), 0):
        raise PathError(f"runtime directory {path} belongs to uid {info.st_uid}, not to uid {os.geteuid()}; {hint}")
    if not os.access(path, os.W_OK | os.X_OK):
        raise PathError(f"runtime directory {path} cannot be written; {hint}")


class PublicPaths:
    """The sockets' names. Who is connected stays so when one is taken away, and nobody new comes in: that must be said,
    since nothing else tells it."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._made = {path: _identity(path) for path in paths}
        self._told: set[Path] = set()

    def gone(self) -> list[str]:
        """Names that are missing now, or are another file; each is logged once."""
        found = [path for path, made in self._made.items() if _identity(path) != made]
        for path in found:
            if path not in self._told:
                log.error("%s was removed or replaced: nobody new can connect there; restart the daemon", path)
        self._told = set(found)
        return [path.name for path in found]


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        info = path.stat(follow_symlinks=False)
    except OSError:
        return None
    return info.st_dev, info.st_ino
