"""Failures that only a client sees: no sidecar there, or it went away in the middle.

Everything that the sidecar itself refuses arrives as a ``HicacheError`` of the shared vocabulary.
"""

from typing import Any, ClassVar


class ClientError(Exception):
    """Base class. ``code`` and ``exit_code`` have the meaning they have on ``HicacheError``."""

    code: ClassVar[str] = "unreachable"
    exit_code: ClassVar[int] = 5
    hint: str = ""

    def __init__(self, message: str, *, operation_id: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.operation_id = operation_id

    def document(self) -> dict[str, Any]:
        """The error in the HTTP API's shape."""
        return {
            "error": {
                "code": self.code,
                "message": self.message,
                "retryable": self.code == "unreachable",
                "hint": self.hint,
                "operation_id": self.operation_id,
                "details": {},
            }
        }


class Unreachable(ClientError):
    """No sidecar answered; nothing was sent to an engine."""

    hint = "is hicache-sidecar running, and is --socket (or HICACHE_SIDECAR_SOCKET) its control.sock?"


class ConnectionLost(ClientError):
    """The sidecar went away, or fell silent, after a request was sent.

    The outcome is unknown to this client. ``operation_id`` is the one seen in progress, or None when the
    connection ended before the sidecar named one. An operation goes on when its client leaves: ask for it by id.
    ``only_read``: the request asked for nothing but to be told something, so nothing is in doubt.
    """

    code = "connection_lost"

    def __init__(self, message: str, *, operation_id: str | None = None, only_read: bool = False) -> None:
        super().__init__(message, operation_id=operation_id)
        self.only_read = only_read
        if not only_read:
            self.hint = (
                "the operation may have gone on: look at `hicachectl operations` and `hicachectl status`; "
                "after a restart of the sidecar at `hicachectl history`"
            )
