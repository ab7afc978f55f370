"""COMMIT and UNDO on SGLang, against a small copy of its attach and detach: what moves, comes back, stays open.

The copy follows ``managers/cache_controller.py`` and ``storage_attachment.py`` of 0.5.23; the real engine runs the same
steps in tests/sglang.
"""

import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from hicache_hooks.cache.config import Running
from hicache_hooks.cache.knobs import Knobs
from hicache_hooks.sglang import handover
from hicache_hooks.sglang.config import make_config
from hicache_hooks.sglang.groups import GROUPS
from hicache_hooks.sglang.install import Installer
from hicache_hooks.sglang.live_state import LiveState
from hicache_hooks.sglang.ours import is_ours
from hicache_hooks.sglang.parked import Parked
from hicache_proto.errors import Internal

KNOBS = Knobs(prefetch_threshold=64, prefetch_policy="timeout")
OFF = Knobs(prefetch_policy="timeout")


class Store:
    """A backend object."""

    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


class Threads:
    """The controller's threads, never busy unless told."""

    def __init__(self) -> None:
        self.at_work: list[str] = []

    def busy(self) -> list[str]:
        return self.at_work

    def repair(self) -> list[str]:
        return []


class Engine:
    """Scheduler, tree, attachment and controller in one, with the engine's names."""

    def __init__(self) -> None:
        self.view: dict[str, Any] = {}
        self.made_groups = 0
        self.destroyed: list[Any] = []
        self.started = self.stopped = 0
        self.fail_attach = ""
        self.fail_late = False  # after the threads run
        self.ours: list[bool] = []
        # controller
        self.enable_storage = False
        self.storage_backend: Any = None
        self.storage_backend_type: str | None = None
        self.storage_config: Any = None
        self.page_size = 64
        self.prefetch_threshold = 0
        self.page_get_func = self.page_set_func = self._generic_page_get
        self.prefetch_hits_sync_groups: list[Any] = []
        self.prefetch_completion_sync_groups: list[Any] = []
        self.storage_stop_event = threading.Event()
        self.write_policy = "write_through"
        # tree
        self.cache_controller = self.tree_cache = self.tree_core = self._storage_attachment = self
        self.prefetch_stop_policy = "timeout"
        self.write_through_threshold, self.is_write_back = 1, False
        self.prefetch_timeout_base = self.prefetch_timeout_per_page = 0.0
        self.hicache_storage_pass_prefix_keys = False
        self.host_memory_mode = "cache"
        self.compatible = True
        self._enable_metrics_flag, self.extra_metric_labels = False, None
        self.storage_existence_cache = {"belief"}
        # scheduler
        self.enable_hicache_storage = False

    # controller
    def _generic_page_get(self) -> None: ...
    def _generic_page_set(self) -> None: ...
    def _page_get_zero_copy(self) -> None: ...
    def _page_set_zero_copy(self) -> None: ...

    def _create_sync_groups(self) -> list[Any]:
        self.made_groups += 1
        return [f"group {self.made_groups}"]

    def _destroy_sync_groups(self, groups: list[Any]) -> None:
        self.destroyed += groups

    # tree
    def is_write_through_compatible(self) -> bool:
        return self.compatible

    def resolve_prefetch_threshold(self, threshold: int) -> int:
        return threshold

    def _apply_policies(self, prefetch: str, write: str) -> None:
        self.prefetch_stop_policy, self.write_policy = prefetch, write
        self.is_write_back = write == "write_back"

    def apply_runtime_config(self, **values: Any) -> None:
        self.prefetch_timeout_base = values["prefetch_timeout_base"]
        self.prefetch_timeout_per_page = 64 / 1024 * values["prefetch_timeout_per_ki_token"]
        self.hicache_storage_pass_prefix_keys = values["hicache_storage_pass_prefix_keys"]

    # scheduler
    def attach_hicache_storage_wrapped(self, request: Any) -> Any:
        self.ours.append(is_ours())
        if self.fail_attach:
            return SimpleNamespace(success=False, message=self.fail_attach)
        self._apply_policies(request.hicache_storage_prefetch_policy, request.hicache_write_policy)
        self.storage_backend = handover.create_backend(lambda cls: Store(), object)
        self.storage_backend_type = request.hicache_storage_backend
        self.storage_config = "the engine's"
        self.prefetch_hits_sync_groups = self._create_sync_groups()
        self.prefetch_completion_sync_groups = self._create_sync_groups()
        self.enable_storage = self.enable_hicache_storage = True
        self.started += 1
        if self.fail_late:
            self.enable_hicache_storage = False
            return SimpleNamespace(success=False, message="no hash extension")
        self.view["hicache_storage_backend_extra_config"] = request.hicache_storage_backend_extra_config_json
        self.apply_runtime_config(
            prefetch_timeout_base=1.0, prefetch_timeout_per_ki_token=0.25, hicache_storage_pass_prefix_keys=False
        )
        self.prefetch_threshold = 64
        return SimpleNamespace(success=True, message="")

    def detach_hicache_storage_wrapped(self, request: Any) -> Any:
        self.ours.append(is_ours())
        self.stopped += 1
        if self.fail_attach:
            return SimpleNamespace(success=False, message=self.fail_attach)
        for name in GROUPS:
            self._destroy_sync_groups(getattr(self, name))
            setattr(self, name, [])
        if hasattr(self.storage_backend, "close"):
            self.storage_backend.close()
        self.storage_backend = self.storage_backend_type = None
        self.enable_storage = self.enable_hicache_storage = False
        return SimpleNamespace(success=True, message="")


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    made = Engine()
    io_struct = ModuleType("io_struct")
    for name in ("AttachHiCacheStorageReqInput", "DetachHiCacheStorageReqInput"):
        setattr(io_struct, name, SimpleNamespace)
    context = ModuleType("runtime_context")
    context.get_context = lambda: SimpleNamespace(  # type: ignore[attr-defined]
        override=lambda source, **fields: made.view.update(fields), config_leaf=made.view.get
    )
    for name in ("sglang", "sglang.srt", "sglang.srt.managers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.io_struct", io_struct)
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)
    return made


