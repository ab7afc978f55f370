"""The hook link on its own: hostile bytes, lost wake-ups, cancelled callers, dead peers."""

import os
import pickle
import random
import subprocess
import sys
import textwrap
import threading
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio
import zmq
from tests.protocol.support import WAIT_S, dealer, receive

from hicache_proto.hooklink import (
    Answer,
    AskReport,
    Call,
    Heartbeat,
    Validate,
    Welcome,
    decode_from_sidecar,
    encode,
)
from hicache_proto.model import RankReport, TargetState
from hicache_sidecar.engine.counters import Counters
from hicache_sidecar.engine.link import HookLink, SessionLost

REPORT = RankReport()


@asynccontextmanager
async def linked(tmp_path, **options):
    """A bound link without a registry; sessions are routed by hello."""
    link = HookLink(Counters(), **options)
    link.on_message = lambda peer, message: link.route(message.session, peer)
    async with trio.open_nursery() as nursery:
        where = await nursery.start(partial(link.serve, tmp_path / "hooks.sock"))
        yield link, where
        nursery.cancel_scope.cancel()


async def until(what, within_s=WAIT_S):
    """The link has no registry here: look at each turn of the loop, with an end."""
    with trio.fail_after(within_s):
        while not what():  # noqa: ASYNC110 - nothing to wait on without a registry
            await trio.sleep(0.005)  # pace of a poll


async def introduce(link, sock, session="s1"):
    sock.send(encode(Heartbeat(session=session, report=REPORT)))
    await until(lambda: session in link._peers)


def reply(asked: Call, **changes):
    fields = {"session": asked.session, "n": asked.n, "phase": asked.phase, "call": asked.call, "ok": True}
    return encode(Answer(report=REPORT, **(fields | changes)))


async def test_call_gets_its_answer(tmp_path):
    """The plain case, and answers out of order."""
    async with linked(tmp_path) as (link, where):
        with dealer(where) as sock:
            await introduce(link, sock)
            got = {}

            async def ask(n):
                got[n] = await link.call("s1", n, AskReport(), trio.current_time() + WAIT_S)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask, 1)
                nursery.start_soon(ask, 2)
                calls = [await receive(sock), await receive(sock)]
                for call in reversed(calls):
                    sock.send(reply(call))
            assert {n: a.n for n, a in got.items()} == {1: 1, 2: 2}
            assert link.waiting == 0


@pytest.mark.parametrize(
    "wrong", [{"session": "other"}, {"n": 8}, {"phase": "commit"}, {"call": 10_000}], ids=lambda w: next(iter(w))
)
async def test_answer_must_match_everything(tmp_path, wrong):
    """F31: an answer with another session, n, phase or call is dropped and counted, and wakes nobody."""
    async with linked(tmp_path) as (link, where):
        with dealer(where) as sock:
            await introduce(link, sock)

            async def ask():
                answer = await link.call("s1", 7, AskReport(), trio.current_time() + WAIT_S)
                assert answer.data == {"right": True}

            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask)
                call = await receive(sock)
                sock.send(reply(call, **wrong))
                await until(lambda: link.counters.stale_replies == 1)
                assert link.waiting == 1
                sock.send(reply(call, data={"right": True}))


async def test_hostile_bytes_are_dropped_and_counted(tmp_path):
    """F95: pickles, random bytes, wrong shapes, deep nests and 10 000 fuzz frames: counted; the link goes on."""
    rng = random.Random(95)
    valid = encode(Heartbeat(session="s1", report=REPORT))
    frames = [pickle.dumps({"a": 1}), b"", b"\xff" * 40, b"\x91" * 5000 + b"\x00", encode(Welcome("s1", 1)), valid[:-1]]
    while len(frames) < 10_000:
        if rng.random() < 0.5:
            frames.append(rng.randbytes(rng.randrange(200)))
        else:
            bad = bytearray(valid)
            bad[0] = 0xC1  # a type byte that msgpack never uses
            bad[rng.randrange(1, len(bad))] = rng.randrange(256)
            frames.append(bytes(bad))
    async with linked(tmp_path) as (link, where):
        with dealer(where) as sock:

            def flood():
                for frame in frames:
                    sock.send(frame)
                sock.send_multipart([b"three", b"parts", b"here"])

            await trio.to_thread.run_sync(flood)
            await until(lambda: link.counters.malformed + link.counters.link_received == len(frames) + 1)
            assert link.counters.malformed > 0.99 * len(frames)
            await introduce(link, sock)


