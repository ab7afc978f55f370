"""sd_notify: fields, the watchdog from the loop, one-line status (F108)."""

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
import trio.testing

from hicache_sidecar.daemon.notify import MAX_STATUS_CHARS, Notifier, one_line


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.setblocking(False)
        yield sock


def received(manager: socket.socket) -> list[str]:
    found = []
    while True:
        try:
            found.append(manager.recv(4096).decode())
        except BlockingIOError:
            return found


def environ(manager: socket.socket, **more: str) -> dict[str, str]:
    return {"NOTIFY_SOCKET": manager.getsockname(), **more}


def test_ready_status_stopping(manager: socket.socket) -> None:
    notifier = Notifier(environ(manager))
    notifier.ready()
    notifier.status("ranks 2/2, backend evil\nREADY=0\x00")
    notifier.status("ranks 2/2, backend evil\nREADY=0\x00")
    notifier.stopping()
    notifier.close()
    assert received(manager) == ["READY=1", "STATUS=ranks 2/2, backend evil READY=0 ", "STOPPING=1"]


def test_reload_names_the_clock(manager: socket.socket) -> None:
    notifier = Notifier(environ(manager))
    before = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    notifier.reloading()
    notifier.close()
    first, second = received(manager)[0].split("\n")
    assert first == "RELOADING=1"
    assert int(second.removeprefix("MONOTONIC_USEC=")) >= before


def test_status_is_bounded() -> None:
    assert len(one_line("x" * 5000)) == MAX_STATUS_CHARS


def test_abstract_address() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        name = f"\0hicache-notify-{os.getpid()}"
        sock.bind(name)
        sock.setblocking(False)
        notifier = Notifier({"NOTIFY_SOCKET": "@" + name[1:]})
        notifier.ready()
        notifier.close()
        assert received(sock) == ["READY=1"]


@pytest.mark.parametrize("address", ["", "relative", "/nowhere/notify"])
def test_without_a_manager_nothing_happens(address: str) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": address})
    notifier.ready()
    notifier.close()


async def test_watchdog_pings_at_half_the_interval(
    manager: socket.socket, autojump_clock: trio.testing.MockClock
) -> None:
    notifier = Notifier(environ(manager, WATCHDOG_USEC="4000000", WATCHDOG_PID=str(os.getpid())))
    with trio.move_on_after(11):
        await notifier.watchdog()
    assert received(manager) == ["WATCHDOG=1"] * 6  # at 0, 2, 4, 6, 8, 10 s
    notifier.close()


async def test_blocked_loop_sends_no_ping(manager: socket.socket) -> None:
    """F108: the ping comes from the loop that does the work; a loop that stands still sends none."""
    notifier = Notifier(environ(manager, WATCHDOG_USEC="20000"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(notifier.watchdog)
        await trio.testing.wait_all_tasks_blocked()
        received(manager)
        time.sleep(0.1)  # noqa: ASYNC251 - blocks the loop for five intervals
        assert received(manager) == []
        nursery.cancel_scope.cancel()
    notifier.close()


@pytest.mark.parametrize(
    "more", [{}, {"WATCHDOG_USEC": "0"}, {"WATCHDOG_USEC": "x"}, {"WATCHDOG_USEC": "4000000", "WATCHDOG_PID": "1"}]
)
async def test_nobody_watches(more: dict[str, str], manager: socket.socket) -> None:
    """F108: WATCHDOG_PID of another process is honoured."""
    notifier = Notifier(environ(manager, **more))
    with trio.fail_after(1):
        await notifier.watchdog()
    assert received(manager) == []
    notifier.close()