def parked(backend: Any, path: str = "/a", knobs: Knobs = KNOBS, name: str = "file") -> Parked:
    if backend is None:
        return Parked(Running(None, knobs))
    config = make_config(name, {"file_storage_path": path}, f'{{"file_storage_path": "{path}"}}', "0" * 32)
    return Parked(Running(config, knobs), backend, SimpleNamespace(extra_config={}))


def test_attach_hands_over_what_was_built(engine: Engine) -> None:
    installer, store = Installer(engine, Threads()), Store()  # type: ignore[arg-type]
    installer.install(parked(store))
    assert engine.storage_backend is store
    assert engine.ours == [True]
    assert not store.closed


def test_detach_leaves_the_store_open_and_the_way_back_makes_no_groups(engine: Engine) -> None:
    """Rule 11: making groups is a collective; an UNDO that one rank alone takes must not enter one."""
    installer, store = Installer(engine, Threads()), Store()  # type: ignore[arg-type]
    installer.install(parked(store))
    groups = [getattr(engine, name) for name in GROUPS]
    installer.install(parked(None, knobs=OFF))
    assert (engine.enable_storage, store.closed) == (False, False)
    installer.install(parked(store))  # UNDO
    assert engine.storage_backend is store
    assert [getattr(engine, name) for name in GROUPS] == groups
    assert engine.made_groups == 2
    installer.install(parked(None, knobs=OFF))
    installer.install(parked(Store()))
    assert engine.made_groups == 2
    assert engine._create_sync_groups.__func__ is Engine._create_sync_groups  # type: ignore[attr-defined]


def test_a_swap_exchanges_the_object_and_all_that_hangs_on_it(engine: Engine) -> None:
    installer, one, two = Installer(engine, Threads()), Store(), Store()  # type: ignore[arg-type]
    installer.install(parked(one))
    other = parked(two, name="mooncake", knobs=Knobs(prefetch_threshold=32, prefetch_policy="best_effort"))
    installer.install(other)
    assert (engine.started, engine.stopped) == (1, 0)  # no thread was touched
    assert engine.storage_backend is two
    assert engine.storage_backend_type == "mooncake"
    assert engine.storage_config is other.storage_config
    assert engine.page_get_func == engine._page_get_zero_copy
    assert engine.prefetch_threshold == 64  # never below a page
    assert engine.prefetch_stop_policy == "best_effort"
    assert engine.storage_existence_cache == set()
    installer.install(parked(one))
    assert engine.page_get_func == engine._generic_page_get
    assert (engine.storage_backend_type, engine.prefetch_stop_policy) == ("file", "timeout")
    assert not one.closed
    assert not two.closed


