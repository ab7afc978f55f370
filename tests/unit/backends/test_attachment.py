"""The attach/detach box: what a plan says, and that a build leaves nothing behind when a step fails."""

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.rigs.backends import BK, Fault, OtherConstructorBK, Rig

from hicache_hooks.backends.base import Got
from hicache_hooks.cache.attachment import LiveChange, Parked, PoolFacts, StorageAttachment, effective_state
from hicache_hooks.cache.config import Running
from hicache_hooks.cache.knobs import Knobs
from hicache_hooks.cache.pages import PageFormat
from hicache_hooks.guard import Guard
from hicache_proto.errors import (
    Forbidden,
    HicacheError,
    InvalidConfig,
    LayoutUnsupported,
    PrepareFailed,
    UnknownBackend,
    UnsupportedByEngine,
)
from hicache_proto.model import LAYOUTS, TargetState

FORMAT = PageFormat(8000, "ns")
FACTS = PoolFacts(
    layout="page_first", page_size=16, page_bytes=FORMAT.page_bytes, l2_tokens=1024, namespace="ns", hot=True
)
CLASSES = ("BK", "RegisteringBK", "PageFirstBK", "NoManifestBK", "NoBatchGetBK", "OtherConstructorBK")
ENV = {"HICACHE_DYNAMIC_BACKENDS": ",".join(f"tests.rigs.backends:{name}" for name in CLASSES)}
NOTHING = Running(None, Knobs())


class FakeSet:
    """A storage set that records its life and fails on demand."""

    made: list["FakeSet"] = []  # noqa: RUF012 - shared on purpose, reset per test

    def __init__(self, guard: Guard | None, knobs: Knobs, name: str) -> None:
        self.guard, self.knobs, self.name = guard, knobs, name
        self.log: list[str] = []
        self.made.append(self)

    start_error: BaseException | None = None
    stuck: list[str] = []  # noqa: RUF012

    def start_parked(self) -> None:
        self.log.append("start")
        if type(self).start_error is not None:
            raise type(self).start_error

    def stop(self, timeout_s: float) -> list[str]:
        self.log.append("stop")
        return list(type(self).stuck)

    def close(self) -> bool:
        self.log.append("close")
        if self.guard is not None:
            self.guard.close()
        return True


@pytest.fixture
def rig() -> Iterator[Rig]:
    BK.reset()
    FakeSet.made.clear()
    yield BK.rig()
    FakeSet.start_error = None
    FakeSet.stuck = []
    BK.reset()


def box(make_set: Any = FakeSet, pools: Any = (), env: Any = ENV, **facts: Any) -> StorageAttachment:
    return StorageAttachment(replace(FACTS, **facts), make_set, FORMAT, pools, env=env)


def dynamic(class_name: str = "BK", **fields: Any) -> TargetState:
    config = {"module_path": "tests.rigs.backends", "class_name": class_name, **fields.pop("config", {})}
    return TargetState(backend="dynamic", extra_config=json.dumps(config), **fields)


def file(path: Path | str = "/x", **fields: Any) -> TargetState:
    config = {"file_storage_path": str(path), **fields.pop("config", {})}
    return TargetState(backend="file", extra_config=json.dumps(config), **fields)


def built(attachment: StorageAttachment, target: TargetState, current: Running = NOTHING) -> Parked:
    made = attachment.build(target, current)
    assert isinstance(made, Parked)
    return made


# ------------------------------------------------------------------ validate


def test_a_plan_touches_nothing(rig: Rig, tmp_path: Path) -> None:
    plan = box().validate(file(tmp_path / "new"), NOTHING)
    assert (plan.relation, plan.changed_keys) == ("attach", ["hicache_storage_backend"])
    assert plan.redacted_config == file(tmp_path / "new").extra_config
    assert len(plan.config_digest) == 64
    assert not (tmp_path / "new").exists()
    assert box().validate(dynamic(), NOTHING).relation == "attach"
    assert rig.calls == {}
    assert box().validate(TargetState(), NOTHING).relation == "same"


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
    assert "hit again" in plan.notes[0]
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


# ------------------------------------------------------------------ build


def test_a_built_set_is_parked_open_and_clean(rig: Rig) -> None:
    made = built(box(), dynamic())
    assert FakeSet.made[0].log == ["start"]
    assert rig.open_now == 1
    assert rig.data == {}
    assert made.guard is not None
    assert made.guard.usage()["put"].hit == 0, "the canary is not traffic"
    assert made.close(1.0) == []
    assert rig.calls["close"] == 1


