"""The adapter in one process: attach, swap and detach around a rank that generates; equal tokens from L3."""

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.rigs.backends import BK, Fault
from tests.unit.embedded.engines import Engine, text

from hicache_hooks.embedded.adapter import EmbeddedAdapter
from hicache_proto.errors import HicacheError, InvalidRequest
from hicache_proto.model import MANDATORY_COUNTERS, EffectiveState, TargetState

DETACHED = TargetState()


def file_target(path: Path, policy: str = "wait_complete", **options: object) -> TargetState:
    config = {"file_storage_path": str(path), "prefetch_threshold": 16, **options}
    return TargetState(backend="file", extra_config=json.dumps(config), prefetch_policy=policy)


class Attached:
    """An engine, its adapter, and operations made by hand as the hook makes them."""

    def __init__(self, **changes: object) -> None:
        self.engine = Engine(**changes)
        self.published: list[EffectiveState] = []
        self.adapter = EmbeddedAdapter(self.engine.rank, publish=self.published.append)

    def build(self, target: TargetState) -> object:
        built = self.adapter.build(target, lambda: False)
        while target.backend is not None and not self.adapter.backfill_slice(0.001):
            pass
        return built

    def move(self, target: TargetState) -> object:
        """The whole operation; returns the closed old set."""
        new = self.build(target)
        old = self.adapter.swap(new)
        self.adapter.publish(new, 1)
        assert self.adapter.close(old, 5.0) == []
        return old

    def close(self) -> None:
        assert self.adapter.shutdown(5.0) == []


@pytest.fixture
def rig() -> Iterator[Attached]:
    made = Attached()
    yield made
    made.close()


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct", "page_head"])
def test_tokens_from_storage_are_the_computed_ones(tmp_path: Path, layout: str) -> None:
    """The core: recompute, L1, L2 and L3 give the same tokens, and the answer says where the KV came from."""
    rig = Attached(layout=layout)
    engine = rig.engine
    prompt = text(1, 250)
    computed = engine.generate(prompt)
    engine.idle()
    rig.move(file_target(tmp_path))
    assert engine.flush().ok
    stored = engine.generate(prompt)
    engine.idle()  # backed up
    assert engine.flush().ok
    fetched = engine.generate(prompt)
    assert (fetched.device, fetched.host, fetched.storage) == (0, 0, 240)
    assert fetched.output == stored.output == computed.output
    again = engine.generate(prompt)
    assert (again.device, again.storage) == (240, 0)
    assert again.output == computed.output
    engine.idle()
    assert engine.cache.stats().get("internal_errors", 0) == 0
    rig.close()


def test_pages_from_before_the_attach_reach_the_store(rig: Attached, tmp_path: Path) -> None:
    """F13: nodes without a hash chain are back-filled, or their children could not be named."""
    engine = rig.engine
    prompt = text(2, 150)
    before = engine.generate(prompt)
    engine.idle()
    rig.move(file_target(tmp_path))
    longer = prompt + text(3, 100)
    first = engine.generate(longer)
    engine.idle()
    assert engine.flush().ok
    fetched = engine.generate(longer)
    assert fetched.storage > 0
    assert fetched.output == first.output
    assert engine.generate(prompt).output == before.output


def test_two_ranks_share_one_directory(tmp_path: Path) -> None:
    """Replicas with the same weights read each other's pages."""
    one, two = Attached(), Attached()
    prompt = text(4, 200)
    for rig in (one, two):
        rig.move(file_target(tmp_path))
    expected = one.engine.generate(prompt)
    one.engine.idle()
    fetched = two.engine.generate(prompt)
    assert fetched.storage == 192
    assert fetched.output == expected.output
    one.close()
    two.close()


def test_another_model_never_reads_these_pages(tmp_path: Path) -> None:
    """F50: the fingerprint of the weights is in every key."""
    from hicache_hooks.embedded.options import ModelShape

    one, other = Attached(), Attached(model=ModelShape(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, seed=8))
    prompt = text(5, 200)
    for rig in (one, other):
        rig.move(file_target(tmp_path))
    one.engine.generate(prompt)
    one.engine.idle()
    assert other.engine.generate(prompt).storage == 0
    other.engine.idle()
    one.close()
    other.close()


def test_best_effort_uses_a_fetch_that_is_quicker_than_computing(rig: Attached, tmp_path: Path) -> None:
    engine = rig.engine
    rig.move(file_target(tmp_path, policy="best_effort"))
    prompt = text(13, 480)
    expected = engine.generate(prompt)
    engine.idle()
    assert engine.flush().ok
    fetched = engine.generate(prompt)
    assert fetched.storage == 464
    assert fetched.output == expected.output
    engine.idle()


