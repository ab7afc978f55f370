"""What a swap does beside moving the object: the guard's live keys, and the counters."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.sglang.test_storage_guard import Store, guarded, page

from hicache_hooks.cache.config import Running
from hicache_hooks.cache.knobs import Knobs
from hicache_hooks.embedded.usage import UsageTotals
from hicache_hooks.guard_settings import GuardSettings
from hicache_hooks.sglang.adapter import SglangAdapter
from hicache_hooks.sglang.config import make_config
from hicache_hooks.sglang.parked import LiveChange, Parked
from hicache_proto.errors import Internal, InvalidConfig
from hicache_proto.model import TargetState
from hicache_proto.usage import MIN_LOOKUPS


class Live:
    """``LiveState`` that believes what it is told."""

    def __init__(self) -> None:
        self.now = Parked(Running(None, Knobs()))

    def parked(self) -> Parked:
        return self.now

    def installed(self, parked: Parked) -> None:
        self.now = parked

    def backend(self) -> Any:
        return self.now.backend

    def running(self) -> Running:
        return self.now.running


@pytest.fixture
def adapter() -> SglangAdapter:
    made: Any = SglangAdapter.__new__(SglangAdapter)
    nothing = lambda *_: None  # noqa: E731
    made._live, made._usage, made._unpublished = Live(), UsageTotals(), False
    made._installer = SimpleNamespace(install=nothing, live=nothing, show=nothing)
    result: SglangAdapter = made
    return result


def parked(deadline_s: float) -> Parked:
    config = make_config("file", {}, "{}", "0" * 32)
    return Parked(Running(config, Knobs(guard=GuardSettings(deadline_s=deadline_s))), guarded(Store()))


def test_each_set_brings_its_guards_settings_and_takes_them_back(adapter: SglangAdapter) -> None:
    a, b = parked(3.0), parked(4.0)
    adapter.swap(a)
    assert a.backend._core.settings.deadline_s == 3.0
    before = adapter.swap(LiveChange(Running(a.running.config, Knobs(guard=GuardSettings(deadline_s=5.0)))))
    assert a.backend._core.settings.deadline_s == 5.0
    adapter.swap_back(before)
    assert a.backend._core.settings.deadline_s == 3.0
    adapter.swap(b)
    assert b.backend._core.settings.deadline_s == 4.0


@pytest.mark.parametrize("what", ["set", "detach", "policies"])
def test_only_what_prepare_saw_is_replaced(adapter: SglangAdapter, what: str) -> None:
    """The engine's own PUT or DELETE came while a backend was built: nothing of it is closed or left out silently."""
    a, b, stranger = parked(3.0), parked(4.0), parked(5.0)
    adapter.swap(a)
    new = {
        "set": replace(b, base=a.backend),
        "detach": Parked(Running(None, Knobs()), base=a.backend),
        "policies": LiveChange(a.running, a.backend),
    }[what]
    for meanwhile in (stranger, Parked(Running(None, Knobs()))):
        adapter._live.installed(meanwhile)
        with pytest.raises(Internal) as caught:
            adapter.swap(new)
        assert caught.value.details["reason"] == "changed_meanwhile"
        assert adapter._live.backend() is meanwhile.backend
    adapter._live.installed(a)
    old = adapter.swap(new)
    adapter.swap_back(old)
    assert adapter._live.backend() is a.backend


def test_an_undo_counts_nothing_twice(adapter: SglangAdapter) -> None:
    """F91: attach A, swap to B, back to A."""
    a, b = parked(3.0), parked(4.0)
    a.backend.batch_set(["x"], [page()])
    adapter.swap(a)
    old = adapter.swap(b)
    adapter.swap_back(old)
    assert adapter.usage()["put"].hit == 1
    assert adapter.close(b, 1.0) == []
    assert adapter.close(a, 1.0) == []
    assert adapter.usage()["put"].hit == 1  # it is still what runs, here: met again after its end


def test_a_store_that_is_written_and_never_read_is_noticed(adapter: SglangAdapter) -> None:
    """F57: by store, while it is attached and after; one page that is read ends it."""
    a = parked(3.0)
    adapter.swap(a)
    a.backend.batch_set(["x"], [page()])
    for _ in range(MIN_LOOKUPS - 1):
        assert a.backend.batch_exists(["y"]) == 0
    (used,) = adapter.stores().values()
    assert (used.lookups, used.write_only) == (MIN_LOOKUPS - 1, False)
    assert a.backend.batch_exists(["y"]) == 0
    (used,) = adapter.stores().values()
    assert (used.ops["put"].hit, used.lookups, used.write_only) == (1, MIN_LOOKUPS, True)
    detached = Parked(Running(None, Knobs()), base=a.backend)
    adapter.swap(detached)
    assert [used.write_only for used in adapter.stores().values()] == [True]
    adapter.swap_back(a)
    a.backend.batch_get(["x"])
    (used,) = adapter.stores().values()
    assert (used.ops["get"].hit, used.write_only) == (1, False)


@pytest.mark.parametrize(
    ("watchdog_s", "deadline_s", "refused"),
    [(20, 30, True), (20, 20, True), (20, 19, False), (0, 30, False), (None, 30, False)],
)
def test_a_deadline_above_the_engines_watchdog_is_refused(
    adapter: Any, monkeypatch: pytest.MonkeyPatch, watchdog_s: float | None, deadline_s: float, refused: bool
) -> None:
    """F74: engine watchdog 20 s, deadline of a call 30 s -> ``deadline_exceeds_watchdog``; a detach is never."""
    monkeypatch.setattr("hicache_hooks.sglang.adapter.registered", lambda: ["file"])
    monkeypatch.setattr("hicache_hooks.sglang.frontend.limits", lambda scheduler: [])
    adapter._scheduler = SimpleNamespace(server_args=SimpleNamespace(watchdog_timeout=watchdog_s))
    adapter._problems, adapter._namespace, adapter._layout, adapter._l2_tokens = [], "0" * 32, "page_first", 1024
    text = f'{{"file_storage_path": "/a", "guard_deadline_s": {deadline_s}}}'
    validate = lambda target: adapter.validate(target, mode="normal", swap=False)  # noqa: E731
    if refused:
        with pytest.raises(InvalidConfig) as caught:
            validate(TargetState(backend="file", extra_config=text))
        assert caught.value.details["reason"] == "deadline_exceeds_watchdog"
        assert caught.value.status == 422
    else:
        assert validate(TargetState(backend="file", extra_config=text)).relation == "attach"
    adapter._live.installed(parked(deadline_s))
    assert validate(TargetState()).relation == "detach"
