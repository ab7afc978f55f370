"""VALIDATE: what a plan says, and what is refused before anything is touched."""

import json
from pathlib import Path

import pytest
from tests.rigs.backends import OtherConstructorBK, Rig
from tests.unit.backends.support import FORMAT, NOTHING, FakeSet, box, built, dynamic, file

from hicache_hooks.backends import registry
from hicache_hooks.backends.aibrix_options import AibrixOptions
from hicache_hooks.cache.attachment import LiveChange, effective_state
from hicache_hooks.cache.writer import SELECTIVE_HITS
from hicache_proto.errors import (
    Forbidden,
    HicacheError,
    InvalidConfig,
    LayoutUnsupported,
    UnknownBackend,
    UnsupportedByEngine,
)
from hicache_proto.model import LAYOUTS, TargetState


def test_a_plan_touches_nothing(rig: Rig, tmp_path: Path) -> None:
    plan = box().validate(file(tmp_path / "new"), NOTHING)
    assert (plan.relation, plan.changed_keys) == ("attach", ["hicache_storage_backend"])
    assert plan.redacted_config == file(tmp_path / "new").extra_config
    assert len(plan.config_digest) == 64
    assert not (tmp_path / "new").exists()
    assert box().validate(dynamic(), NOTHING).relation == "attach"
    assert rig.calls == {}
    assert box().validate(TargetState(), NOTHING).relation == "same"


def test_the_answer_names_what_is_behind_the_backends_name(rig: Rig, tmp_path: Path) -> None:
    """F66: a plugin that nobody named is said; F75: the vendor's connector. Nothing to say of ``file``."""
    notes = {}
    for backend, config in (
        ("nixl", {"storage_dir": str(tmp_path)}),
        ("redis", {"url": "redis://h"}),
        ("file", {"file_storage_path": str(tmp_path)}),
    ):
        target = TargetState(backend=backend, extra_config=json.dumps(config))
        if not registry.entry(backend).load().missing():
            notes[backend] = box().validate(target, NOTHING).notes
    assert notes["file"] == []
    assert notes.get("nixl", ["nixl: POSIX"]) == ["nixl: POSIX"]
    assert notes.get("redis", []) == []
    inner = registry.entry("aibrix").load().inner
    assert inner(AibrixOptions(l1_capacity_gb=1.0, l2_backend="ROCKSDB")) == "L1+ROCKSDB"


@pytest.mark.parametrize("layout", [*LAYOUTS, "odd"])
def test_layouts_are_checked_against_the_manifest(rig: Rig, layout: str) -> None:
    """F47: refused with the allowed values, never switched silently."""
    attachment = box(layout=layout)
    for target, allowed in ((file(), LAYOUTS), (dynamic("PageFirstBK"), ("page_first", "page_head"))):
        if layout in allowed:
            assert attachment.validate(target, NOTHING).relation == "attach"
            continue
        with pytest.raises(LayoutUnsupported) as caught:
            attachment.validate(target, NOTHING)
        assert caught.value.details == {"layout": layout, "allowed": list(allowed)}
        assert layout in caught.value.message
    assert rig.calls == {}


def test_parallel_axes_are_checked(rig: Rig) -> None:
    """F76: no manifest on a pp_size=2 engine -> 422; with pp in the manifest -> fine."""
    with pytest.raises(UnsupportedByEngine) as caught:
        box(pp_size=2).validate(dynamic("NoManifestBK"), NOTHING)
    assert caught.value.details["axes"] == ["pp"]
    assert box(pp_size=2, tp_size=2).validate(dynamic("BK"), NOTHING).relation == "attach"
    assert box().validate(dynamic("NoManifestBK"), NOTHING).relation == "attach"


def test_geometry_is_checked(rig: Rig) -> None:
    """F49."""
    for facts in ({"page_bytes": 0}, {"page_size": 0}):
        with pytest.raises(InvalidConfig) as caught:
            box(**facts).validate(file(), NOTHING)
        assert caught.value.details["reason"] == "bad_geometry"


@pytest.mark.parametrize(
    ("target", "error"),
    [
        (TargetState(backend="nope"), UnknownBackend),
        (TargetState(backend="file", extra_config="{"), InvalidConfig),
        (file(config={"prefetch_threshold": True}), InvalidConfig),
        (file(write_policy="write-through"), InvalidConfig),
        (dynamic("NoBatchGetBK"), InvalidConfig),
        (dynamic("OtherConstructorBK"), InvalidConfig),
        (dynamic(config={"class_name": "Rig"}), Forbidden),
    ],
)
def test_refusals_come_before_anything_is_touched(rig: Rig, target: TargetState, error: type[HicacheError]) -> None:
    """F15, F18, F53, F60."""
    for action in (lambda: box().validate(target, NOTHING), lambda: box().build(target, NOTHING)):
        with pytest.raises(error):
            action()
    assert rig.calls == {}
    assert FakeSet.made == []
    assert OtherConstructorBK.constructed == 0


def test_hot_is_refused_where_the_engine_cannot() -> None:
    """interface.md."""
    with pytest.raises(UnsupportedByEngine):
        box(hot=False).validate(file(), NOTHING, mode="hot")
    assert box().validate(file(), NOTHING, mode="hot").relation == "attach"


def test_plans_explain_policies_and_warn(rig: Rig) -> None:
    """F61: what is stored when; F53: a threshold above the pool."""
    plan = box().validate(file(write_policy="write_through_selective", knobs={"prefetch_threshold": 5000}), NOTHING)
    assert f"({SELECTIVE_HITS} hits)" in plan.notes[0]
    assert "prefetch_threshold" in plan.warnings[0]
    plan = box().validate(file(), NOTHING)
    assert (plan.notes, plan.warnings) == ([], [])
    plan = box().validate(file(config={"max_size": FORMAT.page_bytes * 8}), NOTHING)
    assert "fewer than the host pool" in plan.warnings[0]


def test_live_keys_build_nothing(rig: Rig) -> None:
    """design.md, rule 9; F20."""
    first = built(box(), dynamic(config={"prefetch_threshold": 256}))
    before = dict(rig.calls)
    change = box().build(dynamic(config={"prefetch_threshold": 64}), first.running)
    assert isinstance(change, LiveChange)
    assert change.running.knobs.prefetch_threshold == 64
    assert change.running.config is not None
    assert dict(rig.calls) == before
    assert len(FakeSet.made) == 1
    plan = box().validate(dynamic(config={"prefetch_threshold": 64}), first.running)
    assert (plan.relation, plan.changed_keys) == ("live", ["prefetch_threshold"])
    state = effective_state(change.running, first.guard, bypass=False, revision=7)
    assert (state.knobs["prefetch_threshold"], state.revision, state.inner) == (64, 7, "dict")
