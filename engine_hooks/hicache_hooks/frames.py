"""Turns a message into a frame that can be sent, whatever an adapter put into it.

Plans and data come from engine adapters and backends. One that cannot be encoded, or is over the link's limit, must
cost its own answer and nothing else: libzmq ends a connection over an oversized message.
"""

import msgspec

from hicache_proto.errors import Internal
from hicache_proto.hooklink import MAX_LINK_BYTES, Answer, HookMessage, encode


def frame_of(message: HookMessage) -> tuple[bytes, str]:
    """``(frame, problem)``. With a problem the frame is an error answer in the message's place, or empty."""
    try:
        frame = encode(message)
        problem = "" if len(frame) <= MAX_LINK_BYTES else f"message of {len(frame)} bytes"
    except (TypeError, ValueError, OverflowError, UnicodeEncodeError) as error:
        problem = f"{type(error).__name__}: {error}"
    if not problem:
        return frame, ""
    if not isinstance(message, Answer):
        return b"", problem
    body = Internal(f"the answer cannot be sent: {problem}", details={"reason": "unsendable"}).body()
    return encode(msgspec.structs.replace(message, ok=False, error=body, plan=None, data=None)), problem
