"""The wake-up of a sleeping SGLang scheduler: an eventfd in its own ZMQ poller."""

import threading
import time

import pytest
import zmq

from hicache_hooks.sglang.wake import PULSE_S, Pulse, Waker

LONG_MS = 10_000


class Sleeper:
    """The engine's ``IdleSleeper`` as far as it is used."""

    def __init__(self) -> None:
        self.poller = zmq.Poller()


def test_a_wake_ends_the_poll_and_is_forgotten_once() -> None:
    sleeper = Sleeper()
    waker = Waker(sleeper)
    threading.Timer(0.05, waker.wake).start()
    assert sleeper.poller.poll(LONG_MS)
    deadline = time.monotonic() + 10
    while sleeper.poller.poll(0):  # the flag follows the write
        waker.clear()
        assert time.monotonic() < deadline, "the descriptor stays readable"
    waker.wake()
    waker.wake()
    assert sleeper.poller.poll(0)
    waker.clear()
    assert sleeper.poller.poll(0) == []


@pytest.mark.parametrize("sleeper", [None, object()])
def test_a_spinning_scheduler_needs_none(sleeper: object) -> None:
    """Without ``--sleep-on-idle``, or with the Rust server's sleeper, which has no poller."""
    waker = Waker(sleeper)
    assert not waker.sleeps
    waker.wake()
    waker.clear()


def test_no_wake_is_lost_when_two_threads_meet() -> None:
    """The poller must never stay readable for good (it would spin), and no wake may be lost."""
    sleeper = Sleeper()
    waker = Waker(sleeper)
    wakes = 2000
    seen = threading.Event()

    def wake() -> None:
        for _ in range(wakes):
            seen.clear()
            waker.wake()
            assert seen.wait(10), "a wake was lost"

    thread = threading.Thread(target=wake)
    thread.start()
    while thread.is_alive():
        if sleeper.poller.poll(200):
            waker.clear()
            seen.set()
    thread.join()
    waker.clear()
    assert sleeper.poller.poll(0) == []


def test_the_pulse_goes_on_while_wanted() -> None:
    """A rank that is not the leader needs passes while an operation is open."""
    sleeper = Sleeper()
    waker = Waker(sleeper)
    wanted = threading.Event()
    pulse = Pulse(waker, wanted.is_set)
    pulse.start()
    assert sleeper.poller.poll(50) == []
    wanted.set()
    pulse.kick()
    for _ in range(3):
        assert sleeper.poller.poll(LONG_MS)
        waker.clear()
    wanted.clear()
    deadline = time.monotonic() + 10
    while sleeper.poller.poll(100):
        waker.clear()
        assert time.monotonic() < deadline, "the pulse does not end"


class Wakes(Waker):
    """Counts."""

    def __init__(self, enough: int) -> None:
        super().__init__(Sleeper())
        self.enough, self.over = enough, threading.Event()

    def wake(self) -> None:
        self.enough -= 1
        if self.enough == 0:
            self.over.set()


def test_the_pulse_slows_down_where_only_patience_is_needed() -> None:
    """Each pass of an idle world is a round of collectives: a backend that takes seconds must not cost hundreds."""
    passes = 4
    waker = Wakes(passes)
    pulse = Pulse(waker, lambda: True, patient=lambda: True)
    pulse.start()
    began = time.monotonic()
    pulse.kick()
    assert waker.over.wait(LONG_MS / 1000)
    assert time.monotonic() - began >= PULSE_S * (2**passes - 1) * 0.9
