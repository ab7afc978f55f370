"""Reading ``@/path`` configs and ``*_file`` secrets on the engine's host, only below ``HICACHE_CONFIG_DIRS``.

A path is resolved first and refused unopened when it leads out (F52). The file is then reached from the allowed
directory by descriptors, one component at a time and never through a symbolic link, so that exchanging a
component after the check cannot lead anywhere else. Links *inside* are fine (a mounted ConfigMap is made of them).
"""

import os
import stat
from collections.abc import Mapping

from hicache_hooks.cache.config_text import MAX_TEXT_BYTES, bad

DIRS_ENV = "HICACHE_CONFIG_DIRS"
DEFAULT_DIRS = "/etc/hicache"
FORMATS = ("json", "toml", "yaml")
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # non-blocking: a FIFO must not hang us


def config_dirs(env: Mapping[str, str]) -> list[str]:
    """The allowed directories, absolute, in order. Relative entries would depend on the engine's cwd: ignored."""
    return [entry for entry in env.get(DIRS_ENV, DEFAULT_DIRS).split(":") if os.path.isabs(entry)]


def config_format(path: str) -> str:
    """``json``, ``toml`` or ``yaml`` by the file's suffix.

    Raises:
        InvalidConfig: another suffix; names the three.
    """
    suffix = os.path.splitext(path)[1].lstrip(".")
    if suffix not in FORMATS:
        raise bad("a config file must end in .json, .toml or .yaml", "unknown_format", allowed=list(FORMATS))
    return suffix


def read_text(path: str, env: Mapping[str, str], what: str = "config file") -> str:
    """Content of a regular file below one of the allowed directories.

    Raises:
        InvalidConfig: not absolute, outside, missing, unreadable, not regular, over 1 MiB, not UTF-8.
    """
    if not os.path.isabs(path) or "\0" in path:
        raise bad(f"the path of a {what} must be absolute", "bad_path")
    real = os.path.realpath(path)
    dirs = config_dirs(env)
    root = next((r for r in map(os.path.realpath, dirs) if os.path.commonpath((r, real)) == r and r != real), None)
    if root is None:
        raise bad(
            f"the {what} is outside the allowed directories ({DIRS_ENV} on the engine's host)",
            "outside_config_dirs",
            allowed=dirs,
        )
    try:
        raw = _read_below(root, os.path.relpath(real, root).split("/"))
    except OSError as exc:
        failed = os.strerror(exc.errno or 0)
    else:
        failed = ""
    if failed:
        raise bad(f"cannot read the {what}: {failed}", "unreadable")
    if raw is None:
        raise bad(f"the {what} is not a regular file of at most {MAX_TEXT_BYTES} bytes", "not_regular")
    try:
        return raw.decode()
    except UnicodeDecodeError as exc:
        place = exc.start
    raise bad(f"the {what} is not UTF-8 at byte {place}", "syntax")


def _read_below(root: str, parts: list[str]) -> bytes | None:
    fd = os.open(root, _FLAGS | os.O_DIRECTORY)
    try:
        for i, part in enumerate(parts):
            last = i == len(parts) - 1
            step = os.open(part, _FLAGS if last else _FLAGS | os.O_DIRECTORY, dir_fd=fd)
            os.close(fd)
            fd = step
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_size > MAX_TEXT_BYTES:
            return None
        with os.fdopen(os.dup(fd), "rb") as file:
            raw = file.read(MAX_TEXT_BYTES + 1)
        return raw if len(raw) <= MAX_TEXT_BYTES else None
    finally:
        os.close(fd)
