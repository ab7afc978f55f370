"""What is special about Mooncake, on a real master: clients that hold the GIL, leases, sizes, peers that die."""

import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.rigs.procs import free_port
from tests.rigs.stores.host import CallFailed, Host
from tests.rigs.stores.mooncake import MooncakePeerStand, MooncakeStand
from tests.rigs.stores.probes import GapClock

from hicache_hooks.backends.base import StoreContext
from hicache_hooks.backends.mooncake import MooncakeStore
from hicache_hooks.backends.mooncake_client import REHEARSAL_S
from hicache_hooks.backends.mooncake_options import MooncakeOptions
from hicache_proto.errors import PrepareFailed

MISSING = MooncakeStand.missing()
pytestmark = [pytest.mark.stores, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]

GAP_S = 1.5  # two busy cores; the traps hold the GIL for 14 to 90 s
SLACK_S = 5.0


class HttpStand(MooncakeStand):
    """The master serves the metadata too, over HTTP."""

    def __init__(self, name: str, root: Path, *, small: bool = False) -> None:
        super().__init__(name, root, small=small)
        self.http_port = free_port()

    def more_flags(self) -> list[str]:
        return [
            "-enable_http_metadata_server=true", "-http_metadata_server_host=127.0.0.1",
            f"-http_metadata_server_port={self.http_port}",
        ]  # fmt: skip

    def ready(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.http_port), 1.0).close()
        except OSError:
            return False
        return super().ready()

    def config(self) -> dict[str, Any]:
        return {**super().config(), "metadata_server": f"http://127.0.0.1:{self.http_port}/metadata"}


@pytest.fixture
def stand(tmp_path: Path) -> Iterator[MooncakeStand]:
    with MooncakeStand("mooncake", tmp_path) as made:
        yield made


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[MooncakePeerStand]:
    with MooncakePeerStand("mooncake-peer", tmp_path) as made:
        yield made


def refused_open(config: dict[str, Any]) -> tuple[PrepareFailed, float, float]:
    """Open in this process, with a clock beside it: the refusal, how long it took, the longest gap of the GIL."""
    store = MooncakeStore(
        msgspec.convert(config, MooncakeOptions).effective({}),
        StoreContext(namespace="ns", page_bytes=65536, layout="page_first"),
    )
    try:
        with GapClock() as clock, pytest.raises(PrepareFailed) as caught:
            store.open()
    finally:
        store.close()
    return caught.value, clock.took_s, clock.gap_s


def test_a_set_up_without_a_master_is_refused_before_mooncake_is_touched(stand: MooncakeStand) -> None:
    """It would hold the GIL for 90 s."""
    stand.kill()
    error, took_s, gap_s = refused_open(stand.config())
    assert error.details["reason"] == "store_unreachable"
    assert took_s < SLACK_S
    assert gap_s < GAP_S
    assert "mooncake.store" not in sys.modules


def test_a_set_up_with_a_hung_master_is_given_up_in_a_child(stand: MooncakeStand) -> None:
    """The kernel accepts connections for it, so a TCP probe passes; the set-up would hold the GIL for 22 s or more."""
    stand.hang()
    error, took_s, gap_s = refused_open(stand.config())
    stand.resume()
    assert error.details["reason"] == "store_unreachable"
    assert took_s < REHEARSAL_S + SLACK_S
    assert gap_s < GAP_S
    assert "mooncake.store" not in sys.modules
    with Host(stand) as host:
        host.open()
        assert host.put([1]) == [True]
        host.close()


def test_check_server_wants_a_node_with_memory(peer: MooncakePeerStand, tmp_path: Path) -> None:
    """SGLang's option; asked once, not for ten minutes."""
    options = {"check_server": True, "master_metrics_port": peer.metrics_port}
    with Host(peer) as host:
        host.open(**options)
        assert host.put([1]) == [True]
        host.close()
    (tmp_path / "b").mkdir()
    with MooncakeStand("empty", tmp_path / "b") as empty:
        error, _, _ = refused_open({**empty.config(), "check_server": True, "master_metrics_port": empty.metrics_port})
    assert error.details["reason"] == "no_segments"


def test_metadata_over_http_and_its_absence(tmp_path: Path) -> None:
    """A set-up that races the metadata server says done, and no memory can be registered for good."""
    with HttpStand("http", tmp_path) as http:
        with Host(http) as host:
            host.open()
            assert host.put([1, 2]) == [True, True]
            assert host.get([1, 9, 2]) == ["hit", "miss", "hit"]
            host.close()
        wrong = {**http.config(), "metadata_server": f"http://127.0.0.1:{free_port()}/metadata"}
        error, _, _ = refused_open(wrong)
        assert "metadata server" in error.message


def test_a_detach_does_not_stall_the_engine_and_gives_the_memory_back(stand: MooncakeStand) -> None:
    """Mooncake's own close holds the GIL for 0.9 s at least. The best of three: noise only adds."""
    gaps = []
    with Host(stand) as host, Host(stand) as other:
        other.open(global_segment_size=0)
        for number in range(3):
            host.open()
            assert host.put([number]) == [True]
            assert other.exists([number]) == [True]
            gaps.append(host.call("probe", name="close_gap", timeout_s=60.0)["gap_s"])
            assert other.exists([number]) == [False], "its page went with the segment"
        other.close()
    assert min(gaps) < 0.5, gaps


