"""Calls beside each other go to agents of their own. The real library: ``tests/stores``."""

import threading
from typing import Any

import pytest

from hicache_hooks.backends import nixl_lanes
from hicache_hooks.backends.nixl import manifest_of
from hicache_hooks.backends.nixl_agent import TransferFailed
from hicache_hooks.backends.nixl_lanes import LANES, Lanes
from hicache_hooks.backends.nixl_options import NixlOptions

WAIT_S = 10.0


class Agent:
    """Stands for ``Transfers``: a call named ``hold`` stays inside until it is let go."""

    cap = 7
    made: list["Agent"]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.calls: list[str] = []
        self.events: list[str] = []
        self.inside, self.go = threading.Event(), threading.Event()
        self.rebuilt = 1
        Agent.made.append(self)

    def open(self) -> None:
        self.events.append("open")

    def register(self, memory: memoryview) -> None:
        self.events.append("register")

    def close(self) -> None:
        self.events.append("close")

    def run(self, op: str, pages: object, targets: object, deadline_s: float | None) -> None:
        self.calls.append(op)
        if op == "hold":
            self.inside.set()
            assert self.go.wait(WAIT_S)
        if op == "fail":
            raise TransferFailed("x")


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch) -> Lanes:
    Agent.made = []
    monkeypatch.setattr(nixl_lanes, "Transfers", Agent)
    return Lanes("POSIX", {}, rebuild_after_error=False, count=2)


def test_a_call_beside_another_takes_the_other_agent(lanes: Lanes) -> None:
    first, second = Agent.made
    thread = threading.Thread(target=lanes.run, args=("hold", [], [], None))
    thread.start()
    assert first.inside.wait(WAIT_S)
    for _ in range(3):
        lanes.run("READ", [], [], None)
    first.go.set()
    thread.join(WAIT_S)
    lanes.run("READ", [], [], None)
    assert (first.calls, second.calls) == (["hold", "READ"], ["READ"] * 3)


def test_a_call_that_failed_leaves_its_agent_free(lanes: Lanes) -> None:
    """The error is the caller's, and later calls do not shun the agent."""
    with pytest.raises(TransferFailed):
        lanes.run("fail", [], [], None)
    lanes.run("READ", [], [], None)
    assert Agent.made[0].calls == ["fail", "READ"]


def test_all_agents_are_opened_get_every_pool_and_are_closed(lanes: Lanes) -> None:
    """The pool must be known to each: a transfer may run on any."""
    lanes.open()
    lanes.register(memoryview(bytearray(1)))
    lanes.close()
    assert [agent.events for agent in Agent.made] == [["open", "register", "close"]] * 2
    assert (lanes.cap, lanes.rebuilt) == (7, 2)


def test_no_more_calls_than_agents_for_files_moved_by_the_processor() -> None:
    calls = {name: manifest_of(NixlOptions(plugin={name: {}}), {}).calls for name in ("posix", "gds", "obj")}
    assert calls == {"posix": LANES, "gds": 0, "obj": 0}
