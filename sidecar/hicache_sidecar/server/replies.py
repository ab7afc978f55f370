"""From exception to answer, once for both transports.

A refusal travels as its ``ErrorBody``. Anything else is a defect of ours: its traceback goes to the log, and the
client reads ``internal`` with a reference to find it by, never the text of the exception (failures.md F94).
"""

import logging
import secrets
from typing import Any

import msgspec

from hicache_proto.errors import ERRORS, ErrorBody, HicacheError, Internal, InvalidRequest
from hicache_sidecar.core.explain import explain
from hicache_sidecar.obs.counters import Counters

log = logging.getLogger("hicache.server")

# Seconds that a client should wait before it repeats a retryable request.
RETRY_AFTER_S = {"not_idle": 1, "operation_in_progress": 1, "no_engine": 5, "deadline_exceeded": 1}
_RETRY_AFTER_DEFAULT_S = 1


def refusal(exc: Exception, counters: Counters, where: str) -> ErrorBody:
    """The error that a client reads for ``exc``.

    Args:
        where: ``socket`` or ``http``; for the counter and the log.
    """
    if isinstance(exc, HicacheError):
        return exc.body()
    if isinstance(exc, msgspec.ValidationError):
        return InvalidRequest(f"invalid request: {exc}").body()
    if isinstance(exc, msgspec.DecodeError):
        return InvalidRequest(f"cannot read the request: {exc}").body()
    reference = secrets.token_hex(4)
    counters.add("hicache_internal_errors", where)
    log.error("unhandled exception %s (%s)", reference, where, exc_info=exc)
    return Internal(
        "the sidecar hit a defect of its own; the request may or may not have been carried out",
        details={"reason": "unhandled", "reference": reference},
        hint=f"look for {reference} in the sidecar's log",
    ).body()


def invalid(exc: msgspec.ValidationError, decoded: Any) -> InvalidRequest:
    """The refusal for a request of a wrong shape; ``decoded`` is the type that was asked for (F60)."""
    text, details = explain(exc, decoded)
    return InvalidRequest(f"invalid request: {text}", details=details)


def status_of(body: ErrorBody) -> int:
    """HTTP status of an error."""
    return ERRORS.get(body.code, Internal).status


def retry_after_s(body: ErrorBody) -> int | None:
    """Value of Retry-After, or None when repeating the request would not help."""
    return RETRY_AFTER_S.get(body.code, _RETRY_AFTER_DEFAULT_S) if body.retryable else None
