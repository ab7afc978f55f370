"""Versions, errors and round trips of every message on both links."""

from typing import Any, Literal, get_args, get_origin

import msgspec
import pytest

from hicache_proto import api, control, errors, hooklink, model
from hicache_proto.version import PROTOCOL_VERSION, negotiate


@pytest.mark.parametrize(("peer", "own", "spoken"), [(1, 1, 1), (0, 1, 0), (4, 5, 4), (5, 5, 5)])
def test_the_same_version_and_one_older_are_understood(peer: int, own: int, spoken: int) -> None:
    assert negotiate(peer, own) == spoken


@pytest.mark.parametrize(("peer", "own"), [(2, 1), (3, 5), (6, 5), (-1, 1), (2**63, 1)])
def test_other_versions_are_refused_by_number(peer: int, own: int) -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        negotiate(peer, own)
    assert str(peer) in caught.value.message
    assert str(own) in caught.value.message
    assert caught.value.details == {"reason": "protocol_version", "peer": peer, "own": own}
    assert caught.value.hint


def test_the_version_is_a_small_number() -> None:
    assert negotiate(PROTOCOL_VERSION) == PROTOCOL_VERSION >= 1


@pytest.mark.parametrize("code", errors.ERRORS)
def test_an_error_survives_the_wire(code: str) -> None:
    sent = errors.ERRORS[code](
        "what went wrong", details={"reason": "x", "n": [1]}, operation_id="op-1", hint="do this"
    )
    body = msgspec.msgpack.decode(msgspec.msgpack.encode(sent.body()), type=errors.ErrorBody)
    got = errors.from_body(body)
    assert type(got) is type(sent)
    assert (got.message, got.details, got.operation_id, got.hint) == (
        sent.message, sent.details, sent.operation_id, sent.hint,
    )  # fmt: skip
    assert got.body() == body


def test_an_unknown_code_becomes_internal_and_keeps_its_message() -> None:
    got = errors.from_body(errors.ErrorBody(code="from_the_future", message="something new", operation_id="op-2"))
    assert type(got) is errors.Internal
    assert (got.message, got.operation_id) == ("something new", "op-2")


def test_what_can_be_tried_again_stays_so_on_its_way() -> None:
    """F6: a full disk is ``internal`` by code, and worth another try; each hop used to make it permanent."""
    got = errors.from_body(errors.ErrorBody(code="internal", message="the disk is full", retryable=True))
    assert got.retryable
    assert got.body().retryable
    assert not errors.Internal("x").retryable


def test_an_error_does_not_share_its_callers_details() -> None:
    details: dict[str, Any] = {"a": 1}
    error = errors.NotIdle("x", details=details)
    details["b"] = 2
    assert error.details == {"a": 1}


def test_error_bodies_always_carry_every_field() -> None:
    """interface.md: {code, message, retryable, hint, operation_id, details}, also when empty."""
    raw = msgspec.json.decode(msgspec.json.encode(api.ErrorDocument(errors.NotFound("x").body())))
    assert set(raw["error"]) == {"code", "message", "retryable", "hint", "operation_id", "details"}


def example(kind: Any) -> Any:
    """A value of a field's type, different from the usual defaults."""
    if kind is Any:
        return {"free": [1, "two", None]}
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return build(kind)
    if isinstance(kind, type) and issubclass(kind, str) and kind is not str:
        return next(iter(kind))  # type: ignore[call-overload]
    simple = {str: "text", int: 7, float: 2.5, bool: True}
    if kind in simple:
        return simple[kind]
    arguments = get_args(kind)
    if hasattr(kind, "__metadata__"):  # Annotated
        return example(kind.__origin__)
    if get_origin(kind) is Literal:
        return arguments[-1]
    origin = getattr(kind, "__origin__", None)
    if origin is list:
        return [example(arguments[0])]
    if origin is tuple:
        return tuple(example(argument) for argument in arguments if argument is not ...)
    if origin is dict:
        return {"key": example(arguments[1])}
    some = [argument for argument in arguments if argument is not type(None)]
    assert some, f"no example for {kind!r}"
    return example(some[-1])


def build(cls: type[msgspec.Struct]) -> msgspec.Struct:
    return cls(**{field.name: example(field.type) for field in msgspec.structs.fields(cls)})


