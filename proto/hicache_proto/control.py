"""Frames of the control socket: hello from each side, then requests, progress, results and errors.

Requests carry ``id``; the answer is zero or more ``progress`` frames and one ``result`` or ``error`` with the
same ``id``. Several requests may be in flight on a connection.
"""

from typing import Any

import msgspec

from hicache_proto.api import ApiRequest
from hicache_proto.errors import ErrorBody
from hicache_proto.framing import check_depth


class ClientHello(msgspec.Struct, frozen=True, tag_field="type", tag="hello"):
    """First frame from the client."""

    protocol: int
    client: str = ""


class ServerHello(msgspec.Struct, frozen=True, tag_field="type", tag="hello"):
    """First frame from the sidecar; ``role`` is what the peer's uid may do."""

    protocol: int
    server: str = ""
    role: str = ""
    engine_id: str | None = None


class Request(msgspec.Struct, frozen=True, tag_field="type", tag="request", forbid_unknown_fields=True):
    """One request. ``body`` is a tagged map; unknown fields in it are refused."""

    id: int
    body: ApiRequest


class Progress(msgspec.Struct, frozen=True, tag_field="type", tag="progress"):
    """Where an operation stands (phase, operation id, blockers), or one event of a watch."""

    id: int
    data: dict[str, Any]


class Result(msgspec.Struct, frozen=True, tag_field="type", tag="result"):
    """The document, as the HTTP API would return it."""

    id: int
    document: Any


class Error(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    """The request failed. ``id`` is 0 when the frame could not be read far enough to know it."""

    id: int
    error: ErrorBody


ClientFrame = ClientHello | Request
ServerFrame = ServerHello | Progress | Result | Error

_encoder = msgspec.msgpack.Encoder()
_client_frames = msgspec.msgpack.Decoder(ClientFrame)
_server_frames = msgspec.msgpack.Decoder(ServerFrame)


def encode(frame: ClientFrame | ServerFrame) -> bytes:
    """Payload of one frame, without the length prefix (``framing.encode_frame`` adds it)."""
    return _encoder.encode(frame)


def decode_client_frame(payload: bytes) -> ClientFrame:
    """Decode what a client sent; depth is checked first.

    Raises:
        HicacheError, msgspec.MsgspecError: not a well-formed frame.
    """
    check_depth(payload)
    return _client_frames.decode(payload)


def decode_server_frame(payload: bytes) -> ServerFrame:
    """Decode what the sidecar sent."""
    check_depth(payload)
    return _server_frames.decode(payload)
