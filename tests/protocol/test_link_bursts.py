"""The hook link under random bursts in both directions at once: all arrives, in order, and nobody sleeps on data.

libzmq's descriptor is edge-triggered, and any call on the socket may eat the edge: a reader that does not drain until
EAGAIN, and look again after each send, sleeps for ever (F100).
"""

import random
import threading
from functools import partial

import pytest
import trio
import zmq
from tests.protocol.support import dealer

from hicache_proto.hooklink import Goodbye, Rehello, decode_from_sidecar, encode
from hicache_sidecar.engine.counters import Counters
from hicache_sidecar.engine.link import SEND_HWM, HookLink

# Messages in flight, drawn anew at each turn. Below the high-water mark: a full queue is an error by design. Small ones
# make both sides wait for each other, so that a lost edge stands (without the look after a send, 10 in 3000 messages).
WINDOWS = (2, 4, 4, 4, 16, SEND_HWM // 2)
BURST = 60
TURN_MS = 20  # how long the peer waits for something to read before it looks at its own window again
STUCK_S = 60.0


class Peer:
    """A hook in a thread of its own: bursts of numbered words, and receiving in between, in random order."""

    def __init__(self, sock: "zmq.Socket[bytes]", total: int, acknowledged: "Tally") -> None:
        self.sock, self.total, self.acknowledged = sock, total, acknowledged
        self.sent = self.received = 0

    def run(self) -> None:
        rng = random.Random(100)
        told = 0
        while self.sent < self.total or told < self.total:
            room = min(self.total, self.acknowledged.value + rng.choice(WINDOWS)) - self.sent
            for _ in range(min(room, rng.randrange(BURST))):
                self._say(self.sent)
                self.sent += 1
                told = self.received
            for _ in range(rng.randrange(BURST)):
                if not self._take():
                    break
            if room <= 0:
                if self.received > told:  # nothing of its own to say, and the other side waits for the count
                    told = self.received
                    self._say(self.total)
                self.sock.poll(TURN_MS)

    def _say(self, number: int) -> None:
        # Which message it is (``total``: none, just the count), and how many of the other side's have arrived here.
        self.sock.send(encode(Goodbye(session="s1", reason=f"{number} {self.received}")))

    def _take(self) -> bool:
        try:
            message = decode_from_sidecar(self.sock.recv(zmq.DONTWAIT))
        except zmq.Again:
            return False
        assert isinstance(message, Rehello)
        assert message.session == str(self.received)
        self.received += 1
        return True


class Tally:
    """A number that one thread writes and another reads."""

    value = 0


async def exchange(where_root, total: int) -> HookLink:
    """``total`` messages each way over a fresh link."""
    rng = random.Random(7)
    link, heard, arrived, news = HookLink(Counters()), Tally(), Tally(), trio.lowlevel.ParkingLot()
    peers: list[bytes] = []
    sent = 0

    def say() -> None:
        nonlocal sent
        link.send(peers[0], Rehello(session=str(sent)))
        sent += 1

    def take(peer: bytes, message: object) -> None:
        assert isinstance(message, Goodbye)
        number, arrived.value = map(int, message.reason.split())
        if number < total:
            assert number == heard.value
            heard.value += 1
        peers[:] = [peer]
        if sent < total and sent - arrived.value < WINDOWS[-1] and rng.random() < 0.3:
            say()  # a send between two receives eats the edge of the third
        news.unpark_all()

    link.on_message = take
    async with trio.open_nursery() as nursery:
        where = await nursery.start(partial(link.serve, where_root / "hooks.sock"))
        with dealer(where) as sock, trio.fail_after(STUCK_S * 4):
            peer = Peer(sock, total, heard)
            thread = threading.Thread(target=peer.run, daemon=True)
            thread.start()
            while min(sent, heard.value, arrived.value) < total:
                room = min(total, arrived.value + rng.choice(WINDOWS)) - sent if peers else 0
                for _ in range(min(room, rng.randrange(BURST))):
                    say()
                if room > 0:
                    await trio.lowlevel.checkpoint()
                elif min(heard.value, arrived.value) < total:
                    await news.park()
            await trio.to_thread.run_sync(thread.join, STUCK_S)
            assert (peer.sent, peer.received, sent) == (total, total, total)
        nursery.cancel_scope.cancel()
    return link


@pytest.mark.parametrize("total", [5_000, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
async def test_random_bursts_both_ways(tmp_path, total):
    """F100: all delivered, and no message lay in the queue until the look that heals a lost wake-up."""
    link = await exchange(tmp_path, total)
    assert link.counters.link_received >= total
    assert link.counters.malformed == 0
    assert link.counters.send_failures == 0
    assert link.counters.missed_wakeups == 0
