"""The control socket on a real Unix socket: peers of other users, limits, stop."""

import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from tests.unit.server.fakes import FakeService, Peer

from hicache_proto import api, control
from hicache_sidecar.core.actor import Role
from hicache_sidecar.obs.counters import Counters
from hicache_sidecar.server.actors import Access
from hicache_sidecar.server.binding import bind_public
from hicache_sidecar.server.socket import MAX_PER_UID, ControlServer

OTHER_UID = 65534
# Connects as another user, sends a hello's worth of bytes, prints what comes back.
STRANGER = """
import os, socket, sys
os.setgroups([]); os.setgid({gid}); os.setuid({uid})
s = socket.socket(socket.AF_UNIX); s.settimeout(10)
s.connect(sys.argv[1])
try:
    s.sendall(bytes.fromhex(sys.argv[2]))
    print(len(s.recv(65536)))
except (BrokenPipeError, ConnectionResetError):
    print(0)
"""


class Site:
    def __init__(self, path: Path, access: Access) -> None:
        self.path, self.access = path, access
        self.peers: list[Peer] = []
        self.service, self.counters = FakeService(), Counters()
        self.server = ControlServer(self.service, lambda: self.access, self.counters)

    async def connect(self) -> Peer:
        self.peers.append(Peer(await trio.open_unix_socket(str(self.path))))
        return self.peers[-1]

    async def stranger(self, uid: int = OTHER_UID, gid: int = OTHER_UID) -> int:
        """Bytes that another user's client read."""
        hello = control.encode(control.ClientHello(protocol=1))
        code = STRANGER.format(uid=uid, gid=gid)
        done = await trio.run_process(
            [sys.executable, "-I", "-c", code, str(self.path), (len(hello).to_bytes(4, "big") + hello).hex()],
            capture_stdout=True,
        )
        return int(done.stdout)


@asynccontextmanager
async def serving(tmp_path: Path, access: Access | None = None) -> AsyncIterator[Site]:
    site = Site(tmp_path / "control.sock", access or Access())
    sock = bind_public(site.path, mode=0o666)
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            await nursery.start(site.server.serve, [sock])
            yield site
            site.server.stop()
        for peer in site.peers:
            await peer.stream.aclose()


async def test_request_over_a_real_socket(tmp_path: Path) -> None:
    async with serving(tmp_path) as site:
        peer = await site.connect()
        assert (await peer.hello()).role == "admin"
        await peer.send(control.Request(id=1, body=api.StatusRequest()))
        assert isinstance(await peer.read(), control.Result)
        actor = site.service.seen[0][1]
        assert (actor.uid, actor.pid, actor.transport) == (os.getuid(), os.getpid(), "socket")


@pytest.fixture
def public_dir() -> Iterator[Path]:
    """A directory that another user can reach (pytest's own are 0700)."""
    path = Path(subprocess.check_output(["mktemp", "-d", "/tmp/hicache-test.XXXXXX"], text=True).strip())
    path.chmod(0o755)
    yield path
    for entry in path.iterdir():
        entry.unlink()
    path.rmdir()


@pytest.mark.needs_root
async def test_stranger_is_closed_before_any_byte_is_read(public_dir: Path) -> None:
    """F96: another uid connects -> closed unread, counted; and the next of our own is served."""
    async with serving(public_dir) as site:
        assert await site.stranger() == 0
        assert site.counters.get("hicache_control_connections", "stranger") == 1
        assert site.service.seen == []
        peer = await site.connect()
        await peer.hello()


@pytest.mark.needs_root
async def test_mapped_users_and_groups_get_their_role_at_once(public_dir: Path) -> None:
    """A reload of [access] counts for the next connection."""
    async with serving(public_dir) as site:
        site.access = Access(users={OTHER_UID: Role.VIEWER})
        assert await site.stranger() > 0
        site.access = Access(groups={4242: Role.OPERATOR})
        assert await site.stranger() == 0
        assert await site.stranger(gid=4242) > 0


async def test_connections_of_one_user_are_bounded(tmp_path: Path) -> None:
    async with serving(tmp_path) as site:
        peers = [await site.connect() for _ in range(MAX_PER_UID)]
        for peer in peers:
            await peer.hello()
        extra = await site.connect()
        assert await extra.ended()
        assert site.counters.get("hicache_control_connections", "too_many") == 1


async def test_one_bad_client_does_not_end_the_others(tmp_path: Path) -> None:
    async with serving(tmp_path) as site:
        good = await site.connect()
        await good.hello()
        for junk in (b"\xff" * 64, b"GET / HTTP/1.1\r\n\r\n", b"\x00\x00\x00\x02\xc1\xc1"):
            bad = await site.connect()
            await bad.stream.send_all(junk)
            while await bad.read() is not None:
                pass
        broken = socket.socket(socket.AF_UNIX)
        broken.connect(str(site.path))
        broken.close()
        await good.send(control.Request(id=1, body=api.StatusRequest()))
        assert isinstance(await good.read(), control.Result)


async def test_stop_ends_idle_connections_at_once(tmp_path: Path) -> None:
    async with serving(tmp_path) as site:
        peer = await site.connect()
        await peer.hello()
        site.server.stop()
        assert await peer.ended()
        with pytest.raises(OSError):
            await site.connect()
