"""``nixl`` on objects: a side that hangs keeps its own buffers and its own agent, not those of the other (F62)."""

from types import SimpleNamespace
from typing import Any

import pytest

from hicache_hooks.backends.base import Got, StoreContext
from hicache_hooks.backends.nixl_agent import Late
from hicache_hooks.backends.nixl_object import NixlObjects
from hicache_hooks.backends.nixl_options import NixlOptions

PAGE = 4096
CONTEXT = StoreContext(namespace="ns", page_bytes=PAGE, layout="page_first")


class Agent:
    """Transfers of one side; while it hangs every batch outlives its deadline."""

    def __init__(self) -> None:
        self.hangs = False
        self.over = False
        self.ran: list[str] = []

    def run_each(self, op: str, pages: list[memoryview], targets: Any, deadline_s: float, keep: object) -> list[bool]:
        self.ran.append(op)
        if self.hangs:
            owner = SimpleNamespace(
                api=SimpleNamespace(check_xfer_state=lambda handle: "DONE" if self.over else "PROC"),
                release=lambda handle: None, deregister=lambda registered: None, drop_unused=lambda: None, late=1,
            )  # fmt: skip
            raise Late(owner, [object()], object(), keep)  # type: ignore[arg-type]
        for page in pages:
            page[:] = bytes(PAGE)
        return [True] * len(pages)


def pages(n: int) -> list[memoryview]:
    return [memoryview(bytearray(PAGE)) for _ in range(n)]


def keys(n: int) -> list[str]:
    return [f"ns.{i}" for i in range(n)]


def test_writes_that_hang_hold_up_no_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full S3 server lets every PUT wait; what it has is read all the same, and puts go on when it answers."""
    options = NixlOptions(bucket="b", endpoint_override="http://h:1", timeout_s=0.2).effective({})
    readers, writers = Agent(), Agent()
    store = NixlObjects(options, CONTEXT, readers, {}, writers)  # type: ignore[arg-type]
    monkeypatch.setattr(store, "_require_server", lambda: None)
    writers.hangs = True
    n = store._writes.count
    with pytest.raises(TimeoutError):
        store.put(keys(n), pages(n))
    with pytest.raises(TimeoutError, match="no transfer buffers"):
        store.put(keys(1), pages(1))
    assert store.get(keys(n), pages(n)) == [Got.HIT] * n
    assert (readers.ran, writers.ran) == (["READ"], ["WRITE"])
    writers.hangs, writers.over = False, True
    assert store.put(keys(n), pages(n)) == [True] * n
    store.close()
