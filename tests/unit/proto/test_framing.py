"""Frames: limits that hold before anything is decoded, and a depth walk that agrees with a plain reader."""

import random
import struct
import time
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.unit.proto.reference import Malformed, TooDeep, depth_of

from hicache_proto import control, hooklink
from hicache_proto.errors import HicacheError, InvalidRequest, TooLarge
from hicache_proto.framing import HEADER, MAX_DEPTH, MAX_FRAME_BYTES, check_depth, encode_frame, frame_length
from hicache_proto.hooklink import UNWALKED_CONTAINERS, Heartbeat, decode_from_hook, encode
from hicache_proto.model import MANDATORY_COUNTERS, IdleReport, OpUsage, RankReport, ThreadReport

pack = msgspec.msgpack.encode


def nested(depth: int, inner: Any = None) -> Any:
    for level in range(depth):
        inner = [inner] if level % 2 else {"k": inner}
    return inner


def test_a_frame_is_length_and_payload() -> None:
    assert encode_frame(b"\x80") == b"\x00\x00\x00\x01\x80"
    assert frame_length(b"\x00\x00\x00\x01") == 1


def test_the_size_limit_holds_on_both_sides() -> None:
    """F95: a huge length is refused from the header alone."""
    whole = b"x" * MAX_FRAME_BYTES
    assert frame_length(encode_frame(whole)[:4]) == MAX_FRAME_BYTES
    with pytest.raises(TooLarge):
        encode_frame(whole + b"x")
    for length in (MAX_FRAME_BYTES + 1, 0xFFFFFFFF, 0x80000000):
        with pytest.raises(TooLarge):
            frame_length(HEADER.pack(length))
    with pytest.raises(InvalidRequest):
        frame_length(b"\0\0\0\0")


@pytest.mark.parametrize("depth", [1, 31, 32])
def test_allowed_depths_pass(depth: int) -> None:
    check_depth(pack(nested(depth)))
    check_depth(pack([nested(depth - 1), *range(500), "text" * 50, *[{}] * 40]))


@pytest.mark.parametrize("depth", [33, 34, 1000, 100_000])
def test_deeper_messages_are_refused(depth: int) -> None:
    deep = b"\x91" * depth + b"\x00"
    with pytest.raises(InvalidRequest, match="deeper than 32"):
        check_depth(deep)
    with pytest.raises(InvalidRequest, match="deeper than 32"):
        check_depth(b"\xdd\x00\x00\x00\x64" + b"\x80" * 99 + deep)  # the deep part comes last


def test_an_own_limit() -> None:
    check_depth(pack(nested(3)), 3)
    with pytest.raises(InvalidRequest):
        check_depth(pack(nested(4)), 3)


leaves = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=40)
    | st.binary(max_size=300) | st.builds(msgspec.msgpack.Ext, st.integers(-128, 127), st.binary(max_size=40))
)  # fmt: skip
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=5), inner, max_size=20)
)


@given(value=values, wrap=st.integers(0, 40))
@settings(deadline=None, max_examples=150)
def test_the_walk_agrees_with_a_plain_reader_on_real_messages(value: Any, wrap: int) -> None:
    for _ in range(wrap):
        value = [value]
    message = pack(value)
    try:
        depth_of(message, MAX_DEPTH)
    except TooDeep:
        with pytest.raises(InvalidRequest):
            check_depth(message)
    else:
        check_depth(message)


@given(value=values, edits=st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), max_size=4))
@settings(deadline=None, max_examples=150)
@example(value=[[]] * 40, edits=[(0, 0xDF)])
def test_the_walk_agrees_with_a_plain_reader_on_damaged_messages(value: Any, edits: list[tuple[int, int]]) -> None:
    """Too deep is always refused; what both call whole passes; the rest is refused by walk or decoder."""
    damaged = bytearray(pack(value))
    for place, byte in edits:
        damaged[place % len(damaged)] = byte
    message = bytes(damaged)
    try:
        depth_of(message, MAX_DEPTH)
    except TooDeep:
        with pytest.raises(InvalidRequest):
            check_depth(message)
    except Malformed:
        with pytest.raises((InvalidRequest, msgspec.MsgspecError)):
            check_depth(message)
            msgspec.msgpack.decode(message)
    else:
        check_depth(message)


