"""The side list in front of SGLang's queues: order, aborts, batches, health checks."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from hicache_hooks.sglang.held import Held


@dataclass
class Work:
    rid: str


@dataclass
class Batch:
    batch: list[Work]


@dataclass
class Abort:
    rid: str = ""
    abort_all: bool = False


@dataclass
class Health:
    rid: str = "HEALTH_CHECK_1"


@dataclass
class Engine:
    """The engine's request types, and what it was asked to answer."""

    aborted: list[str] = field(default_factory=list)
    healthy: list[Any] = field(default_factory=list)
    broken: bool = False

    def is_work(self, request: Any) -> bool:
        return isinstance(request, Work | Batch | Health)

    def batch_of(self, request: Any) -> list[Any] | None:
        return request.batch if isinstance(request, Batch) else None

    def with_batch(self, request: Any, members: list[Any]) -> Any:
        return replace(request, batch=members)

    def is_abort(self, request: Any) -> bool:
        return isinstance(request, Abort)

    def is_health_check(self, request: Any) -> bool:
        return isinstance(request, Health)

    def answer_abort(self, held: Any, abort: Any) -> None:
        if self.broken:
            raise RuntimeError("the client is gone")
        self.aborted.append(held.rid)

    def answer_health(self, request: Any) -> None:
        self.healthy.append(request)


def test_work_is_held_in_order_and_the_rest_passes() -> None:
    held = Held(Engine())
    assert held.hold([Work("a"), "flush", Work("b")]) == ["flush"]
    assert held.hold([Batch([Work("c"), Work("d")])]) == []
    assert len(held) == 4
    assert held.most == 4
    assert held.release() == [Work("a"), Work("b"), Batch([Work("c"), Work("d")])]
    assert len(held) == 0
    assert held.release() == []


def test_an_abort_ends_held_requests_and_still_passes() -> None:
    """An abort reaches what is held: a client that gives up must not run later."""
    engine = Engine()
    held = Held(engine)
    held.hold([Work("a1"), Work("a2"), Work("b")])
    assert held.hold([Abort("a")]) == [Abort("a")]
    assert engine.aborted == ["a1", "a2"]
    assert held.aborted == 2
    assert held.release() == [Work("b")]


def test_an_abort_that_comes_with_its_request_finds_it() -> None:
    engine = Engine()
    held = Held(engine)
    assert held.hold([Work("a"), Abort("a"), Work("b")]) == [Abort("a")]
    assert engine.aborted == ["a"]
    assert held.release() == [Work("b")]


def test_abort_all() -> None:
    engine = Engine()
    held = Held(engine)
    held.hold([Work("a"), Batch([Work("b"), Work("c")]), Abort(abort_all=True)])
    assert engine.aborted == ["a", "b", "c"]
    assert held.release() == []


def test_an_abort_takes_one_request_out_of_a_batch() -> None:
    engine = Engine()
    held = Held(engine)
    held.hold([Batch([Work("x1"), Work("y"), Work("x2")]), Abort("y")])
    assert engine.aborted == ["y"]
    assert held.release() == [Batch([Work("x1"), Work("x2")])]


def test_a_client_that_cannot_be_answered_is_out_all_the_same() -> None:
    held = Held(Engine(broken=True))
    held.hold([Work("a"), Abort("a")])
    assert held.release() == []


def test_health_checks_are_answered_while_held() -> None:
    engine = Engine()
    held = Held(engine)
    assert held.hold([Health(), Work("a")]) == []
    assert engine.healthy == [Health()]
    assert held.release() == [Work("a")]


def test_a_request_that_cannot_be_looked_at_leaves_none_behind() -> None:
    """The engine then goes on with all that it pulled: a request that was kept too would run twice."""

    class Broken(Engine):
        def is_abort(self, request: Any) -> bool:
            if request == "odd":
                raise RuntimeError("an odd request")
            return super().is_abort(request)

    held = Held(Broken())
    held.hold([Work("a")])
    with pytest.raises(RuntimeError):
        held.hold([Work("b"), "odd", Work("c")])
    assert held.release() == [Work("a")]