async def test_oversize_message_never_arrives(tmp_path):
    """F95: a message over the limit costs the peer its connection, and us no memory."""
    async with linked(tmp_path) as (link, where):
        with dealer(where) as sock:
            sock.send(b"\x00" * (3 << 20))
            with dealer(where) as other:
                await introduce(link, other)
            assert link.counters.malformed == 0


async def test_swallowed_wakeup_heals(tmp_path):
    """F104: the descriptor's wake-up is swallowed once: found by the look at EVENTS within 1 s, and counted."""
    swallowed = []

    async def lossy(fd):
        await trio.lowlevel.wait_readable(fd)
        if armed and not swallowed:
            swallowed.append(fd)
            await trio.sleep_forever()

    armed = []
    async with linked(tmp_path, wait_readable=lossy) as (link, where):
        with dealer(where) as sock:
            await introduce(link, sock)
            received = link.counters.link_received
            armed.append(True)
            at = trio.current_time()
            sock.send(encode(Heartbeat(session="s1", report=REPORT)))
            await until(lambda: link.counters.link_received > received)
            assert swallowed
            assert trio.current_time() - at < 1.0
            assert link.counters.missed_wakeups == 1


async def test_sender_and_receiver_do_not_hang(tmp_path):
    """F104: many callers at once; the send eats edges all the time (a naive reader stops after some thousand)."""
    async with linked(tmp_path) as (link, where):
        with dealer(where) as sock:
            await introduce(link, sock)
            total = 4000

            def echo():
                for _ in range(total):
                    sock.send(reply(decode_from_sidecar(sock.recv())))

            async def many(count):
                for _ in range(count):
                    await link.call("s1", 0, AskReport(), trio.current_time() + WAIT_S)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.to_thread.run_sync, echo)
                for _ in range(40):
                    nursery.start_soon(many, total // 40)
            assert link.waiting == 0
            assert link.counters.missed_wakeups == 0


async def test_cancelled_callers_leak_nothing(tmp_path):
    """Cancelled at random moments: no waiter is left, every late answer is counted, no other caller is hurt."""
    async with linked(tmp_path) as (link, where):
        with dealer(where) as sock:
            await introduce(link, sock)
            total, rng = 300, random.Random(7)
            cancelled, finished = [], threading.Event()
            sock.setsockopt(zmq.RCVTIMEO, 200)

            def echo():
                while True:
                    try:
                        sock.send(reply(decode_from_sidecar(sock.recv())))
                    except zmq.Again:
                        if finished.is_set():  # some callers were cancelled before they sent
                            return

            async def one(wait_s):
                with trio.move_on_after(wait_s) as scope:
                    await link.call("s1", 0, AskReport(), trio.current_time() + WAIT_S)
                if scope.cancelled_caught:
                    cancelled.append(1)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.to_thread.run_sync, echo)
                async with trio.open_nursery() as callers:
                    for index in range(total):
                        callers.start_soon(one, rng.random() * 0.004 if index % 2 else WAIT_S)
                        if index % 20 == 0:
                            await trio.lowlevel.checkpoint()
                finished.set()
            assert link.waiting == 0
            await until(lambda: link.counters.link_received == link.counters.link_sent + 1)
            # An answer that came in the same turn as the cancel belongs to its caller, and is not counted.
            assert 0 < link.counters.stale_replies <= len(cancelled) <= total // 2


