"""Messages between the HTTP front (ZMQ ROUTER, binds) and a scheduler process (DEALER, connects).

Both ends are one program on one host, started from one install, so there is no version exchange. A scheduler's
routing id is ``<rank>.<epoch>``: whatever was meant for an earlier start of a rank cannot reach the next one.
"""

import msgspec

from hicache_proto.errors import ErrorBody

# ---- front -> scheduler


class Submit(msgspec.Struct, frozen=True, tag_field="type", tag="submit"):
    """Generate. The front has checked lengths and token ids."""

    rid: str
    tokens: list[int]
    max_new_tokens: int
    ignore_eos: bool = True


class Cancel(msgspec.Struct, frozen=True, tag_field="type", tag="cancel"):
    """The caller left; unknown ids are ignored. No answer."""

    rid: str


class Flush(msgspec.Struct, frozen=True, tag_field="type", tag="flush"):
    """Empty L1 and L2 at the next idle moment within ``timeout_s``. Answered with ``Flushed``."""

    call: int
    timeout_s: float


class Stop(msgspec.Struct, frozen=True, tag_field="type", tag="stop"):
    """Close admission, finish what runs, detach, exit; all within ``timeout_s``."""

    timeout_s: float


FrontMessage = Submit | Cancel | Flush | Stop

# ---- scheduler -> front


class Up(msgspec.Struct, frozen=True, tag_field="type", tag="up"):
    """Ready to serve."""

    rank: int
    epoch: int
    pid: int


class Done(msgspec.Struct, frozen=True, tag_field="type", tag="done"):
    """A request ended well. The three counts are prompt tokens whose KV was found in each tier."""

    rid: str
    output: list[int]
    prompt_tokens: int
    device: int
    host: int
    storage: int
    finish_reason: str  # "length" or "stop"


class Failed(msgspec.Struct, frozen=True, tag_field="type", tag="failed"):
    """A request ended without an answer."""

    rid: str
    error: ErrorBody


class Flushed(msgspec.Struct, frozen=True, tag_field="type", tag="flushed"):
    """End of a flush. ``blocked_by``: non-zero counters when it was not done."""

    call: int
    ok: bool
    blocked_by: dict[str, int] = {}


RankMessage = Up | Done | Failed | Flushed

_encoder = msgspec.msgpack.Encoder()
_from_front = msgspec.msgpack.Decoder(FrontMessage)
_from_rank = msgspec.msgpack.Decoder(RankMessage)


def encode(message: FrontMessage | RankMessage) -> bytes:
    """One ZMQ frame."""
    return _encoder.encode(message)


def decode_from_front(frame: bytes) -> FrontMessage:
    """Raises msgspec.MsgspecError."""
    return _from_front.decode(frame)


def decode_from_rank(frame: bytes) -> RankMessage:
    """Raises msgspec.MsgspecError."""
    return _from_rank.decode(frame)


def routing_id(rank: int, epoch: int) -> bytes:
    """ZMQ routing id of one start of one rank."""
    return f"{rank}.{epoch}".encode()
