"""Exceptions of redis-py in our own words: what an operator can act on, and nothing that was sent (F94)."""

import re
from typing import NoReturn

from hicache_hooks.describe import Said, describe_exception

_CODE = re.compile(r"[A-Z]{2,16}")


class RedisFailed(Said, OSError):
    """The server answered with an error."""


class RedisRefused(Said, PermissionError):
    """It does not let us in, or not do this."""


class RedisLate(Said, TimeoutError):
    """No answer in time."""


class RedisGone(Said, ConnectionError):
    """No connection, or none left."""


def plain(exc: Exception) -> NoReturn:
    """Raise what redis-py raised as one of the above; its own text may quote what was sent (F94)."""
    kind = type(exc).__name__
    if kind == "TimeoutError":
        raise RedisLate("redis: no answer in time") from None
    if kind in ("AuthenticationError", "AuthenticationWrongNumberOfArgsError"):
        raise RedisRefused("redis: the server refuses this user or password, or wants one") from None
    if kind == "NoPermissionError":
        raise RedisRefused("redis: this user may not do that (NoPermissionError)") from None
    if isinstance(exc, OSError) or kind in ("ConnectionError", "BusyLoadingError", "MaxConnectionsError"):
        inside = exc.__cause__ or exc.__context__
        why = describe_exception(inside) if isinstance(inside, OSError) else kind
        raise RedisGone(f"redis: no connection ({why})") from None
    raise RedisFailed(f"redis: {_server_error(exc)}") from None


def _server_error(exc: Exception) -> str:
    """The class, and the error's first word where it is a code in capitals: what follows may quote what we sent."""
    words = str(exc).split(maxsplit=1)
    code = words[0] if words and _CODE.fullmatch(words[0]) else ""
    return f"{type(exc).__name__} {code}".rstrip()
