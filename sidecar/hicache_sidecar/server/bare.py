"""Answers that Hypercorn gives by itself, in the shape of every error of ours (interface.md: JSON, errors too).

What cannot be read as HTTP never becomes a request for the application: h11 names a status and Hypercorn (0.18) sends
it with an empty body; so it does for a websocket and for an application that failed. Such an answer is told by its
head: no length and no content type, which each of ours has. The status stays, since it is right for HTTP; ``code`` and
``retryable`` say what a client needs, so that a 400 of this kind is not taken for a busy engine.
"""

import re

import msgspec

from hicache_proto import api
from hicache_proto.errors import Forbidden, HicacheError, Internal, InvalidRequest, TooLarge

_BARE = re.compile(rb"HTTP/1\.1 ([45]\d\d) [^\r\n]*\r\n(?:[^\r\n]+\r\n)*?content-length: 0\r\n")


def status_of_bare(data: bytes) -> int | None:
    """The status of an error without a body that the application did not give; None: anything else."""
    found = _BARE.match(data)
    if found is None or not data.endswith(b"\r\n\r\n") or b"\r\ncontent-type:" in data.lower():
        return None
    return int(found[1])


def with_body(data: bytes) -> bytes:
    """``data``, which ``status_of_bare`` recognised, with a JSON body."""
    status = status_of_bare(data)
    body = msgspec.json.encode(api.ErrorDocument(error=_error(status or 400).body()))
    head = b"content-type: application/json\r\ncache-control: no-store\r\ncontent-length: %d\r\n" % len(body)
    return data.replace(b"content-length: 0\r\n", head, 1) + body


def _error(status: int) -> HicacheError:
    details = {"reason": "http"}
    match status:
        case 403:
            return Forbidden("this server speaks no websocket", details=details)
        case 431:
            return TooLarge("the head of the request is too large", details=details)
        case 501:
            return InvalidRequest("the only transfer encoding that is read is chunked", details=details)
        case status if status >= 500:
            return Internal(
                "the request could not be answered; it may or may not have been carried out", details=details
            )
        case _:
            return InvalidRequest("that is not HTTP/1.1 as its standard has it", details=details)