async def test_deadline_and_lost_session(tmp_path):
    """No answer by the deadline is TooSlowError; a forgotten session fails all its callers at once."""
    async with linked(tmp_path) as (link, where):
        with dealer(where) as sock:
            await introduce(link, sock)
            with pytest.raises(trio.TooSlowError):
                await link.call("s1", 1, AskReport(), trio.current_time() + 0.05)
            failed = []

            async def ask():
                with pytest.raises(SessionLost, match="gone away"):
                    await link.call("s1", 1, AskReport(), trio.current_time() + WAIT_S)
                failed.append(1)

            async with trio.open_nursery() as nursery:
                for _ in range(5):
                    nursery.start_soon(ask)
                await until(lambda: link.waiting == 5)
                link.forget("s1", "gone away")
            assert len(failed) == 5
            with pytest.raises(SessionLost):
                await link.call("s1", 1, AskReport(), trio.current_time() + WAIT_S)


async def test_peer_that_does_not_read(tmp_path):
    """A full queue is an error for the caller, never a block of the loop; closing does not wait for it (F103)."""
    async with linked(tmp_path) as (link, where):
        with dealer(where) as sock:
            sock.setsockopt(zmq.RCVHWM, 1)
            await introduce(link, sock)
            big = Validate(target=TargetState(extra_config="x" * 60_000))
            with pytest.raises(SessionLost, match="does not read"):
                for n in range(5000):
                    link.send(link._peers["s1"], Call("s1", n, "validate", n, big))
            assert link.counters.send_failures == 1
            closing = trio.current_time()
    assert trio.current_time() - closing < 2.0


def test_shutdown_with_unsent_messages(tmp_path):
    """F103: a thousand unsent messages to a stopped peer, SIGTERM: exit code 0 in less than 2 s."""
    program = textwrap.dedent(
        """
        import os, signal, sys
        from functools import partial
        from pathlib import Path
        import trio
        from hicache_proto.hooklink import Call, Validate
        from hicache_proto.model import TargetState
        from hicache_sidecar.engine.counters import Counters
        from hicache_sidecar.engine.link import HookLink, SessionLost

        async def main():
            link = HookLink(Counters())
            link.on_message = lambda peer, m: link.route(m.session, peer)
            with trio.open_signal_receiver(signal.SIGTERM) as signals:
                async with trio.open_nursery() as nursery:
                    await nursery.start(partial(link.serve, Path(sys.argv[1])))
                    print("bound", flush=True)
                    while not link._peers:
                        await trio.sleep(0.01)
                    sent = 0
                    try:
                        for n in range(5000):
                            body = Validate(target=TargetState(extra_config="x" * 20000))
                            link.send(link._peers["s1"], Call("s1", n, "validate", n, body))
                            sent += 1
                    except SessionLost:
                        pass
                    print(sent, flush=True)
                    async for _ in signals:
                        nursery.cancel_scope.cancel()
                        break

        trio.run(main)
        """
    )
    path = tmp_path / "hooks.sock"
    process = subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "bound\n"
        with dealer(f"ipc://{path}") as sock:
            sock.setsockopt(zmq.RCVHWM, 1)
            sock.send(encode(Heartbeat(session="s1", report=REPORT)))
            assert int(process.stdout.readline()) >= 1000
            process.terminate()
            assert process.wait(2.0) == 0
    finally:
        if process.poll() is None:
            process.kill()
        process.stdout.close()
        process.wait()


async def test_socket_mode_and_stale_file(tmp_path):
    """F102: a stale socket file does not block; the socket has its own mode from the first moment."""
    (tmp_path / "hooks.sock").touch(mode=0o777)
    async with linked(tmp_path) as (link, where):
        assert (tmp_path / "hooks.sock").stat().st_mode & 0o777 == 0o600
        with dealer(where) as sock:
            await introduce(link, sock)
    assert not (tmp_path / "hooks.sock").exists()


async def test_bind_failure_is_an_os_error(tmp_path):
    """A path over the system's limit is a clear error, and leaves nothing behind."""
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="cannot bind"):
        await HookLink(Counters()).serve(deep / "hooks.sock")
    assert len(os.listdir("/proc/self/fd")) <= before + 1
