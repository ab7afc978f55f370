"""``nixl`` on objects: a side that hangs keeps its own buffers and its own agent, not those of the other (F62)."""

import socket
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


class Bucket:
    """The S3 requests beside the data path."""

    def __init__(self, lengths: dict[str, int]) -> None:
        self.objects = lengths
        self.asked: list[list[str]] = []

    def lengths(self, names: list[str]) -> list[int]:
        self.asked.append(names)
        return [self.objects.get(name, -1) for name in names]

    def delete(self, names: list[str]) -> None:
        for name in names:
            self.objects.pop(name, None)

    def below(self, prefix: str) -> list[str]:
        return [name for name in self.objects if name.startswith(prefix)]

    def close(self) -> None:
        pass


def store_of(monkeypatch: pytest.MonkeyPatch, agent: Agent, bucket: Bucket) -> NixlObjects:
    options = NixlOptions(bucket="b", endpoint_override="http://h:1", timeout_s=0.2).effective({})
    store = NixlObjects(options, CONTEXT, agent, {})  # type: ignore[arg-type]
    monkeypatch.setattr(store, "_require_server", lambda: None)
    store._client = bucket  # type: ignore[assignment]
    return store


def test_the_server_is_asked_only_for_pages_that_this_process_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stored, found or read once is known; deleted, set aside or short is asked for."""
    bucket = Bucket({"ns/7": PAGE, "ns/8": PAGE - 1})
    store = store_of(monkeypatch, Agent(), bucket)
    assert store.put(["ns.0", "ns.1"], pages(2)) == [True, True]
    assert store.exists(["ns.0", "ns.7", "ns.1", "ns.8"]) == [True, True, True, False]
    assert store.exists(["ns.0", "ns.7", "ns.8"]) == [True, True, False]
    assert bucket.asked == [["ns/7", "ns/8"], ["ns/8"]]
    assert store.delete(["ns.7"]) == 1
    store.set_aside("ns.1")
    assert store.exists(["ns.7", "ns.1", "ns.0"]) == [False, False, True]
    assert store.confirm(["ns.0"]) == [False]
    assert store.exists(["ns.0"]) == [False]
    assert store.get(["ns.5"], pages(1)) == [Got.HIT]
    assert store.exists(["ns.5"]) == [True]
    store.forget()
    assert store.exists(["ns.5"]) == [False]
    store.close()
    with pytest.raises(RuntimeError, match="not open"):
        store.exists(["ns.5"])


def test_what_a_failing_server_held_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may come back without its pages; a page that could not be read is no longer promised."""
    agent, bucket = Agent(), Bucket({})
    store = store_of(monkeypatch, agent, bucket)
    assert store.put(["ns.0", "ns.1"], pages(2)) == [True, True]
    monkeypatch.setattr(agent, "run_each", lambda *args, **kwargs: [False])
    assert store.get(["ns.0"], pages(1)) == [Got.MISS]
    assert store.exists(["ns.0", "ns.1"]) == [False, True]
    monkeypatch.undo()
    monkeypatch.setattr(store, "_require_server", lambda: None)
    agent.hangs = True
    with pytest.raises(TimeoutError):
        store.get(["ns.1"], pages(1))
    assert store.exists(["ns.1"]) == [False]
    store.close()


@pytest.mark.parametrize("removal", ["delete", "set_aside", "clear", "forget"])
@pytest.mark.parametrize("call", ["put", "get", "confirm"])
def test_a_removal_that_crosses_a_call_leaves_no_belief(
    monkeypatch: pytest.MonkeyPatch, removal: str, call: str
) -> None:
    """The call has stored or found its page, somebody removes it, and only then the call tells."""
    agent, bucket = Agent(), Bucket({"ns/0": PAGE})
    store = store_of(monkeypatch, agent, bucket)
    remove = {
        "delete": lambda: store.delete(["ns.0"]), "set_aside": lambda: store.set_aside("ns.0"), "clear": store.clear,
        "forget": lambda: (bucket.objects.clear(), store.forget()),
    }[removal]  # fmt: skip
    real_run, real_lengths = agent.run_each, bucket.lengths

    def run(*args: Any, **named: Any) -> list[bool]:
        out = real_run(*args, **named)
        remove()
        return out

    def lengths(names: list[str]) -> list[int]:
        monkeypatch.undo()
        out = real_lengths(names)
        remove()
        return out

    monkeypatch.setattr(agent, "run_each", run)
    if call == "confirm":
        monkeypatch.setattr(bucket, "lengths", lengths)
        assert store.confirm(["ns.0"]) == [True]
    elif call == "put":
        store.put(["ns.0"], pages(1))
    else:
        assert store.get(["ns.0"], pages(1)) == [Got.HIT]
    bucket.objects.clear()
    assert store.exists(["ns.0"]) == [False]


@pytest.mark.parametrize("removal", ["delete", "set_aside", "clear"])
def test_a_put_amid_a_removal_is_not_believed_in(monkeypatch: pytest.MonkeyPatch, removal: str) -> None:
    agent, bucket = Agent(), Bucket({"ns/0": PAGE})
    store = store_of(monkeypatch, agent, bucket)
    real = bucket.delete

    def delete(names: list[str]) -> None:
        assert store.put(["ns.0"], pages(1)) == [True]
        real(names)

    monkeypatch.setattr(bucket, "delete", delete)
    {"delete": lambda: store.delete(["ns.0"]), "set_aside": lambda: store.set_aside("ns.0"), "clear": store.clear}[
        removal
    ]()
    assert store.exists(["ns.0"]) == [False]


@pytest.mark.parametrize("call", ["put", "get", "exists"])
def test_while_the_server_is_dead_no_page_is_promised(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """Answers from memory would be good calls to the breaker, one for each read that fails (F80)."""
    bucket = Bucket({})
    store = store_of(monkeypatch, Agent(), bucket)
    assert store.put(["ns.0"], pages(1)) == [True]

    def dead(names: list[str]) -> list[int]:
        raise ConnectionRefusedError

    bucket.lengths = dead  # type: ignore[method-assign]
    monkeypatch.undo()  # of ``_require_server``: nobody listens at h:1
    monkeypatch.setattr(socket, "create_connection", lambda *args: dead([]))
    calls = {
        "put": lambda: store.put(["ns.1"], pages(1)), "get": lambda: store.get(["ns.0"], pages(1)),
        "exists": lambda: store.exists(["ns.1"]),
    }  # fmt: skip
    with pytest.raises(ConnectionRefusedError):
        calls[call]()
    with pytest.raises(ConnectionRefusedError):
        store.exists(["ns.0"])
