"""Exceptions of stores in words that cannot hold a secret (F94)."""

import os

from hicache_proto.errors import HicacheError


def describe_exception(exc: BaseException) -> str:
    """An exception's type, and the system's text for an errno; a message of our own is said as it is."""
    if isinstance(exc, HicacheError):
        return exc.message
    number = exc.errno if isinstance(exc, OSError) else None
    return f"{type(exc).__name__}: {os.strerror(number)}" if number else type(exc).__name__
