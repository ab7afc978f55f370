"""Host and Origin: what a name may be, by the address that the connection arrived at."""

import pytest

from hicache_proto.errors import Forbidden
from hicache_sidecar.server.hosts import Hosts, is_loopback

LOOPBACK = ("127.0.0.1", 30080)
LAN = ("192.168.7.2", 30080)

GOOD = [
    ("127.0.0.1:30080", LOOPBACK),
    ("localhost:30080", LOOPBACK),
    ("LOCALHOST.:30080", LOOPBACK),
    ("[::1]:30080", LOOPBACK),
    ("[::1]:30080", ("::1", 30080)),
    ("[0:0:0:0:0:0:0:1]:30080", ("::1", 30080)),
    ("127.0.0.1:30080", ("::ffff:127.0.0.1", 30080)),
    ("localhost", ("127.0.0.1", 80)),
    ("192.168.7.2:30080", LAN),
    ("kv.example:30080", LAN),
    ("kv.example", LAN),
    ("other.example:8080", LAN),
]
BAD = [
    (None, LOOPBACK),
    ("", LOOPBACK),
    ("localhost", LOOPBACK),
    ("localhost:80", LOOPBACK),
    ("localhost:30080.evil", LOOPBACK),
    ("localhost:30080", LAN),
    ("127.0.0.1:30080", LAN),
    ("evil.example:30080", LOOPBACK),
    ("127.0.0.1.evil.example:30080", LOOPBACK),
    ("192.168.7.3:30080", LAN),
    ("other.example:9", LAN),
    ("localhost:30080", None),
]


@pytest.mark.parametrize(("host", "local"), GOOD)
def test_bound_names_pass(host: str, local: tuple[str, int]) -> None:
    Hosts(["kv.example", "other.example:8080"]).check(host, None, local)


@pytest.mark.parametrize(("host", "local"), BAD)
def test_other_names_are_refused(host: str | None, local: tuple[str, int] | None) -> None:
    with pytest.raises(Forbidden) as caught:
        Hosts(["kv.example", "other.example:8080"]).check(host, None, local)
    assert caught.value.details["reason"] == "host"


@pytest.mark.parametrize(
    "origin", ["null", "", "http://", "http://evil.example", "http://localhost:1", "http://[::x]", "x"]
)
def test_foreign_origins_are_refused(origin: str) -> None:
    with pytest.raises(Forbidden) as caught:
        Hosts().check("localhost:30080", origin, LOOPBACK)
    assert caught.value.details["reason"] == "origin"


@pytest.mark.parametrize("origin", ["http://localhost:30080", "http://127.0.0.1:30080"])
def test_own_origins_pass(origin: str) -> None:
    Hosts().check("localhost:30080", origin, LOOPBACK)


def test_loopback() -> None:
    assert [is_loopback(a) for a in ("127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1")] == [True] * 4
    assert [is_loopback(a) for a in ("0.0.0.0", "::", "10.0.0.1", "localhost", "")] == [False] * 5
