"""The frontend hook: it writes what it is told into the engine's own view, and says no to everything else."""

from types import SimpleNamespace
from typing import Any

import pytest

from hicache_hooks.sglang.frontend import SOURCE, WORKERS_LIMIT, Frontend, limits
from hicache_proto.hooklink import AskReport, Bypass, Call, CallBody, SetView, phase_of
from hicache_proto.model import TargetState


class Answers:
    """Stands for the agent's outbox."""

    def __init__(self) -> None:
        self.got: list[Any] = []

    def answer(self, call: Call, *, ok: bool, error: Any = None) -> None:
        self.got.append((ok, None if error is None else error.code))


@pytest.fixture
def front() -> Any:
    recorded: list[tuple[str, dict[str, Any]]] = []

    def record(source: str, **fields: Any) -> None:
        if recorded and recorded[-1][1].get("hicache_storage_backend") == "explode":
            raise ValueError("config not published")
        recorded.append((source, fields))

    made: Any = Frontend(record, "ipc:///nowhere", engine_id="e", incarnation="i", start=False)
    made.agent, made.recorded = Answers(), recorded
    return made


def ask(front: Any, body: CallBody) -> Any:
    front.deliver(Call(session="s", n=0, phase=phase_of(body), call=1, body=body))
    return front.agent.got[-1]


def test_the_view_is_written(front: Any) -> None:
    target = TargetState(backend="file", extra_config="{}", prefetch_policy="timeout", write_policy="write_through")
    assert ask(front, SetView(target=target)) == (True, None)
    assert front.recorded == [(SOURCE, {
        "hicache_storage_backend": "file",
        "hicache_storage_backend_extra_config": "{}",
        "hicache_storage_prefetch_policy": "timeout",
        "hicache_write_policy": "write_through",
    })]  # fmt: skip


def test_a_detached_view_keeps_policies_that_nobody_named(front: Any) -> None:
    assert ask(front, SetView(target=TargetState(extra_config="{}"))) == (True, None)
    assert front.recorded[0][1] == {
        "hicache_storage_backend": None,
        "hicache_storage_backend_extra_config": None,
    }


def test_a_view_that_cannot_be_written_is_an_error_not_an_exception(front: Any) -> None:
    ask(front, SetView(target=TargetState(backend="explode")))
    assert ask(front, SetView(target=TargetState(backend="file"))) == (False, "internal")


def test_other_calls(front: Any) -> None:
    assert ask(front, AskReport()) == (True, None)
    assert ask(front, Bypass(enabled=True)) == (False, "unsupported_by_engine")


@pytest.mark.parametrize(("workers", "named"), [(1, False), (2, True), (None, False)])
def test_several_http_workers_are_named_as_a_limit(workers: int | None, named: bool) -> None:
    scheduler = SimpleNamespace(server_args=SimpleNamespace(tokenizer_worker_num=workers))
    assert limits(scheduler) == ([WORKERS_LIMIT] if named else [])


def test_its_hello_is_a_frontends(front: Any) -> None:
    hello = front._hello("abc")
    assert (hello.role, hello.session, hello.engine_id, hello.incarnation) == ("frontend", "abc", "e", "i")
