"""The rules of ``nixl_agent.py`` over a small stand-in for the library. The real one is in ``tests/stores``."""

import mmap
import os
import threading
from typing import Any

import pytest

from hicache_hooks.backends import nixl_probe
from hicache_hooks.backends.nixl_agent import Late, TransferFailed, Transfers

PAGE = 4096


class Library:
    """What ``Transfers`` uses of NIXL; ``states`` are the answers of the polls to come."""

    class nixl_thread_sync_t:
        NIXL_THREAD_SYNC_RW = "rw"

    def __init__(self) -> None:
        self.agents: list[Agent] = []
        self.states: list[str] = []
        self.sync: list[Any] = []

    def nixl_agent_config(self, backends: list[str], sync_mode: str) -> None:
        self.sync.append(sync_mode)

    def nixl_agent(self, name: str, config: None) -> "Agent":
        self.agents.append(Agent(self))
        return self.agents[-1]


class Agent:
    """One agent: counts what is registered and released."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.registered: list[Any] = []
        self.released = 0
        self.transfers: list[int] = []
        self.gate: threading.Event | None = None

    def create_backend(self, plugin: str, parameters: dict[str, str]) -> None:
        self.plugin = plugin

    def get_reg_descs(self, rows: list[Any], segment: str) -> list[Any]:
        return [segment, *rows]

    get_xfer_descs = get_reg_descs

    def register_memory(self, descs: list[Any], backends: list[str]) -> list[Any]:
        self.registered.append(descs)
        return descs

    def deregister_memory(self, descs: list[Any], backends: list[str]) -> None:
        self.registered.remove(descs)

    def initialize_xfer(self, op: str, local: list[Any], remote: list[Any], name: str, backends: list[str]) -> str:
        self.transfers.append(len(local) - 1)
        return "handle"

    def transfer(self, handle: str) -> str:
        if self.gate is not None:
            assert self.gate.wait(10)
        return self.check_xfer_state(handle)

    def check_xfer_state(self, handle: str) -> str:
        state = self.library.states.pop(0) if self.library.states else "DONE"
        if state == "RAISE":
            raise ValueError("the library's own type")
        return state

    def release_xfer_handle(self, handle: str) -> None:
        self.released += 1


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    monkeypatch.setattr(nixl_probe, "load", lambda: made)
    return made


def transfers(library: Library, rebuild: bool = False, **parameters: str) -> Transfers:
    made = Transfers("POSIX", parameters, "FILE", rebuild_after_error=rebuild)
    made.open()
    return made


def pages(n: int) -> list[memoryview]:
    memory = memoryview(mmap.mmap(-1, n * PAGE))
    return [memory[i * PAGE : (i + 1) * PAGE] for i in range(n)]


def targets(n: int) -> list[tuple[int, str]]:
    return [(i, "") for i in range(n)]


def test_the_sync_mode_is_set_and_everything_is_given_back(library: Library) -> None:
    """Rule 1: with the default four threads abort the process."""
    made = transfers(library)
    made.run("READ", pages(3), targets(3), None)
    agent = library.agents[0]
    assert (library.sync, agent.transfers, agent.released, agent.registered) == (["rw"], [3], 1, [])


def test_no_more_is_in_flight_than_half_of_the_pool(library: Library) -> None:
    """Rule 3: slots beyond the pool leak. A batch is cut, and other threads wait."""
    made = transfers(library, ios_pool_size="8")
    made.run("READ", pages(10), targets(10), None)
    agent = library.agents[0]
    assert agent.transfers == [4, 4, 2]
    agent.gate = threading.Event()
    threads = [threading.Thread(target=made.run, args=("READ", pages(3), targets(3), None)) for _ in range(2)]
    for thread in threads:
        thread.start()
    deadline = threading.Event()
    while len(agent.transfers) < 4 and not deadline.wait(0.01):
        pass
    assert not deadline.wait(0.05), "the second must not start while three of four slots are taken"
    assert len(agent.transfers) == 4
    agent.gate.set()
    for thread in threads:
        thread.join(10)
    assert agent.transfers[3:] == [3, 3]


def test_failures_become_one_type_and_release_everything(library: Library) -> None:
    """Rule 5; F65: nothing stays registered."""
    made = transfers(library)
    for states in (["PROC", "RAISE"], ["RAISE"], ["PROC", "ERR"]):
        library.states = states
        with pytest.raises(TransferFailed):
            made.run("WRITE", pages(2), targets(2), None)
    agent = library.agents[0]
    assert (agent.released, agent.registered) == (3, [])
    assert len(library.agents) == 1


def test_a_late_transfer_keeps_what_it_uses_until_it_ends(library: Library) -> None:
    """Rule 4: a release in flight lets completions land on freed memory."""
    made = transfers(library)
    library.states = ["PROC"] * 10_000
    with pytest.raises(Late) as caught:
        made.run("READ", pages(1), targets(1), 0.01)
    agent = library.agents[0]
    assert (agent.released, len(agent.registered)) == (0, 1)
    made.close()
    assert not caught.value.ended()
    assert (agent.released, len(agent.registered)) == (0, 1), "also when the store is closed meanwhile"
    library.states = ["RAISE"]
    assert caught.value.ended()
    assert (agent.released, agent.registered) == (1, [])


def test_each_page_has_a_result_of_its_own_where_a_batch_would_run_on(library: Library) -> None:
    """Rule 5, OBJ: a missing object is one failed transfer; the others end, and only then are they released."""
    made = transfers(library)
    library.states = ["PROC", "RAISE", "DONE", "PROC", "DONE"]
    assert made.run_each("READ", pages(3), targets(3), 5.0, None) == [True, False, True]
    agent = library.agents[0]
    assert (agent.transfers, agent.released, agent.registered) == ([1, 1, 1], 3, [])
    library.states = ["DONE"] + ["PROC"] * 10_000
    with pytest.raises(Late) as caught:
        made.run_each("READ", pages(2), targets(2), 0.01, None)
    assert (agent.released, len(agent.registered)) == (4, 1)
    library.states = ["DONE"]
    assert caught.value.ended()
    assert (agent.released, agent.registered) == (5, [])


def test_a_poisoned_agent_is_replaced_where_the_mode_needs_it(library: Library) -> None:
    """Rule 6: with POSIX AIO one failed I/O fails every later one. The pools are registered again."""
    made = transfers(library, rebuild=True)
    pool = memoryview(mmap.mmap(-1, PAGE))
    made.register(pool)
    library.states = ["RAISE"]
    with pytest.raises(TransferFailed):
        made.run("READ", pages(1), targets(1), None)
    old, new = library.agents
    assert (old.registered, len(new.registered), made.rebuilt) == ([], 1, 1)
    made.run("READ", pages(1), targets(1), None)
    assert new.transfers == [1]
    made.close()
    assert new.registered == []


def test_closed_and_forked_never_reach_the_library(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules 2 and 7."""
    made = transfers(library)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    with pytest.raises(RuntimeError, match="forked"):
        made.run("READ", pages(1), targets(1), None)
    made.close()
    monkeypatch.undo()
    monkeypatch.setattr(nixl_probe, "load", lambda: library)
    closed = transfers(library)
    closed.close()
    closed.close()
    with pytest.raises(RuntimeError, match="not open"):
        closed.run("READ", pages(1), targets(1), None)
    assert all(agent.transfers == [] for agent in library.agents)