def test_a_close_without_a_master_is_left_for_later(stand: MooncakeStand) -> None:
    """It would hold the GIL for 14 s. The client is closed when the master is back."""
    with Host(stand) as host:
        host.open()
        host.put([1])
        stand.kill()
        found = host.call("probe", name="close_gap", timeout_s=60.0)
        assert found["took_s"] < SLACK_S
        assert found["gap_s"] < GAP_S
        stand.restart()
        host.open()
        assert host.put([2]) == [True]
        deadline = time.monotonic() + 60
        while host.health()["clients_left_to_close"]:
            assert time.monotonic() < deadline
            time.sleep(0.2)  # pace of a poll; the close of the old one holds up the answer
        # The old client had told the new master of its memory again: what was put there meanwhile went with it.
        assert host.get([2])[0] in ("hit", "miss")
        assert host.put([2]) == [True]
        assert host.get([2]) == ["hit"]
        host.close()


def test_a_close_beside_a_hung_master_is_left_for_later(stand: MooncakeStand) -> None:
    with Host(stand) as host:
        host.open()
        stand.hang()
        found = host.call("probe", name="close_gap", timeout_s=60.0)
        stand.resume()
        assert found["took_s"] < SLACK_S
        assert found["gap_s"] < GAP_S


def test_memory_that_was_not_registered_is_refused_by_us(stand: MooncakeStand) -> None:
    """Over tcp Mooncake takes any memory; RDMA would refuse it, or worse."""
    with Host(stand) as host:
        host.open()
        said = host.call("probe", name="strangers", number=1)
        assert said == {"put": "raised ValueError", "get": "raised ValueError"}
        assert host.exists([1]) == [False]
        host.close()


def test_a_page_that_was_just_read_can_be_removed(stand: MooncakeStand) -> None:
    """Its lease (here 5 s) makes a plain removal fail with -706."""
    with Host(stand) as host:
        host.open()
        host.put([1, 2, 3])
        assert host.get([1, 2, 3]) == ["hit"] * 3
        assert host.delete([1, 4]) == 1
        host.call("set_aside", number=2)
        assert host.exists([1, 2, 3]) == [False, False, True]
        assert host.get([3]) == ["hit"]
        assert host.call("clear") == 1
        host.close()


@pytest.mark.parametrize("percent", [50, 150])
def test_an_object_of_another_size_is_a_miss_and_makes_room(stand: MooncakeStand, percent: int) -> None:
    """Read as shorter it says its size, as longer -600; either way a put alone would keep it for ever."""
    with Host(stand) as host:
        host.open()
        host.put([1, 2])
        assert stand.replace(f"ns.{1:064x}", percent)
        assert host.put([1]) == [True], "a key that exists keeps what it has"
        assert host.get([1, 2]) == ["miss", "hit"]
        assert host.exists([1, 2]) == [False, True]
        assert host.put([1]) == [True]
        assert host.get([1, 2]) == ["hit", "hit"]
        host.close()


def test_clear_takes_the_namespace_as_text_not_as_a_pattern(stand: MooncakeStand) -> None:
    """F68: the store deletes by regular expression."""
    with Host(stand) as one, Host(stand) as other, Host(stand) as tagged:
        one.open(namespace="a.b+")
        other.open(namespace="axb+")
        tagged.open(namespace="a.b+", extra_backend_tag="t")
        for host in (one, other, tagged):
            assert host.put([1, 2]) == [True, True]
        assert one.call("clear") == 2
        assert one.exists([1]) == [False]
        assert other.get([1, 2]) == tagged.get([1, 2]) == ["hit", "hit"]
        assert tagged.call("clear") == 2
        for host in (one, other, tagged):
            host.close()


def test_a_storage_node_that_dies_costs_its_pages_only(peer: MooncakePeerStand) -> None:
    """``exists`` believes in it for ten seconds; reads fail meanwhile, and a new node is used."""
    with Host(peer) as host:
        host.open()
        assert host.put([1, 2]) == [True, True]
        assert peer.peer is not None
        peer.peer.kill()
        assert set(host.get([1, 2], timeout_s=60.0)) <= {"miss", "error"}
        peer.peer = peer.tool("contribute", nbytes=64 << 20)
        peer.peer.wait_until("its segment", lambda: "mounted" in (peer.peer.text() if peer.peer else ""), 60.0)
        deadline = time.monotonic() + 60
        number = 10
        while True:  # puts go to the dead node too until the master gives it up
            number += 1
            try:
                if host.put([number], timeout_s=30.0) == [True] and host.get([number], timeout_s=30.0) == ["hit"]:
                    break
            except CallFailed:
                pass
            assert time.monotonic() < deadline
            time.sleep(0.2)  # pace of a poll
        host.close()
