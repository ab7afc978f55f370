"""Roles by peer credentials."""

import os
import socket

import pytest

from hicache_sidecar.core.actor import Role
from hicache_sidecar.server.actors import Access, Peer, parse_access, peer_of


def test_root_and_own_user_are_admin_others_nobody() -> None:
    access = Access(own_uid=123)
    assert access.role(Peer(1, 0, 0)) is Role.ADMIN
    assert access.role(Peer(1, 123, 5)) is Role.ADMIN
    assert access.role(Peer(1, 1000, 1000)) is Role.NONE
    assert access.role(Peer(1, 1000, 0, frozenset({0}))) is Role.NONE  # the group root gives nothing


def test_highest_of_user_and_groups_counts() -> None:
    access = Access(users={7: Role.VIEWER}, groups={50: Role.OPERATOR, 51: Role.ADMIN}, own_uid=123)
    assert access.role(Peer(1, 7, 7)) is Role.VIEWER
    assert access.role(Peer(1, 7, 50)) is Role.OPERATOR
    assert access.role(Peer(1, 7, 7, frozenset({50, 51}))) is Role.ADMIN
    assert access.role(Peer(1, 8, 8, frozenset({50}))) is Role.OPERATOR


def test_names_are_resolved_and_unknown_ones_refused() -> None:
    access = parse_access({"root": "viewer", "4242": "operator"}, {"root": "admin"})
    assert access.users == {0: Role.VIEWER, 4242: Role.OPERATOR}
    assert access.groups == {0: Role.ADMIN}
    for users, groups in (({"no-such-user": "viewer"}, {}), ({}, {"no-such-group": "viewer"}), ({"root": "none"}, {})):
        with pytest.raises(ValueError, match="is named"):
            parse_access(users, groups)


def test_kernel_names_the_peer_with_its_groups() -> None:
    left, right = socket.socketpair(socket.AF_UNIX)
    with left, right:
        peer = peer_of(left)
    assert (peer.pid, peer.uid, peer.gid) == (os.getpid(), os.getuid(), os.getgid())
    assert peer.groups == set(os.getgroups())
