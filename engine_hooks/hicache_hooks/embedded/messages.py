"""Messages between the HTTP front (ZMQ ROUTER, binds) and a scheduler process (DEALER, connects).

Both ends are one program on one host, started from one install, so there is no version exchange. A scheduler's
routing id is ``<rank>.<epoch>``: whatever was meant for an earlier start of a rank cannot reach the next one.
"""

import msgspec

from hicache_proto.errors import ErrorBody
from hicache_proto.model import EffectiveState

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


class StorageView(msgspec.Struct, frozen=True, omit_defaults=False):
    """The engine's own view of its storage configuration; names are SGLang's, secrets are redacted."""

    hicache_storage_backend: str | None = None
    hicache_storage_backend_extra_config: str | None = None
    hicache_storage_prefetch_policy: str | None = None
    hicache_write_policy: str | None = None
    revision: int = 0


class Up(msgspec.Struct, frozen=True, tag_field="type", tag="up"):
    """Ready to serve."""

    rank: int
    epoch: int
    pid: int
    view: StorageView = StorageView()


class Published(msgspec.Struct, frozen=True, tag_field="type", tag="published"):
    """An operation ended: the process that answers HTTP shows the new configuration from now on (spec.md, "Status")."""

    view: StorageView


class Done(msgspec.Struct, frozen=True, tag_field="type", tag="done"):
    """A request ended well. The three counts are prompt tokens whose KV was found in each tier; ``loop_gap_ms`` is the
    longest time that the rank's loop did not turn since its last answer (``gaps``)."""

    rid: str
    output: list[int]
    prompt_tokens: int
    device: int
    host: int
    storage: int
    finish_reason: str  # "length" or "stop"
    loop_gap_ms: float = 0.0


class Failed(msgspec.Struct, frozen=True, tag_field="type", tag="failed"):
    """A request ended without an answer."""

    rid: str
    error: ErrorBody


class Flushed(msgspec.Struct, frozen=True, tag_field="type", tag="flushed"):
    """End of a flush. ``blocked_by``: non-zero counters when it was not done."""

    call: int
    ok: bool
    blocked_by: dict[str, int] = {}


RankMessage = Up | Published | Done | Failed | Flushed

_encoder = msgspec.msgpack.Encoder()
_from_front = msgspec.msgpack.Decoder(FrontMessage)
_from_rank = msgspec.msgpack.Decoder(RankMessage)


def view_of(state: EffectiveState) -> StorageView:
    """What the HTTP front shows of a rank's effective state."""
    return StorageView(
        hicache_storage_backend=state.backend,
        hicache_storage_backend_extra_config=state.extra_config,
        hicache_storage_prefetch_policy=state.prefetch_policy,
        hicache_write_policy=state.write_policy,
        revision=state.revision,
    )


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