@pytest.mark.parametrize("policy", ["best_effort", "timeout"])
def test_a_hanging_store_costs_a_bounded_wait(rig: Attached, monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    """F41, F80: the request is computed after its policy's patience; the fetch's pages come back when it ends."""
    monkeypatch.setenv("HICACHE_DYNAMIC_BACKENDS", "tests.rigs.backends:BK")
    engine, store = rig.engine, BK.rig(f"hang-{policy}")
    config = {
        "backend_name": "bk", "module_path": "tests.rigs.backends", "class_name": "BK",
        "options": {"store": f"hang-{policy}"}, "prefetch_threshold": 16, "prefetch_timeout_max": 0.2,
    }  # fmt: skip
    rig.move(TargetState(backend="dynamic", extra_config=json.dumps(config), prefetch_policy=policy))
    prompt = text(14, 240)
    expected = engine.generate(prompt)
    engine.idle()
    assert engine.flush().ok
    store.faults["batch_get"] = Fault(hang=True)
    began = time.monotonic()
    computed = engine.generate(prompt)
    assert computed.output == expected.output
    assert computed.storage == 0
    assert time.monotonic() - began < 5.0
    assert engine.scheduler.idle_report().counters["ongoing_prefetch"] == 1  # not idle while a thread may write (F27)
    store.release.set()
    engine.idle()


def damage(directory: Path) -> int:
    """Flip a payload byte of every stored page."""
    count = 0
    for path in directory.rglob("*"):
        if path.is_file() and path.stat().st_size >= 4096:
            data = bytearray(path.read_bytes())
            data[100] ^= 0xFF
            path.write_bytes(data)
            count += 1
    return count


def test_damaged_or_lost_pages_are_recomputed(rig: Attached, tmp_path: Path) -> None:
    """F80: a failed read never reaches the output and never raises into the scheduler."""
    engine = rig.engine
    rig.move(file_target(tmp_path))
    prompt = text(6, 250)
    expected = engine.generate(prompt)
    engine.idle()
    assert damage(tmp_path) >= 15
    assert engine.flush().ok
    damaged = engine.generate(prompt)
    assert damaged.storage == 0
    assert damaged.output == expected.output
    engine.idle()
    for entry in tmp_path.iterdir():
        shutil.rmtree(entry, ignore_errors=True)
    assert engine.flush().ok
    assert engine.generate(prompt).output == expected.output
    engine.idle()


def test_swap_and_detach_leave_nothing_behind(rig: Attached, tmp_path: Path) -> None:
    """F23, F43: threads are those of the start after any number of operations."""
    engine = rig.engine
    prompt = text(7, 120)
    expected = engine.generate(prompt).output
    engine.idle()
    before = {t.name.rsplit("-", 2)[-1] for t in threading.enumerate()}, threading.active_count()
    for turn in range(6):
        rig.move(file_target(tmp_path / str(turn % 2)))
        assert engine.generate(prompt).output == expected
        engine.idle()
    rig.move(DETACHED)
    assert engine.generate(prompt).output == expected
    assert threading.active_count() == before[1]
    assert rig.adapter.effective().backend is None


def test_live_keys_change_without_a_new_set(rig: Attached, tmp_path: Path) -> None:
    """F20: what changed is what the live objects run, and going back restores them exactly."""
    rig.move(file_target(tmp_path))
    running = rig.engine.cache.storage
    same = TargetState(backend="file", knobs={"prefetch_threshold": 64}, prefetch_policy="timeout")
    plan = rig.adapter.validate(same, mode="strict", swap=False)
    assert plan.relation == "live"
    old = rig.adapter.swap(rig.build(same))
    assert rig.engine.cache.storage is running
    assert running.knobs.prefetch_threshold == 64
    assert rig.adapter.effective().prefetch_policy == "timeout"
    rig.adapter.swap_back(old)
    assert running.knobs.prefetch_threshold == 16
    assert rig.adapter.effective().prefetch_policy == "wait_complete"


def test_swapping_back_installs_the_very_set(rig: Attached, tmp_path: Path) -> None:
    rig.move(file_target(tmp_path / "a"))
    first = rig.engine.cache.storage
    new = rig.build(file_target(tmp_path / "b"))
    old = rig.adapter.swap(new)
    assert rig.engine.cache.storage is not first
    replaced = rig.adapter.swap_back(old)
    assert replaced is new
    assert rig.engine.cache.storage is first
    assert rig.adapter.close(replaced, 5.0) == []
    prompt = text(8, 100)
    assert rig.engine.generate(prompt).output == rig.engine.generate(prompt).output
    rig.engine.idle()
    assert rig.adapter.usage()["put"].hit > 0


def test_hot_swaps_under_load_change_no_output(tmp_path: Path) -> None:
    """Mode hot: sets change while requests run; none fails, all outputs equal those without a swap."""
    plain = Engine()
    prompts = [text(100 + i, 60 + 25 * i) for i in range(8)]
    expected = [plain.generate(p, 12).output for p in prompts]
    plain.close()
    rig = Attached(l1_tokens=640, l2_tokens=1024)
    engine = rig.engine
    rig.move(file_target(tmp_path / "a"))
    for turn in range(20):
        rids = [engine.submit(p, 12) for p in prompts]
        for _ in range(2 + turn % 5):
            engine.pass_()
        parked = rig.adapter.swap(rig.build(file_target(tmp_path / "ba"[turn % 2])))
        assert [d.output for d in engine.finish(rids)] == expected
        closed: list[list[str]] = []

        def close(parked: object = parked, closed: list[list[str]] = closed) -> None:
            closed.append(rig.adapter.close(parked, 5.0))
            engine.woken.set()

        closing = threading.Thread(target=close)
        closing.start()  # off the scheduler thread, which goes on pumping completions
        engine.until("closed set", lambda c=closed: c == [[]])
        closing.join(5.0)
    engine.idle()
    assert engine.cache.stats().get("internal_errors", 0) == 0
    assert rig.adapter.usage()["get"].hit > 0
    rig.close()


def test_bypass_works_at_once_and_under_load(rig: Attached, tmp_path: Path) -> None:
    """F77: reads miss and writes are skipped; going back is as quick."""
    engine = rig.engine
    rig.move(file_target(tmp_path))
    prompt = text(9, 200)
    expected = engine.generate(prompt).output
    engine.idle()
    assert rig.adapter.set_bypass(True) is False
    assert rig.adapter.effective().bypass
    assert engine.flush().ok
    missed = engine.generate(prompt)
    assert (missed.storage, missed.output) == (0, expected)
    engine.idle()
    assert rig.adapter.set_bypass(False) is True
    assert engine.flush().ok
    assert engine.generate(prompt).storage == 192
    engine.idle()


@pytest.mark.parametrize(
    ("target", "code"),
    [
        (TargetState(backend="nothing"), "unknown_backend"),
        (TargetState(backend="file", extra_config="{"), "invalid_config"),
        (TargetState(backend="file", extra_config='{"file_storage_path": 3}'), "invalid_config"),
        (TargetState(backend="file", extra_config='{"prefetch_threshold": true}'), "invalid_config"),
    ],
)
def test_bad_targets_are_refused_before_anything_is_touched(rig: Attached, target: TargetState, code: str) -> None:
    threads = threading.active_count()
    for refuse in (
        lambda: rig.adapter.validate(target, mode="strict", swap=False),
        lambda: rig.adapter.build(target, lambda: False),
    ):
        with pytest.raises(HicacheError) as caught:
            refuse()
        assert caught.value.code == code
    assert threading.active_count() == threads
    assert rig.adapter.effective().backend is None


def test_clear_removes_this_namespace_only(rig: Attached, tmp_path: Path) -> None:
    """F68: limited to our namespace, counted; refused for another one and when nothing is attached."""
    with pytest.raises(InvalidRequest):
        rig.adapter.clear(rig.engine.rank.namespace)
    rig.move(file_target(tmp_path))
    prompt = text(11, 200)
    rig.engine.generate(prompt)
    rig.engine.idle()
    with pytest.raises(InvalidRequest):
        rig.adapter.clear("another")
    assert rig.adapter.clear(rig.engine.rank.namespace) >= 12
    assert rig.engine.flush().ok
    assert rig.engine.generate(prompt).storage == 0
    rig.engine.idle()


def test_views_agree_and_name_everything(rig: Attached, tmp_path: Path) -> None:
    assert set(MANDATORY_COUNTERS) <= set(rig.adapter.idle_report().counters)
    assert rig.adapter.layers() == {}
    rig.move(file_target(tmp_path))
    assert rig.adapter.layers() == {}
    assert rig.published[-1].backend == "file"
    assert rig.published[-1].revision == 1
    rig.engine.cache.install(rig.adapter.build(DETACHED, lambda: False).set)  # type: ignore[attr-defined]
    assert rig.adapter.layers() == {"config": "file", "backend": "file", "controller": "none"}
    capabilities = rig.adapter.capabilities()
    assert capabilities.fingerprint == rig.engine.rank.namespace
    assert capabilities.page_bytes == rig.engine.rank.host.geometry.payload_bytes
    assert rig.adapter.threads()
    stray = rig.engine.cache.storage
    assert stray.stop(5.0) == []


def test_usage_never_goes_down_when_sets_change(rig: Attached, tmp_path: Path) -> None:
    """F91: counters survive a swap and a detach."""
    rig.move(file_target(tmp_path / "a"))
    rig.engine.generate(text(12, 200))
    rig.engine.idle()
    stored = rig.adapter.usage()["put"].hit
    assert stored >= 12
    rig.move(file_target(tmp_path / "b"))
    assert rig.adapter.usage()["put"].hit == stored
    rig.move(DETACHED)
    assert rig.adapter.usage()["put"].hit == stored


def test_a_target_is_compared_with_what_runs(rig: Attached, tmp_path: Path) -> None:
    relation: Callable[[TargetState], str] = lambda t: rig.adapter.validate(t, mode="hot", swap=True).relation  # noqa: E731
    assert relation(DETACHED) == "same"
    assert relation(file_target(tmp_path)) == "attach"
    rig.move(file_target(tmp_path))
    assert relation(file_target(tmp_path)) == "same"
    assert relation(file_target(tmp_path / "other")) == "swap"
    assert relation(DETACHED) == "detach"
