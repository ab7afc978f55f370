"""Who is on the other end of a control-socket connection, and what role that gives.

The kernel says who connected (SO_PEERCRED, and SO_PEERGROUPS for the supplementary groups): nothing that the client
sends can change it. Root and the daemon's own uid are admin; the ``[access]`` tables of the config map other users and
groups; everybody else is nobody and is closed before a byte is read (failures.md F96).
"""

import grp
import os
import pwd
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

from hicache_sidecar.core.actor import Actor, Role

_UCRED = struct.Struct("iII")  # struct ucred: pid, uid, gid
_SO_PEERGROUPS = getattr(socket, "SO_PEERGROUPS", 59)  # asm-generic/socket.h; Python has no name for it
_MAX_GROUPS = 65536  # NGROUPS_MAX


@dataclass(frozen=True)
class Peer:
    """Credentials of the connecting process at the time of connect(2)."""

    pid: int
    uid: int
    gid: int
    groups: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Access:
    """Roles by numeric uid and gid; the highest that applies counts."""

    users: Mapping[int, Role] = field(default_factory=dict)
    groups: Mapping[int, Role] = field(default_factory=dict)
    own_uid: int = field(default_factory=os.geteuid)

    def role(self, peer: Peer) -> Role:
        """The peer's role; NONE for a stranger."""
        if peer.uid in (0, self.own_uid):
            return Role.ADMIN
        found = [self.users.get(peer.uid, Role.NONE)]
        found += [self.groups.get(gid, Role.NONE) for gid in {peer.gid, *peer.groups}]
        return max(found)

    def actor(self, peer: Peer) -> Actor:
        """The principal for the audit line and the history."""
        return Actor(
            name=user_name(peer.uid), role=self.role(peer), transport="socket", uid=peer.uid, gid=peer.gid, pid=peer.pid
        )


def parse_access(users: Mapping[str, str], groups: Mapping[str, str]) -> Access:
    """Resolve the names of the ``[access]`` tables.

    Raises:
        ValueError: unknown user, group or role; numeric ids are taken as they are.
    """
    return Access(
        users={uid_of(name): _role(role) for name, role in users.items()},
        groups={gid_of(name): _role(role) for name, role in groups.items()},
    )


def uid_of(name: str) -> int:
    """A user's number. Raises ValueError when there is no such user."""
    if name.isdecimal():
        return int(name)
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        raise ValueError(f"no user is named {name!r}") from None


def gid_of(name: str) -> int:
    """A group's number. Raises ValueError when there is no such group."""
    if name.isdecimal():
        return int(name)
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise ValueError(f"no group is named {name!r}") from None


def user_name(uid: int) -> str:
    """The name of a uid, or ``uid:N`` where the host has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid:{uid}"


def peer_of(sock: socket.socket) -> Peer:
    """Ask the kernel who connected.

    Raises:
        OSError: not a connected Unix socket.
    """
    pid, uid, gid = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return Peer(pid=pid, uid=uid, gid=gid, groups=_peer_groups(sock))


def _peer_groups(sock: socket.socket) -> frozenset[int]:
    try:
        raw = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4 * 256)
    except OSError:
        try:  # more than 256 groups, or a kernel before 4.13
            raw = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4 * _MAX_GROUPS)
        except OSError:
            return frozenset()  # the primary group still counts
    return frozenset(gid for (gid,) in struct.iter_unpack("I", raw[: len(raw) // 4 * 4]))


def _role(name: str) -> Role:
    known = {role.name.lower(): role for role in Role if role is not Role.NONE}
    if name not in known:
        raise ValueError(f"no role is named {name!r}: one of {', '.join(known)}")
    return known[name]