def fuzz(count: int) -> list[bytes]:
    """Random bytes, random bytes that begin like a message, damaged and cut real frames. Seeded: a failure repeats."""
    rng = random.Random(20)
    real = [
        control.encode(control.ClientHello(protocol=1)),
        control.encode(control.Progress(id=3, data={"phase": "commit", "ranks": [1, 2, {"a": None}]})),
        pack({"type": "request", "id": 1, "body": {"type": "attach", "hicache_storage_backend": "file", "swap": True}}),
        hooklink.encode(hooklink.Heartbeat(session="s", report=hooklink.RankReport())),
        hooklink.encode(hooklink.Call("s", 1, "prepare", 2, hooklink.Prepare(hooklink.TargetState("file"), 30.0))),
    ]
    frames = []
    for number in range(count):
        kind = number % 4
        if kind == 0:
            frames.append(rng.randbytes(rng.randrange(1, 200)))
        elif kind == 1:
            frames.append(
                bytes([rng.choice([0x81, 0x82, 0x8F, 0xDE, 0xDF, 0x9F, 0xDD])]) + rng.randbytes(rng.randrange(80))
            )
        elif kind == 2:
            base = bytearray(rng.choice(real))
            for _ in range(rng.randrange(1, 5)):
                base[rng.randrange(len(base))] = rng.randrange(256)
            frames.append(bytes(base))
        else:
            base = rng.choice(real)
            frames.append(base[: rng.randrange(len(base))] or b"\x00")
    return frames


def test_ten_thousand_fuzzed_frames_raise_only_what_callers_catch() -> None:
    """F95: random bytes on either link are dropped and counted; nothing else comes out of the decoders."""
    decoders = (
        control.decode_client_frame, control.decode_server_frame, hooklink.decode_from_hook,
        hooklink.decode_from_sidecar,
    )  # fmt: skip
    refused = 0
    for frame in fuzz(10_000):
        for decode in decoders:
            try:
                decode(frame)
            except (HicacheError, msgspec.MsgspecError):
                refused += 1
    assert refused > 30_000  # the fuzz is not made of valid frames


@given(st.binary(max_size=600))
@settings(deadline=None, max_examples=500)
def test_any_bytes_raise_only_what_callers_catch(data: bytes) -> None:
    for decode in (control.decode_client_frame, hooklink.decode_from_hook):
        try:
            decode(data)
        except (HicacheError, msgspec.MsgspecError):
            continue


@pytest.mark.parametrize("filler", [b"\x90", b"\x91\x00", b"\x81\x00\x00", b"\xa1\x95"])
def test_a_full_frame_of_tiny_elements_does_not_hold_the_loop(filler: bytes) -> None:
    """1 MiB of empty arrays took the walk 1.6 s; the bound on elements refuses it early."""
    count = (MAX_FRAME_BYTES - 5) // len(filler)
    hostile = b"\xdd" + struct.pack(">I", count) + filler * count
    begun = time.process_time()
    with pytest.raises(InvalidRequest, match="strings and containers"):
        check_depth(hostile)
    assert time.process_time() - begun < 1.0


@pytest.mark.parametrize("levels", [1, MAX_DEPTH, 200, UNWALKED_CONTAINERS, UNWALKED_CONTAINERS + 1, 2000, 1_000_000])
def test_nesting_on_the_rank_link_ends_one_way_or_the_other(levels: int) -> None:
    """F95: a rank's message with few containers is not walked; the decoder's own limit ends what is left."""
    heartbeat = b"\x83\xa4type\xa9heartbeat\xa7session\xa1x\xa1z" + b"\x91" * levels + b"\xc0"
    with pytest.raises((InvalidRequest, msgspec.MsgspecError, RecursionError)):  # it has no report either
        decode_from_hook(heartbeat)


def test_an_honest_report_is_not_walked() -> None:
    """Eight threads, five kinds of calls and every counter: walking it cost 0.4 ms, decoding 0.013 ms."""
    report = RankReport(
        idle=IdleReport(counters=dict.fromkeys(MANDATORY_COUNTERS, 3)),
        usage={f"call {kind}": OpUsage(hit=300) for kind in range(5)},
        threads=[ThreadReport(name=f"hicache-file-1-prefetch-{i}") for i in range(8)],
    )
    frame = encode(Heartbeat(session="s", report=report))
    openers = len(frame) - len(frame.translate(None, bytes(range(0x80, 0xA0)) + b"\xdc\xdd\xde\xdf"))
    assert MAX_DEPTH < openers < UNWALKED_CONTAINERS / 4
    assert decode_from_hook(frame) == Heartbeat(session="s", report=report)