def test_pools_are_registered_when_the_backend_needs_it(rig: Rig) -> None:
    pool = memoryview(bytearray(1 << 20))
    made = built(box(pools=[pool]), dynamic("RegisteringBK"))
    assert rig.registered[0] == 1 << 20
    assert rig.registered[1] % FORMAT.page_bytes == 0, "the canary's own pages"
    assert made.scratch is not None
    built(box(pools=[pool]), dynamic())
    assert len(rig.registered) == 2


_STEPS = [
    ("constructor", Fault(error=RuntimeError), 0),
    ("constructor", Fault(error=SystemExit), 0),
    ("open", Fault(error=PermissionError), 1),
    ("register", Fault(error=OSError), 1),
    ("register", Fault(error=OSError, every=2), 1),
    ("batch_put", Fault(answer="none"), 1),
    ("batch_get", Fault(answer="bytes"), 1),
]


@pytest.mark.parametrize(("method", "fault", "closes"), _STEPS)
def test_a_failing_step_undoes_the_former_ones(rig: Rig, method: str, fault: Fault, closes: int) -> None:
    """F14: closed exactly once if it was built, nothing left, and the next attach works at once."""
    rig.faults[method] = fault
    with pytest.raises(PrepareFailed) as caught:
        box(pools=[memoryview(bytearray(64))]).build(dynamic("RegisteringBK"), NOTHING)
    assert "undo_failed" not in caught.value.details
    assert rig.calls["close"] == closes
    assert rig.data == {}
    assert FakeSet.made == []
    rig.faults.clear()
    built(box(), dynamic("RegisteringBK"))


def test_a_set_that_does_not_start_closes_its_backend_once(rig: Rig) -> None:
    """F14, the last steps: threads, and the factory itself."""
    FakeSet.start_error = RuntimeError("can't start new thread")
    with pytest.raises(PrepareFailed) as caught:
        box().build(dynamic(), NOTHING)
    assert caught.value.details["step"] == "threads"
    assert FakeSet.made[0].log == ["start", "stop", "close"]
    assert rig.calls["close"] == 1

    def no_set(*args: object) -> FakeSet:
        raise MemoryError

    with pytest.raises(PrepareFailed):
        box(no_set).build(dynamic(), NOTHING)
    assert rig.calls["close"] == 2


def test_undo_goes_on_when_an_undo_step_fails_and_says_so(rig: Rig) -> None:
    """F28: every step is run, each guarded, errors collected."""
    rig.faults["close"] = Fault(error=OSError)
    rig.faults["batch_get"] = Fault(answer="bytes")
    with pytest.raises(PrepareFailed) as caught:
        box().build(dynamic(), NOTHING)
    assert caught.value.details["reason"] == "canary_mismatch"
    assert caught.value.details["undo_failed"] == ["close: OSError"]


def test_a_backend_is_not_closed_under_a_stuck_thread(rig: Rig) -> None:
    """F117: close count 0, and the stuck thread is named."""
    FakeSet.start_error = RuntimeError()
    FakeSet.stuck = ["prefetch-0"]
    with pytest.raises(PrepareFailed) as caught:
        box().build(dynamic(), NOTHING)
    assert caught.value.details["undo_failed"] == ["thread prefetch-0"]
    assert rig.calls["close"] == 0


def test_cancel_between_steps_undoes_everything(rig: Rig) -> None:
    for until in ("constructor", "open", "batch_put", "batch_exists"):
        BK.reset()
        now = BK.rig()
        with pytest.raises(PrepareFailed) as caught:
            box().build(dynamic(), NOTHING, lambda until=until, now=now: now.calls[until] > 0)
        assert caught.value.details["reason"] == "cancelled"
        assert now.calls["close"] == 1
        assert now.data == {}


def test_cancel_while_a_step_hangs_is_seen_after_it(rig: Rig) -> None:
    """design.md, rule 9: the builder closes what it built when the operation is over meanwhile."""
    rig.faults["open"] = Fault(hang=True)
    cancelled = threading.Event()
    errors: list[HicacheError] = []

    def build() -> None:
        try:
            box().build(dynamic(), NOTHING, cancelled.is_set)
        except HicacheError as exc:
            errors.append(exc)

    thread = threading.Thread(target=build)
    thread.start()
    assert rig.entered["open"].wait(10)
    cancelled.set()
    rig.release.set()
    thread.join(10)
    assert errors[0].details["reason"] == "cancelled"
    assert rig.calls["close"] == 1


def test_exceptions_text_stays_inside(rig: Rig) -> None:
    """F94: a failing backend that puts a secret into its exception."""
    secret = "s3cr3t-SENTINEL"
    for method in ("constructor", "open", "batch_put"):
        rig.faults = {method: Fault(error=OSError, text=secret)}
        with pytest.raises(PrepareFailed) as caught:
            box().build(dynamic(config={"options": {"password": secret}}), NOTHING)
        assert secret not in caught.value.message + repr(caught.value.details)
        assert caught.value.__context__ is None or caught.value.__suppress_context__
    plan = box().validate(dynamic(config={"options": {"password": secret}}), NOTHING)
    assert secret not in (plan.redacted_config or "") + repr(plan)


