"""What the adapter says about its guard, and what a live change of the guard's settings does."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.embedded.engines import text
from tests.unit.embedded.test_adapter import Attached, file_target

from hicache_hooks.cache.attachment import LiveChange
from hicache_hooks.embedded.usage import MAX_STORES, OTHERS
from hicache_hooks.guard_settings import GuardSettings
from hicache_proto.model import TargetState
from hicache_proto.usage import MIN_LOOKUPS


@pytest.fixture
def rig() -> Iterator[Attached]:
    made = Attached()
    yield made
    made.close()


def test_a_live_change_reaches_the_guard_and_its_undo_too(rig: Attached, tmp_path: Path) -> None:
    rig.move(file_target(tmp_path, guard_deadline_s=2))
    guard = rig.adapter._installed.guard
    assert guard is not None
    new = rig.build(file_target(tmp_path, guard_deadline_s=3, guard_min_calls=2))
    assert isinstance(new, LiveChange)
    old = rig.adapter.swap(new)
    assert guard._watch.settings == GuardSettings(deadline_s=3.0, min_calls=2)
    assert guard._watch.breakers["read"].settings.min_calls == 2
    rig.adapter.swap_back(old)
    assert guard._watch.settings == GuardSettings(deadline_s=2.0)
    assert rig.adapter._installed.guard is guard


@pytest.mark.parametrize("bypass", [False, True])
def test_a_detach_that_is_undone_leaves_the_bypass_as_it_was(rig: Attached, tmp_path: Path, bypass: bool) -> None:
    """F77: an operation that failed has not switched a store on that was kept away, nor away one that was used."""
    rig.move(file_target(tmp_path))
    assert rig.adapter.set_bypass(bypass) is False
    for target in (TargetState(), file_target(tmp_path / "other")):
        new = rig.build(target)
        old = rig.adapter.swap(new)
        assert not rig.adapter.effective().bypass
        rig.adapter.swap_back(old)
        assert rig.adapter.close(new, 5.0) == []
        assert (rig.adapter.effective().backend, rig.adapter.effective().bypass) == ("file", bypass)
        assert rig.adapter._installed.guard is not None
        assert rig.adapter._installed.guard.bypass is bypass


def test_the_report_is_there_while_a_store_is(rig: Attached, tmp_path: Path) -> None:
    assert rig.adapter.guard() is None
    rig.move(file_target(tmp_path))
    report = rig.adapter.guard()
    assert report is not None
    assert (report.name, report.breaker, sorted(report.sides)) == ("file", "closed", ["read", "write"])
    rig.move(TargetState())
    assert rig.adapter.guard() is None


def test_use_is_counted_by_store_and_outlives_it(rig: Attached, tmp_path: Path) -> None:
    """F91, F92: what was asked of a store is still known when another is in its place."""
    prompt = text(1, 100)
    rig.move(file_target(tmp_path / "a"))
    rig.engine.generate(prompt)
    rig.engine.idle()
    assert rig.engine.flush().ok
    rig.engine.generate(prompt)
    rig.engine.idle()
    rig.move(TargetState())
    used = rig.adapter.stores()["file"]
    assert used.ops["get"].hit == 6
    assert used.ops["put"].bytes > 0
    assert sum(used.ops["get"].latency.buckets) == used.ops["get"].latency.count > 0
    assert (used.lookups, used.write_only) == (2, False)
    assert rig.adapter.usage() == used.ops


def test_two_stores_of_one_kind_are_told_apart_by_their_instance(rig: Attached, tmp_path: Path) -> None:
    """F92: the operator's name is a line of its own; a new one is another store, and their number is capped."""
    for name in ("a", "b"):
        rig.move(file_target(tmp_path / name, instance=name))
        rig.engine.generate(text(1, 100))
        rig.engine.idle()
    assert rig.engine.flush().ok
    rig.engine.generate(text(1, 100))
    rig.engine.idle()
    used = rig.adapter.stores()
    assert sorted(used) == ["file@a", "file@b"]
    assert (used["file@a"].ops["get"].hit, used["file@b"].ops["get"].hit) == (0, 6)
    guard = rig.adapter.guard()
    assert guard is not None
    assert guard.name == "file", "policies are by backend"
    plan = rig.adapter.validate(file_target(tmp_path / "b", instance="c"), mode="strict", swap=False)
    assert (plan.relation, plan.changed_keys) == ("swap", ["instance"])
    for i in range(MAX_STORES):
        rig.move(file_target(tmp_path / "many", instance=f"n{i}"))
    assert len(rig.adapter.stores()) == MAX_STORES + 1
    assert OTHERS in rig.adapter.stores()


def test_a_store_that_is_written_and_never_read_is_noticed(rig: Attached, tmp_path: Path) -> None:
    """F57: every look-up is shorter than the threshold, so all that is written is for nothing."""
    config = {"file_storage_path": str(tmp_path), "prefetch_threshold": 512}
    rig.move(TargetState(backend="file", extra_config=json.dumps(config)))
    for i in range(MIN_LOOKUPS):
        rig.engine.generate(text(i, 20), new=1)
    rig.engine.idle()
    used = rig.adapter.stores()["file"]
    assert used.skipped == {"threshold": MIN_LOOKUPS}
    assert used.lookups == MIN_LOOKUPS
    assert used.ops["put"].hit > 0
    assert used.write_only
