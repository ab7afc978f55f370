"""Logging: journald priorities when stderr is the journal, readable or JSON lines elsewhere, secrets taken out.

systemd sets JOURNAL_STREAM to device:inode of the journal's stream. Only if that is our stderr are ``<N>`` prefixes
written: anywhere else they would be noise. journald reads a priority per *line*, so a traceback carries the prefix on
each of its lines (notes of systemd.exec; tried: without it the rest of a traceback is logged as "info").
"""

import logging
import os
import re
import sys
from typing import TextIO

import msgspec

from hicache_sidecar.core.redaction import REDACTED, redact_text

FORMATS = ("auto", "journal", "human", "json")
LEVELS = ("debug", "info", "warning", "error")

# syslog severities of sd-daemon(3)
_PRIORITY = {logging.CRITICAL: 2, logging.ERROR: 3, logging.WARNING: 4, logging.INFO: 6, logging.DEBUG: 7}
# Bearer tokens are the one secret that no key in front gives away.
_BEARER = re.compile(r"(?i)\b(bearer\s+)[A-Za-z0-9._~+/=-]+")


def redact(text: str) -> str:
    """The backstop behind every layer's own redaction: a vendor's exception may quote its configuration (F94)."""
    # Bearer first: by key alone, "Authorization: Bearer x" would lose the scheme and keep the token.
    return redact_text(_BEARER.sub(rf"\1{REDACTED}", text))


class RedactingFilter(logging.Filter):
    """Rewrites the finished message of every record, whoever logged it."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = redact(record.getMessage()), None
        return True


class LineFormatter(logging.Formatter):
    """Human lines; tracebacks are redacted too. ``prefix`` writes the journal's priority before every line."""

    def __init__(self, *, prefix: bool) -> None:
        super().__init__("%(message)s" if prefix else "%(asctime)s %(levelname)-7s %(name)s: %(message)s")
        self._prefix = prefix

    def formatException(self, ei: object) -> str:
        return redact(super().formatException(ei))  # type: ignore[arg-type]

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if not self._prefix:
            return text
        mark = f"<{_PRIORITY.get(record.levelno, 6)}>"
        return "\n".join(mark + line for line in text.splitlines() or [""])


class JsonFormatter(logging.Formatter):
    """One JSON object per line: ``ts`` (seconds since the epoch), ``level``, ``logger``, ``message``, ``traceback``."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "ts": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["traceback"] = redact(self.formatException(record.exc_info))
        return msgspec.json.encode(entry).decode()


def is_journal(stream: TextIO, journal_stream: str | None) -> bool:
    """True when ``stream`` is the very file that JOURNAL_STREAM (``device:inode``) names."""
    if not journal_stream:
        return False
    try:
        info = os.fstat(stream.fileno())
        device, inode = journal_stream.split(":")
        return (info.st_dev, info.st_ino) == (int(device), int(inode))
    except (OSError, ValueError):
        return False


def setup(level: str = "info", style: str = "auto", stream: TextIO | None = None) -> None:
    """Configure the root logger once; a second call replaces the first (SIGHUP).

    Args:
        level: one of LEVELS.
        style: one of FORMATS; ``auto`` is ``journal`` under systemd's journal, else ``human``.
    """
    stream = stream or sys.stderr
    if style == "auto":
        style = "journal" if is_journal(stream, os.environ.get("JOURNAL_STREAM")) else "human"
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if style == "json" else LineFormatter(prefix=style == "journal"))
    handler.addFilter(RedactingFilter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
