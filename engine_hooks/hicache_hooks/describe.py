"""Exceptions of stores in words that cannot hold a secret (F94)."""

import os
import socket

from hicache_proto.errors import HicacheError


class Said(Exception):
    """Mixed into exceptions of our own whose text we wrote: places and reasons, never a secret, a key or a value.

    Only such a text reaches operators; of every other exception they see the type and the system's words.
    """


def describe_exception(exc: BaseException) -> str:
    """An exception's type, and the system's text for an errno; a message of our own is said as it is."""
    if isinstance(exc, HicacheError):
        return exc.message
    if isinstance(exc, Said) and str(exc):
        return str(exc)
    if isinstance(exc, socket.gaierror):  # its number is none of strerror's
        return "the host's name cannot be resolved"
    number = exc.errno if isinstance(exc, OSError) else None
    return f"{type(exc).__name__}: {os.strerror(number)}" if number else type(exc).__name__