def test_a_directory_that_cannot_be_used_is_prepare_failed(rig: Rig, tmp_path: Path) -> None:
    """Issue: not writable on one rank only -> ``prepare_failed``; VALIDATE passes everywhere."""
    (tmp_path / "blocked").write_text("a file")
    target = file(tmp_path / "blocked" / "kv")
    assert box().validate(target, NOTHING).relation == "attach"
    with pytest.raises(PrepareFailed) as caught:
        box().build(target, NOTHING)
    assert caught.value.details == {"reason": "build_failed", "step": "open"}
    assert "Not a directory" in caught.value.message
    assert str(tmp_path) not in caught.value.message


def test_detach_builds_a_set_without_a_store(rig: Rig) -> None:
    first = built(box(), dynamic(config={"prefetch_threshold": 64}, write_policy="write_back"))
    plan = box().validate(TargetState(), first.running)
    assert plan.relation == "detach"
    made = built(box(), TargetState(), first.running)
    assert made.guard is None
    assert made.running == Running(None, Knobs(write_policy="write_back"))
    assert FakeSet.made[1].name == "detached"
    assert box().validate(TargetState(), made.running).relation == "same"
    assert effective_state(made.running, None, bypass=False).backend is None


def test_swap_builds_beside_the_running_one(rig: Rig) -> None:
    """B is built and probed while A serves; B's failure never touches A (F88)."""
    first = built(box(), dynamic(config={"options": {"store": "default"}}))
    BK.rig("b").faults["batch_exists"] = Fault(answer="none")
    with pytest.raises(PrepareFailed) as caught:
        box().build(dynamic(config={"options": {"store": "b"}}), first.running)
    assert caught.value.details["reason"] == "canary_exists_mismatch"
    assert rig.calls["close"] == 0
    BK.rig("b").faults.clear()
    built(box(), dynamic(config={"options": {"store": "b"}}), first.running)
    assert box().validate(dynamic(config={"options": {"store": "b"}}), first.running).changed_keys == ["options"]


def test_another_namespace_does_not_read_the_canary_or_pages(rig: Rig, tmp_path: Path) -> None:
    """F50: another fingerprint opens another namespace; nothing is found there, nothing fails."""
    fp8 = built(box(), file(tmp_path))
    page = memoryview(bytearray(FORMAT.page_bytes))
    FORMAT.seal(page, "ns.k")
    assert fp8.guard is not None
    assert fp8.guard.batch_put(["ns.k"], [page]) == [True]
    other = StorageAttachment(
        replace(FACTS, namespace="bf16"),
        FakeSet,
        PageFormat(8000, "bf16"),
        (),
        env=ENV,  # type: ignore[arg-type]
    )
    bf16 = built(other, file(tmp_path))
    assert bf16.guard is not None
    assert bf16.guard.batch_get(["bf16.k", "ns.k"], [page, page]) == [Got.MISS, Got.MISS]
    assert bf16.guard.clear() == 0
    assert fp8.guard.batch_exists(["ns.k"]) == [True]
    fp8.guard.close()
    bf16.guard.close()


# ------------------------------------------------------------------ with the real storage set


def test_the_real_set_runs_and_stops(rig: Rig, tmp_path: Path) -> None:
    """The same box over real pools and threads, in every layout; threads and descriptors are as before."""
    import os

    import torch

    from hicache_hooks.cache.layouts import KvGeometry
    from hicache_hooks.cache.pools import DevicePool, HostPool
    from hicache_hooks.cache.storage_set import StorageSet

    fds, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for layout in LAYOUTS:
        geometry = KvGeometry(2, 2, 8, 16, torch.float32, layout)
        device, host = DevicePool(geometry, 4), HostPool(geometry, 4)
        pages = PageFormat(geometry.payload_bytes, "ns")

        def make(guard: Guard | None, knobs: Knobs, name: str) -> StorageSet:
            return StorageSet(store=guard, device=device, host=host, pages=pages, knobs=knobs, name=name)  # noqa: B023

        facts = replace(FACTS, layout=layout, page_bytes=host.page_bytes)
        attachment = StorageAttachment(facts, make, pages, [host.memory()], env=ENV)
        made = built(attachment, file(tmp_path / layout))
        assert all(report.alive for report in made.set.threads())
        off = built(attachment, TargetState(), made.running)
        assert made.close(10) == []
        assert off.close(10) == []
        assert made.guard is not None
        assert made.guard.closed
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == fds
