"""Mooncake's clients between two attaches, over a stand-in for the vendor's class. On a real master: tests/stores."""

import threading
from typing import Any

import pytest

from hicache_hooks.backends import mooncake_client, mooncake_kept
from hicache_hooks.backends.base import StoreContext
from hicache_hooks.backends.mooncake import MooncakeStore
from hicache_hooks.backends.mooncake_kept import MAX_KEPT, Kept, obtain
from hicache_hooks.backends.mooncake_options import MooncakeOptions
from hicache_proto.errors import PrepareFailed


class Vendor:
    """Notes what is done with it."""

    made: "list[Vendor]"
    mount_code = unmount_code = 0

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.answer = 0
        Vendor.made.append(self)

    def setup(self, *args: Any, **_: Any) -> int:
        self.calls.append(("setup", args[2]))
        return 0

    def is_exist(self, key: str) -> int:
        return self.answer

    def register_buffer(self, start: int, nbytes: int) -> int:
        return 0

    def unregister_buffer(self, start: int) -> int:
        return 0

    def allocate_and_mount_segment(self, nbytes: int, protocol: str) -> dict[str, Any]:
        self.calls.append(("mount", nbytes))
        return {"ret": self.mount_code, "segment_ids": ["s"], "allocated_size": nbytes}

    def unmount_and_free_segment(self, segments: list[str]) -> int:
        self.calls.append(("unmount", segments))
        return self.unmount_code

    def close(self) -> None:
        self.calls.append("close")


@pytest.fixture
def vendor(monkeypatch: pytest.MonkeyPatch) -> type[Vendor]:
    Vendor.made = []
    monkeypatch.setattr(Vendor, "mount_code", 0)
    monkeypatch.setattr(Vendor, "unmount_code", 0)
    monkeypatch.setattr(mooncake_kept, "KEPT", Kept())
    monkeypatch.setattr(mooncake_kept, "answers", lambda address: True)
    monkeypatch.setattr(mooncake_client, "require_reachable", lambda options: None)
    monkeypatch.setattr(mooncake_client, "rehearse", lambda *args: None)
    monkeypatch.setattr(mooncake_client, "load", lambda timeout_ms: Vendor)
    return Vendor


def options(master: str = "127.0.0.1:1", **more: Any) -> MooncakeOptions:
    return MooncakeOptions(master_server_address=master, **more).effective({})


def store(master: str = "127.0.0.1:1", size: str = "64mb") -> MooncakeStore:
    made = MooncakeStore(
        options(master, global_segment_size=size), StoreContext(namespace="ns", page_bytes=8192, layout="page_first")
    )
    made.open()
    return made


def test_a_detach_gives_the_memory_back_and_the_next_attach_takes_the_client(vendor: type[Vendor]) -> None:
    """The close that stalls the engine is not called."""
    store().close()
    store(size="128mb").close()
    (one,) = vendor.made
    assert one.calls == [
        ("setup", 0), ("mount", 64 << 20), ("unmount", ["s"]), ("mount", 128 << 20), ("unmount", ["s"]),
    ]  # fmt: skip
    assert mooncake_kept.KEPT.count == 1


def test_another_master_or_two_at_once_take_other_clients(vendor: type[Vendor]) -> None:
    first, second = store(), store()
    second.close()
    third = store("127.0.0.1:2")
    for one in (first, third):
        one.close()
    assert len(vendor.made) == 3
    store("127.0.0.1:2").close()
    assert len(vendor.made) == 3


def test_a_client_whose_master_does_not_answer_stays_and_a_new_one_is_tried(
    vendor: type[Vendor], monkeypatch: pytest.MonkeyPatch
) -> None:
    store().close()
    vendor.made[0].answer = -900

    def refuse(*_: Any) -> None:
        raise PrepareFailed("planted", details={"reason": "store_unreachable"})

    with monkeypatch.context() as patch:
        patch.setattr(mooncake_client, "rehearse", refuse)
        with pytest.raises(PrepareFailed):
            store()
    vendor.made[0].answer = 0
    store().close()
    assert len(vendor.made) == 1


def test_a_segment_that_cannot_be_mounted_is_a_refusal_that_keeps_the_client(
    vendor: type[Vendor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vendor, "mount_code", -1)
    with pytest.raises(PrepareFailed) as caught:
        store()
    assert caught.value.details == {"reason": "setup_failed", "code": -1}
    assert mooncake_kept.KEPT.count == 1


def test_a_segment_that_cannot_be_unmounted_ends_its_client(
    vendor: type[Vendor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its memory would stay, and pages in it would be found by others."""
    monkeypatch.setattr(vendor, "unmount_code", -1)
    store().close()
    assert vendor.made[0].calls[-1] == "close"
    assert mooncake_kept.KEPT.count == 0


@pytest.mark.parametrize("why", ["ssd", "old"])
def test_where_the_segment_is_the_set_ups_own_the_client_is_closed(
    vendor: type[Vendor], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    cls: Any = Vendor
    if why == "old":
        cls = type("Old", (), {name: getattr(Vendor, name) for name in ("__init__", "setup", "is_exist", "close")})
    monkeypatch.setattr(mooncake_client, "load", lambda timeout_ms: cls)
    held = obtain(options(enable_ssd_offload=why == "ssd"), 4096, "", "/ssd" if why == "ssd" else "")
    held.end()
    assert vendor.made[0].calls == [("setup", 4096), "close"]
    assert mooncake_kept.KEPT.count == 0


def test_kept_clients_are_bounded(vendor: type[Vendor], monkeypatch: pytest.MonkeyPatch) -> None:
    """F43: the oldest goes, when its master answers."""
    closed: list[Any] = []
    monkeypatch.setattr(mooncake_kept.REAPER, "add", lambda end, alive: closed.append(end))
    for i in range(MAX_KEPT + 1):
        store(f"127.0.0.1:{i + 1}").close()
    assert mooncake_kept.KEPT.count == MAX_KEPT
    assert closed == [vendor.made[0].close]


def test_a_forked_child_finds_none(vendor: type[Vendor], monkeypatch: pytest.MonkeyPatch) -> None:
    """A call there hangs."""
    store().close()
    monkeypatch.setattr(mooncake_kept.os, "getpid", lambda: -1)
    assert mooncake_kept.KEPT.count == 0
    assert mooncake_kept.KEPT.take(mooncake_kept.KEPT._clients[0].key) is None


def test_two_threads_never_get_one_client(vendor: type[Vendor]) -> None:
    store().close()
    key = mooncake_kept.KEPT._clients[0].key
    taken: list[Any] = []
    threads = [threading.Thread(target=lambda: taken.append(mooncake_kept.KEPT.take(key))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert sum(client is not None for client in taken) == 1
