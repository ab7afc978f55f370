"""Sockets handed over by systemd (sd_listen_fds(3)): taken, checked, never unlinked or bound again (failures.md F107).

Names (``FileDescriptorName=``): ``control`` is the control socket, ``http`` the HTTP API. One socket without a known
name is told by its family, so that ``systemd-socket-activate -l`` works without ``--fdname``.
"""

import os
import socket
from collections.abc import MutableMapping
from dataclasses import dataclass, field

FIRST_FD = 3  # SD_LISTEN_FDS_START
NAMES = ("control", "http")
_VARIABLES = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")


class ActivationError(Exception):
    """A handed-over descriptor cannot be used; the text names it and says what was expected."""


@dataclass
class Inherited:
    """Handed-over sockets by purpose."""

    control: list[socket.socket] = field(default_factory=list)
    http: list[socket.socket] = field(default_factory=list)


def take(environ: MutableMapping[str, str]) -> Inherited:
    """Take the descriptors that are meant for this process and unset the variables for its children.

    Raises:
        ActivationError: wrong type, family or state, or an unknown name.
    """
    pid, count, names = (environ.pop(name, "") for name in _VARIABLES)
    found = Inherited()
    if pid != str(os.getpid()):
        return found  # none, or meant for another process
    if not count.isdecimal():
        raise ActivationError(f"LISTEN_FDS={count[:20]!r} is no number")
    labels = names.split(":") if names else []
    for index in range(int(count)):
        fd = FIRST_FD + index
        label = labels[index] if index < len(labels) else ""
        sock = _open(fd, label)
        name = _purpose(sock, label, fd)
        (found.control if name == "control" else found.http).append(sock)
    return found


def _open(fd: int, label: str) -> socket.socket:
    try:
        os.set_inheritable(fd, False)
        sock = socket.socket(fileno=fd)
    except OSError as exc:
        raise ActivationError(f"descriptor {fd} ({label or 'unnamed'}) is not a socket: {exc.strerror}") from None
    sock.setblocking(False)
    return sock


def _purpose(sock: socket.socket, label: str, fd: int) -> str:
    """Which of NAMES this socket is; checks that it can be that."""
    family = sock.family
    name = label if label in NAMES else ("control" if family == socket.AF_UNIX else "http")
    what = f"descriptor {fd} ({label or 'unnamed'})"
    if sock.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE) != socket.SOCK_STREAM:
        raise ActivationError(f"{what} is not a stream socket: use ListenStream=")
    if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        raise ActivationError(f"{what} does not listen: use Accept=no")
    if name == "control" and family != socket.AF_UNIX:
        raise ActivationError(f"{what}: the control socket must be a Unix socket, its peers are told by uid")
    if name == "http" and family not in (socket.AF_INET, socket.AF_INET6):
        raise ActivationError(f"{what}: the HTTP socket must be TCP")
    return name
