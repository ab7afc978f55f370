"""What every command gets: the global options, the connection, and the one place that prints.

Rules of output: documents and tables go to stdout; progress (only on a terminal), warnings and errors go to stderr.
With ``-o json`` stdout carries exactly one JSON document per answer, errors included. ``-q`` drops progress and
the sentence of success, never an error.
"""

import os
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from hicache_proto.errors import HicacheError
from hicache_sidecar.cli.streams import plain, plain_lines
from hicache_sidecar.client.connection import REQUEST_TIMEOUT_S, Connection
from hicache_sidecar.client.errors import ClientError, ConnectionLost

PROGRAM = "hicachectl"
EXIT_DONE, EXIT_FAILED, EXIT_USAGE, EXIT_NOT_IDLE, EXIT_DEADLINE = 0, 1, 2, 3, 4
EXIT_NO_ENGINE = 6
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it


class UsageError(Exception):
    """The command line is wrong; exit code 2. ``usage`` is printed below the message, not part of it."""

    def __init__(self, message: str, usage: str = "") -> None:
        super().__init__(message)
        self.usage = usage


class Context:
    """Global options of one run. ``json`` and ``quiet`` may also be set after the command's name."""

    def __init__(self, socket: str | None = None, json: bool = False, quiet: bool = False) -> None:
        self.socket = socket
        self.json = json
        self.quiet = quiet
        self._progress_shown = False

    # ---- asking

    def connect(self) -> Connection:
        """A greeted connection; the caller closes it."""
        return Connection.connect(self.socket, client=PROGRAM)

    def ask(self, body: dict[str, Any], timeout_s: float = REQUEST_TIMEOUT_S) -> dict[str, Any]:
        """One request on a fresh connection; progress is shown on a terminal.

        Raises:
            HicacheError, ClientError: mapped to exit codes by ``main``.
        """
        shown = not self.quiet and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"  # which has no such line
        on_progress = self.progress if shown else None
        with self.connect() as connection:
            request = connection.send(body, timeout_s)
            try:
                document = connection.wait(request, timeout_s, on_progress)
            except KeyboardInterrupt:
                operation = connection.operation_id(request)
                if operation:
                    self.note(
                        f"\noperation {operation} goes on: {PROGRAM} operations {operation}, or cancel {operation}"
                    )
                raise
            finally:
                self._end_progress()
        if not isinstance(document, dict):
            raise HicacheError("the sidecar answered with something that is no document")
        return document

    # ---- printing

    def progress(self, data: dict[str, Any]) -> None:
        """Rewrite one line on the terminal with the operation's phase and blockers; what does not fit is left out."""
        import shutil

        parts = [str(data[key]) for key in ("operation_id", "phase", "message") if data.get(key)]
        blocked = data.get("blocked_by") or []
        if blocked:
            parts.append("waiting for " + blockers(blocked))
        width = max(20, shutil.get_terminal_size().columns) - 1  # a line that wraps could not be rewritten
        sys.stderr.write("\r\x1b[K" + plain(" · ".join(parts))[:width])
        sys.stderr.flush()
        self._progress_shown = True

    def _end_progress(self) -> None:
        if self._progress_shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._progress_shown = False

    def document(self, document: Any) -> None:
        """Print one JSON document."""
        print(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())

    def line(self, text: str = "") -> None:
        """One line of the answer itself, or several of ours."""
        print(plain_lines(text))

    def say(self, text: str) -> None:
        """A sentence of success; not with ``-q``."""
        if not self.quiet:
            print(plain(text))

    def note(self, text: str) -> None:
        """A warning or hint on stderr; several lines, of ours alone, are allowed."""
        print(plain_lines(text), file=sys.stderr)

    def table(self, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Aligned columns; numbers to the right. Without rows only the header is printed."""
        cells = [[cell(value) for value in row] for row in rows]
        widths = [max([len(name), *(len(row[i]) for row in cells)]) for i, name in enumerate(header)]
        right = [_all_numbers([row[i] for row in rows]) for i in range(len(header))]
        for row in [list(header), *cells]:
            padded = [text.rjust(w) if r else text.ljust(w) for text, w, r in zip(row, widths, right, strict=True)]
            print("  ".join(padded).rstrip())

    def pairs(self, pairs: Sequence[tuple[str, Any]]) -> None:
        """``name  value`` lines, aligned."""
        width = max(len(name) for name, _ in pairs)
        for name, value in pairs:
            print(f"{name.ljust(width)}  {cell(value)}".rstrip())

    def failure(self, error: HicacheError | ClientError) -> int:
        """Report one error the same way for every command; returns its exit code."""
        if self.json:
            self.document(error.document() if isinstance(error, ClientError) else {"error": error.body()})
        lost = isinstance(error, ConnectionLost) and not error.only_read
        if not self.json or lost:
            message = plain(error.message)
            if lost:
                self.note(f"{PROGRAM}: {message}; operation {error.operation_id or '(no id yet)'}: outcome unknown")
            else:
                self.note(f"{PROGRAM}: {message}" + ("" if error.code in error.message else f" [{error.code}]"))
            if isinstance(error, HicacheError):
                listed = error.details.get("blocked_by")
                if isinstance(listed, list) and listed and "blocked by" not in error.message:
                    self.note("  blocked by: " + blockers(listed))
                if error.operation_id:
                    self.note(f"  operation: {error.operation_id}")
            if error.hint:
                self.note(f"  hint: {error.hint}")
        return error.exit_code


def blockers(listed: list[Any]) -> str:
    """``rank 1: grammar_queue=3, running_batch=1``."""
    by_rank: dict[Any, list[str]] = {}
    for item in listed:
        if isinstance(item, dict):
            by_rank.setdefault(item.get("rank"), []).append(f"{item.get('name')}={item.get('count')}")
    return "; ".join(f"rank {rank}: {', '.join(names)}" for rank, names in by_rank.items())


def cell(value: Any) -> str:
    """How a value looks in a table."""
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.1f}"
    if isinstance(value, list):
        return plain(",".join(str(item) for item in value)) or "-"
    return plain(str(value))


def _all_numbers(values: list[Any]) -> bool:
    """At least one number, and nothing else but gaps."""
    given = [value for value in values if value is not None]
    return bool(given) and all(isinstance(value, int | float) and not isinstance(value, bool) for value in given)