def test_a_swap_that_fails_halfway_changed_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """``EngineAdapter.swap``: if it raises, nothing changed."""
    installer, one = Installer(engine, Threads()), Store()  # type: ignore[arg-type]
    installer.install(parked(one))
    before = {name: value for name, value in vars(engine).items() if name != "view"}
    monkeypatch.setattr(Engine, "apply_runtime_config", lambda self, **values: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        installer.install(parked(Store(), name="mooncake", knobs=Knobs(prefetch_policy="best_effort")))
    assert {name: value for name, value in vars(engine).items() if name != "view"} == before


def test_what_the_engine_refuses_is_told_and_leaves_the_old_state(engine: Engine) -> None:
    installer, store = Installer(engine, Threads()), Store()  # type: ignore[arg-type]
    engine.fail_attach = "no"
    with pytest.raises(Internal, match="no"):
        installer.install(parked(store))
    assert (engine.enable_storage, store.closed) == (False, False)
    engine.fail_attach = ""
    installer.install(parked(store))
    groups = [getattr(engine, name) for name in GROUPS]
    engine.fail_attach = "threads do not stop"
    with pytest.raises(Internal, match="do not stop"):
        installer.install(parked(None))
    assert engine.storage_backend is store
    assert [getattr(engine, name) for name in GROUPS] == groups


def test_the_engines_ten_second_joins_are_never_entered(engine: Engine) -> None:
    """F11: a busy thread refuses the detach before the engine's own stop is called."""
    threads = Threads()
    installer = Installer(engine, threads)  # type: ignore[arg-type]
    installer.install(parked(Store()))
    threads.at_work = ["backup_thread"]
    with pytest.raises(Internal, match="backup_thread"):
        installer.install(parked(None))
    assert engine.stopped == 0
    assert engine.enable_storage


def test_leaving_write_back_needs_a_tree_that_allows_it(engine: Engine) -> None:
    installer = Installer(engine, Threads())  # type: ignore[arg-type]
    engine.is_write_back, engine.compatible, engine.write_policy = True, False, "write_back"
    with pytest.raises(Internal) as caught:
        installer.install(parked(Store()))
    assert caught.value.details["reason"] == "needs_flush"
    assert not engine.enable_storage
    installer.install(parked(Store(), knobs=Knobs(write_policy="write_back")))
    assert engine.enable_storage


def test_a_backend_of_the_engines_own_making_is_not_taken(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "guard_storage", lambda store: store)
    monkeypatch.setattr(handover._here, "offered", None, raising=False)
    installer, store = Installer(engine, Threads()), Store()  # type: ignore[arg-type]
    monkeypatch.setattr("hicache_hooks.sglang.install.handover.offer", lambda backend: threading.Lock())
    with pytest.raises(Internal) as caught:
        installer.install(parked(store))
    assert caught.value.details["reason"] == "handover"
    assert not engine.enable_storage


def test_status_reads_what_is(engine: Engine) -> None:
    """F22: the engine's own PUT over ours is seen; what it attached itself is told as its own view says."""
    installer, live, store = Installer(engine, Threads()), LiveState(engine, "0" * 32), Store()  # type: ignore[arg-type]
    new = parked(store)
    installer.install(new)
    live.installed(new)
    installer.show(new.running)
    state = live.effective()
    assert (state.backend, state.extra_config) == ("file", '{"file_storage_path": "/a"}')
    assert state.knobs["prefetch_threshold"] == 64
    assert live.layers() == {}
    engine._apply_policies("best_effort", "write_back")
    assert (live.effective().prefetch_policy, live.effective().write_policy) == ("best_effort", "write_back")
    engine.storage_backend = Store()  # detached and attached behind our back
    engine.view["hicache_storage_backend_extra_config"] = '{"file_storage_path": "/b", "password": "x"}'
    state = live.effective()
    assert state.extra_config is not None
    assert "/b" in state.extra_config
    assert '"x"' not in state.extra_config
    engine.enable_storage = False
    assert live.effective().backend is None
    assert set(live.layers().values()) == {"none", "on", "file"}


def test_an_attach_that_fails_with_its_threads_running_is_taken_back(engine: Engine) -> None:
    """F14, F117: the engine says that it failed and runs on, on a store that is closed next; the old state stays."""
    broken: list[str] = []
    installer, store = Installer(engine, Threads(), broken.append), Store()  # type: ignore[arg-type]
    engine.fail_late = True
    with pytest.raises(Internal, match="no hash extension"):
        installer.install(parked(store, knobs=Knobs(write_policy="write_back", prefetch_policy="best_effort")))
    assert (engine.enable_storage, engine.stopped, store.closed) == (False, 1, False)
    assert (engine.write_policy, engine.prefetch_stop_policy, engine.is_write_back) == (
        "write_through",
        "timeout",
        False,
    )
    assert installer.groups.here()  # of the attach that failed: the engine did not destroy them
    engine.fail_late = False
    installer.install(parked(store))
    assert engine.made_groups == 2
    assert broken == []


def test_a_failed_attach_that_cannot_be_taken_back_is_told(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """F28: nobody knows what the engine uses then, so nothing is changed any more."""
    monkeypatch.setattr("hicache_hooks.sglang.install.START_S", 0.0)
    threads = Threads()
    broken: list[str] = []
    threads.at_work = ["backup_thread"]
    installer = Installer(engine, threads, broken.append)  # type: ignore[arg-type]
    engine.fail_late = True
    with pytest.raises(Internal, match="backup_thread"):
        installer.install(parked(Store()))
    assert len(broken) == 1


def test_a_detach_whose_policies_are_refused_leaves_storage_on(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    installer, store = Installer(engine, Threads()), Store()  # type: ignore[arg-type]
    installer.install(parked(store))
    monkeypatch.setattr(Engine, "_apply_policies", lambda self, prefetch, write: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        installer.install(parked(None, knobs=Knobs(prefetch_policy="best_effort")))
    assert engine.enable_storage
    assert engine.storage_backend is store
    assert engine.stopped == 0


def test_a_failed_attach_keeps_its_groups(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """F114: the engine's attach destroys its groups when it fails; ours it does not, so no rank is without alone."""
    installer, store = Installer(engine, Threads()), Store()  # type: ignore[arg-type]
    assert not installer.groups.here()
    installer.groups.make()
    assert installer.groups.here()

    def attach(self: Engine, request: Any) -> Any:
        groups = self._create_sync_groups() + self._create_sync_groups()
        self._destroy_sync_groups(groups)
        return SimpleNamespace(success=False, message="no thread")

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "attach_hicache_storage_wrapped", attach)
        with pytest.raises(Internal):
            installer.install(parked(store))
    assert installer.groups.here()
    installer.install(parked(store))
    assert (engine.made_groups, engine.destroyed) == (2, [])
    assert engine._destroy_sync_groups.__func__ is Engine._destroy_sync_groups  # type: ignore[attr-defined]


def test_an_attach_and_a_detach_of_the_engines_own(engine: Engine) -> None:
    """It makes its own groups beside ours, and ours are not lost; over ours it destroys them, and here() says so."""
    installer = Installer(engine, Threads())  # type: ignore[arg-type]
    installer.groups.make()
    stock = SimpleNamespace(
        hicache_storage_backend="file", hicache_storage_backend_extra_config_json="{}",
        hicache_storage_prefetch_policy="timeout", hicache_write_policy="write_through",
    )  # fmt: skip
    engine.attach_hicache_storage_wrapped(stock)
    installer.install(parked(None, knobs=OFF))  # ours, of what the engine attached
    assert engine.destroyed == ["group 3", "group 4"]
    installer.install(parked(Store()))
    assert [getattr(engine, name) for name in GROUPS] == [["group 1"], ["group 2"]]
    engine.detach_hicache_storage_wrapped(SimpleNamespace())
    assert engine.destroyed == ["group 3", "group 4", "group 1", "group 2"]
    assert not installer.groups.here()


def test_secrets_do_not_stay_in_the_engines_view(engine: Engine) -> None:
    """F94: the engine's attach writes the whole text into its context; nobody waits for FINALIZE."""
    config = make_config("mooncake", {"password": "hunter2"}, '{"password": "hunter2"}', "0" * 32)
    new = Parked(Running(config, KNOBS), Store(), SimpleNamespace(extra_config={}))
    Installer(engine, Threads()).install(new)  # type: ignore[arg-type]
    assert engine.view["hicache_storage_backend"] == "mooncake"
    assert "hunter2" not in str(engine.view)
