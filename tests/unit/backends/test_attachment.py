"""PREPARE: a build leaves a parked set, or nothing at all when a step fails."""

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.rigs.backends import BK, Fault, Rig
from tests.unit.backends.support import ENV, FACTS, FORMAT, NOTHING, FakeSet, box, built, dynamic, file

from hicache_hooks.abandoned import THREADS
from hicache_hooks.backends.base import Got
from hicache_hooks.cache.attachment import MAX_LATE, StorageAttachment, effective_state
from hicache_hooks.cache.config import Running
from hicache_hooks.cache.knobs import Knobs
from hicache_hooks.cache.layouts import KvGeometry
from hicache_hooks.cache.pages import PageFormat
from hicache_hooks.cache.pools import DevicePool, HostPool
from hicache_hooks.cache.storage_set import StorageSet
from hicache_hooks.guard import Guard
from hicache_proto.errors import HicacheError, PrepareFailed
from hicache_proto.model import LAYOUTS, TargetState


def until(true: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 10
    while not true():
        assert time.monotonic() < give_up
        time.sleep(0.005)


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


@pytest.mark.parametrize("what", ["health", "epoch"])
def test_a_store_that_does_not_say_how_it_is_ends_prepare_by_name(rig: Rig, what: str) -> None:
    """F23, F117: refused at the guard's deadline, not the operation's; closed when the call is back, not under it;
    another store can be attached meanwhile, and such stores do not pile up (F46)."""
    attachment, threads, abandoned = box(), threading.active_count(), THREADS.count
    rig.faults[what] = Fault(hang=True)
    began = time.monotonic()
    for reason in (*[f"{what}_late"] * MAX_LATE, "store_late"):
        with pytest.raises(PrepareFailed) as caught:
            built(attachment, dynamic("EpochBK", config={"guard_deadline_s": 0.1}))
        assert caught.value.details["reason"] == reason
        if rig.open_now == 1:
            assert built(attachment, dynamic(config={"options": {"store": "other"}})).close(1.0) == []
    assert time.monotonic() - began < 10.0
    assert (rig.open_now, threading.active_count()) == (MAX_LATE, threads + MAX_LATE)
    assert THREADS.count == abandoned + MAX_LATE
    rig.release.set()
    until(lambda: rig.open_now == 0 and threading.active_count() == threads)
    assert THREADS.count == abandoned
    made = built(attachment, dynamic("EpochBK"))
    assert made.close(1.0) == []
    assert rig.calls["close"] == MAX_LATE + 1


def test_a_canary_that_fails_does_not_wait_for_the_health_of_the_store(rig: Rig) -> None:
    rig.faults |= {"batch_put": Fault(answer="none"), "health": Fault(hang=True)}
    with pytest.raises(PrepareFailed) as caught:
        built(box(), dynamic(config={"guard_deadline_s": 0.2}))
    assert caught.value.details["reason"] == "canary_write_failed"
    assert rig.open_now == 1
    rig.release.set()
    until(lambda: rig.open_now == 0)


@pytest.mark.parametrize(("facts", "inner", "warned"), [({"inner": "X"}, "X", 0), ({}, "unknown", 1)])
def test_status_names_what_stores_the_pages(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    facts: dict[str, str], inner: str, warned: int,
) -> None:  # fmt: skip
    """F75: BK reports inner="X" -> X; inner missing -> ``unknown`` and a warning."""
    monkeypatch.setattr(BK, "health", lambda self: facts)
    made = built(box(), dynamic())
    assert effective_state(made.running, made.guard, bypass=False).inner == inner
    assert sum("what stores its pages" in record.getMessage() for record in caplog.records) == warned


def test_a_store_of_ours_without_a_connector_is_not_unknown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """F75: ``file`` says enough by its name."""
    made = built(box(), file(tmp_path))
    state = effective_state(made.running, made.guard, bypass=False)
    assert state.inner == ""
    assert state.store == {
        "path": str(tmp_path), "direct_io": False, "direct_io_reason": "this backend uses the page cache",
    }, "F65: said where an operator looks, and nothing that changes by the minute"  # fmt: skip
    assert "what stores" not in caplog.text
    made.close(1.0)
