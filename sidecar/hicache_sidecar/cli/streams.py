"""Standard streams as scripts and terminals hand them to us: closed, full, of a small alphabet, with nobody reading.

Nothing of that may hide how an operation ended, so no stream ends in a traceback. What came from others (reasons,
names, messages of stores) is printed without control characters: it must not move a terminal's cursor or forge lines.
"""

import os
import sys
from contextlib import suppress
from io import TextIOWrapper


def prepare() -> None:
    """Open what the shell closed (``>&-``) on nothing, lest a socket gets its number; spell what cannot be encoded."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - it lives as long as we do
        elif mode == "w" and isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def abandon() -> None:
    """Nobody takes what is printed any more: what is left goes nowhere, and the flush at the exit succeeds."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def plain_lines(text: str) -> str:
    """``plain`` for text of ours that has several lines."""
    return text if text.isprintable() else "\n".join(map(plain, text.split("\n")))


def plain(text: str) -> str:
    """``text`` on one line, control characters spelled out."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
