"""The error vocabulary: every failure that leaves the product has one code, HTTP status and exit code.

A handler raises one of these classes; each transport maps it in one place. Finer causes go into
``details["reason"]``. The table is the outside contract: codes may be added, never renamed.
"""

from typing import Any, ClassVar

import msgspec


class ErrorBody(msgspec.Struct, frozen=True, omit_defaults=False):
    """What a client reads about a failure, the same on the socket, over HTTP and between hook and sidecar."""

    code: str
    message: str
    retryable: bool = False
    hint: str = ""
    operation_id: str | None = None
    details: dict[str, Any] = {}


class HicacheError(Exception):
    """Base class. ``code`` keys the table; ``message`` is one plain sentence without secrets."""

    code: ClassVar[str] = "internal"
    status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 1
    retryable: bool = False  # an error that came over the wire says it by itself
    default_hint: ClassVar[str] = ""

    def __init__(
        self,
        message: str,
        *,
        details: dict[str, Any] | None = None,
        hint: str | None = None,
        operation_id: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.details: dict[str, Any] = dict(details or {})
        self.hint = self.default_hint if hint is None else hint
        self.operation_id = operation_id

    def body(self) -> ErrorBody:
        """The wire form of this error."""
        return ErrorBody(
            code=self.code,
            message=self.message,
            retryable=self.retryable,
            hint=self.hint,
            operation_id=self.operation_id,
            details=self.details,
        )


class NotIdle(HicacheError):
    """The engine is busy. ``details.blocked_by`` = ``[{rank, name, count}]``."""

    code, status, exit_code, retryable = "not_idle", 400, 3, True
    default_hint = "retry when idle, or let the server wait: --wait SECONDS, or --mode drain"


class Unauthenticated(HicacheError):
    """No credentials, or wrong ones."""

    code, status, exit_code = "unauthenticated", 401, 8


class Forbidden(HicacheError):
    """The caller is known, and not allowed."""

    code, status, exit_code = "forbidden", 403, 8


class NotFound(HicacheError):
    """No such operation, revision or route."""

    code, status, exit_code = "not_found", 404, 1


class MethodNotAllowed(HicacheError):
    """HTTP only: the route is there, and not for this method. The ``Allow`` header names those that are."""

    code, status, exit_code = "method_not_allowed", 405, 1


class AlreadyAttached(HicacheError):
    """Another backend, or the same one with other options, is attached and ``swap`` was not asked for."""

    code, status, exit_code = "already_attached", 409, 7
    default_hint = "detach first, or ask for a swap"


class OperationInProgress(HicacheError):
    """One operation at a time; ``operation_id`` is the one that runs."""

    code, status, exit_code, retryable = "operation_in_progress", 409, 7, True


class Quarantined(HicacheError):
    """A rank could not be brought to a clean state, or the config is known to kill engines."""

    code, status, exit_code = "quarantined", 409, 7


class RevisionMismatch(HicacheError):
    """``If-Match`` named another revision; ``details.current`` is the present one."""

    code, status, exit_code = "revision_mismatch", 412, 7


class TooLarge(HicacheError):
    """A frame or body over the limit; refused unread."""

    code, status, exit_code = "too_large", 413, 1


class InvalidRequest(HicacheError):
    """The request's shape is wrong: unknown field, wrong type, bad value."""

    code, status, exit_code = "invalid_request", 422, 1


class InvalidConfig(HicacheError):
    """The extra config is wrong: syntax, type, range, unknown key, file outside the allowed directories."""

    code, status, exit_code = "invalid_config", 422, 1


class UnknownBackend(HicacheError):
    """No backend of that name."""

    code, status, exit_code = "unknown_backend", 422, 1


class BackendUnavailable(HicacheError):
    """The backend is known, but a package, device or driver is missing on the engine's host."""

    code, status, exit_code = "backend_unavailable", 422, 1


class LayoutUnsupported(HicacheError):
    """The backend cannot use the host memory layout; ``details`` = ``{layout, allowed}``."""

    code, status, exit_code = "layout_unsupported", 422, 1


class UnsupportedByEngine(HicacheError):
    """This engine cannot do what was asked."""

    code, status, exit_code = "unsupported_by_engine", 422, 1


class Internal(HicacheError):
    """A defect of ours."""

    code, status, exit_code = "internal", 500, 1


class Inconsistent(HicacheError):
    """The layers of a rank disagree about what is attached; ``details`` lists them."""

    code, status, exit_code = "inconsistent", 500, 1


class PrepareFailed(HicacheError):
    """A rank could not build or probe the backend. Nothing changed on any rank."""

    code, status, exit_code = "prepare_failed", 502, 9


class RolledBack(HicacheError):
    """A commit failed on some rank; every rank is on the old state again."""

    code, status, exit_code = "rolled_back", 502, 9


class NoEngine(HicacheError):
    """No rank is connected, or not all that the topology promises."""

    code, status, exit_code, retryable = "no_engine", 503, 6, True
    default_hint = "start the engine with HICACHE_SIDECAR set to this sidecar's hooks.sock"


class DeadlineExceeded(HicacheError):
    """Time ran out; the state was restored."""

    code, status, exit_code, retryable = "deadline_exceeded", 504, 4, True


ERRORS: dict[str, type[HicacheError]] = {
    cls.code: cls
    for cls in (
        NotIdle, Unauthenticated, Forbidden, NotFound, MethodNotAllowed, AlreadyAttached, OperationInProgress,
        Quarantined, RevisionMismatch, TooLarge, InvalidRequest, InvalidConfig, UnknownBackend,
        BackendUnavailable, LayoutUnsupported, UnsupportedByEngine, Internal, Inconsistent, PrepareFailed, RolledBack,
        NoEngine, DeadlineExceeded,
    )
}  # fmt: skip


def from_body(body: ErrorBody) -> HicacheError:
    """The exception for a received error; an unknown code becomes ``internal`` and keeps its message."""
    cls = ERRORS.get(body.code, Internal)
    error = cls(body.message, details=body.details, hint=body.hint, operation_id=body.operation_id)
    error.retryable = body.retryable  # a full disk is ``internal``, and worth another try all the same
    return error
