"""sd_notify(3) in our own lines: readiness, status, and a watchdog that proves that the trio loop turns.

The ping is sent by a task of the loop that does the real work, at half the interval: a loop that hangs sends none, and
systemd restarts the service (failures.md F108). A status text is one line whatever a backend is called: a line break
would be read as another field.
"""

import contextlib
import os
import socket
import time
from collections.abc import Mapping

import trio

MAX_STATUS_CHARS = 200


class Notifier:
    """Talks to $NOTIFY_SOCKET; without one, every call does nothing."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._address = _address(environ.get("NOTIFY_SOCKET", ""))
        self._watchdog_s = _watchdog_s(environ)
        self._socket: socket.socket | None = None
        self._status = ""
        if self._address is not None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)

    @property
    def watchdog_s(self) -> float | None:
        """WatchdogSec= of the unit, seconds; None when it watches nobody, or another process."""
        return self._watchdog_s

    def send(self, *fields: str) -> None:
        """One datagram. A full or missing receiver is not our failure: the state is sent again by later calls."""
        if self._socket is not None and self._address is not None:
            with contextlib.suppress(OSError):
                self._socket.sendto("\n".join(fields).encode(), self._address)

    def ready(self) -> None:
        """The sockets listen."""
        self.send("READY=1")

    def reloading(self) -> None:
        """The configuration is read again; ``ready`` ends it."""
        self.send("RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")

    def stopping(self) -> None:
        """The stop began."""
        self.send("STOPPING=1")

    def status(self, text: str) -> None:
        """Show ``text`` in ``systemctl status``; sent only when it changed."""
        line = one_line(text)
        if line != self._status:
            self._status = line
            self.send(f"STATUS={line}")

    async def watchdog(self) -> None:
        """Ping for ever, from the loop. Returns at once when nobody watches."""
        if self._watchdog_s is None or self._socket is None:
            return
        while True:
            self.send("WATCHDOG=1")
            await trio.sleep(self._watchdog_s / 2)

    def close(self) -> None:
        """Close our end."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def one_line(text: str) -> str:
    """Printable characters of ``text`` on one line, bounded."""
    line = "".join(char if char.isprintable() else " " for char in text)
    return line if len(line) <= MAX_STATUS_CHARS else line[: MAX_STATUS_CHARS - 3] + "..."


def _address(name: str) -> str | None:
    if name.startswith("@"):
        return "\0" + name[1:]  # abstract
    return name if name.startswith("/") else None


def _watchdog_s(environ: Mapping[str, str]) -> float | None:
    pid = environ.get("WATCHDOG_PID", "")
    if pid and pid != str(os.getpid()):
        return None
    usec = environ.get("WATCHDOG_USEC", "")
    return int(usec) / 1e6 if usec.isdecimal() and int(usec) > 0 else None
