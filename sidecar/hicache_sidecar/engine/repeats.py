"""Idempotency keys: a repeated request gets the first answer (design.md, rule 15).

What began is in the journal and survives a restart. A change that found nothing to do has no operation there: its
answer is remembered here, so that a repeat after somebody else's change does not undo that change. Refusals before
anything began bind nothing.
"""

import hashlib

import msgspec

from hicache_proto import api
from hicache_proto.errors import ErrorBody, HicacheError, InvalidRequest, from_body
from hicache_sidecar.engine.context import Context
from hicache_sidecar.engine.operation import Job

UNCHANGED_KEYS = 200  # as many as the journal remembers


def body_digest(request: api.ChangeOptions) -> str:
    """Identifies a request's content for the idempotency key."""
    return hashlib.sha256(msgspec.json.encode(msgspec.structs.replace(request, request_id=None))).hexdigest()


class Repeats:
    """What the keys of requests stand for."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._unchanged: dict[str, tuple[str, api.OperationAnswer]] = {}

    def find(self, request: api.ChangeOptions) -> Job | api.OperationAnswer | None:
        """The first answer of a repeated request id, or the job that still runs under it.

        Raises:
            InvalidRequest: the id was used with another body. HicacheError: the first answer was this error.
        """
        key = request.request_id
        if not key:
            return None
        digest = body_digest(request)
        running = self._ctx.running
        if running is not None and running.request_key == key:
            _same(digest, running.digest)
            return running
        known = self._ctx.book.answer_for(key)
        if known is None:
            return self._found_nothing_to_do(key, digest)
        _same(digest, known[0])
        kept = known[1]
        if not kept:
            raise HicacheError("this request ended in a restart of the sidecar, without an answer: see the history")
        if "error" in kept:
            raise from_body(msgspec.convert(kept["error"], type=ErrorBody))
        return msgspec.convert(kept["answer"], type=api.OperationAnswer)

    def unchanged(self, job: Job, answer: api.OperationAnswer) -> None:
        """``job`` found nothing to do."""
        if job.request_key:
            self._unchanged[job.request_key] = (job.digest, answer)
            while len(self._unchanged) > UNCHANGED_KEYS:
                del self._unchanged[next(iter(self._unchanged))]

    def _found_nothing_to_do(self, key: str, digest: str) -> api.OperationAnswer | None:
        if key not in self._unchanged:
            return None
        first, answer = self._unchanged[key]
        _same(digest, first)
        return answer


def _same(one: str, other: str) -> None:
    if one != other:
        raise InvalidRequest("this request id was used with another body", details={"reason": "idempotency_mismatch"})