@pytest.mark.parametrize("body", get_args(api.ApiRequest), ids=lambda cls: cls.__name__)
def test_requests_round_trip_with_every_field_set(body: type[msgspec.Struct]) -> None:
    frame = control.Request(id=9, body=build(body))  # type: ignore[arg-type]
    assert control.decode_client_frame(control.encode(frame)) == frame


@pytest.mark.parametrize("cls", get_args(control.ServerFrame), ids=lambda cls: cls.__name__)
def test_server_frames_round_trip(cls: type[msgspec.Struct]) -> None:
    frame: Any = build(cls)
    assert control.decode_server_frame(control.encode(frame)) == frame


@pytest.mark.parametrize("cls", get_args(hooklink.HookMessage), ids=lambda cls: cls.__name__)
def test_messages_of_a_rank_round_trip(cls: type[msgspec.Struct]) -> None:
    message: Any = build(cls)
    assert hooklink.decode_from_hook(hooklink.encode(message)) == message


@pytest.mark.parametrize("body", get_args(hooklink.CallBody), ids=lambda cls: cls.__name__)
def test_calls_round_trip_and_name_their_phase(body: type[msgspec.Struct]) -> None:
    made: Any = build(body)
    call = hooklink.Call(session="s", n=3, phase=hooklink.phase_of(made), call=4, body=made)
    assert hooklink.decode_from_sidecar(hooklink.encode(call)) == call


@pytest.mark.parametrize("cls", [hooklink.Welcome, hooklink.Refused, hooklink.Rehello])
def test_other_messages_of_the_sidecar_round_trip(cls: type[msgspec.Struct]) -> None:
    message: Any = build(cls)
    assert hooklink.decode_from_sidecar(hooklink.encode(message)) == message


@pytest.mark.parametrize("cls", get_args(api.Document), ids=lambda cls: cls.__name__)
def test_documents_survive_the_socket_as_they_are_over_http(cls: type[msgspec.Struct]) -> None:
    """One document, two transports: the map on the socket is the JSON of the HTTP API."""
    document = build(cls)
    frame = control.decode_server_frame(control.encode(control.Result(id=1, document=document)))
    assert isinstance(frame, control.Result)
    assert frame.document == msgspec.json.decode(msgspec.json.encode(document))
    assert msgspec.convert(frame.document, cls) == document


@pytest.mark.parametrize(
    "body",
    [
        {"type": "attach", "hicache_storage_backend": "file", "unknown": 1},
        {"type": "attach"},
        {"type": "attach", "hicache_storage_backend": 7},
        {"type": "attach", "hicache_storage_backend": "file", "swap": "yes"},
        {"type": "policy", "knobs": {"prefetch_threshold": "64"}},
        {"type": "no_such_request"},
        {},
        [],
        "attach",
    ],
)
def test_requests_of_a_wrong_shape_are_refused(body: object) -> None:
    with pytest.raises(msgspec.ValidationError):
        control.decode_client_frame(msgspec.msgpack.encode({"type": "request", "id": 1, "body": body}))


def test_a_newer_hook_may_add_fields() -> None:
    """A peer one version apart is understood: fields that this side does not know are skipped on the hook link."""
    raw = msgspec.to_builtins(hooklink.Heartbeat(session="s", report=model.RankReport())) | {"added_later": 1}
    assert isinstance(hooklink.decode_from_hook(msgspec.msgpack.encode(raw)), hooklink.Heartbeat)


def test_a_link_message_over_the_limit_is_refused() -> None:
    with pytest.raises(msgspec.DecodeError):
        hooklink.decode_from_hook(b"\x00" * (hooklink.MAX_LINK_BYTES + 1))


def test_flat_ranks_follow_the_contract() -> None:
    """rank = (dp * pp_size + pp) * tp_size + tp: a bijection onto 0 .. size-1."""
    sizes = {"dp_size": 2, "pp_size": 3, "tp_size": 4}
    ranks = [
        model.RankIdentity(dp_rank=dp, pp_rank=pp, tp_rank=tp, **sizes)
        for dp in range(2)
        for pp in range(3)
        for tp in range(4)
    ]
    assert [identity.rank for identity in ranks] == list(range(24))
    assert {identity.size for identity in ranks} == {24}
    assert [identity.rank for identity in ranks if identity.leader] == [0, 12]
