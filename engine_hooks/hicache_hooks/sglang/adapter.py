"""SGLang's scheduler as the hook sees it: ``EngineAdapter`` over the live scheduler, its tree and its controller."""

import importlib.util
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hicache_hooks.cache.config import Running, compare, knob_warnings
from hicache_hooks.cache.knobs import policy_notes
from hicache_hooks.embedded.usage import UsageTotals
from hicache_hooks.sglang import frontend, topology
from hicache_hooks.sglang.backfill import TreeBackfill
from hicache_hooks.sglang.build import BackendBuilder, wait_and_close
from hicache_hooks.sglang.clear import clear_namespace
from hicache_hooks.sglang.config import FILE, FILE_PATH_KEY, EngineConfig, check_watchdog, registered, resolve
from hicache_hooks.sglang.idle import idle_report
from hicache_hooks.sglang.install import Installer
from hicache_hooks.sglang.live_state import LiveState
from hicache_hooks.sglang.parked import ANYTHING, LiveChange, Parked
from hicache_hooks.sglang.threads import StorageThreads
from hicache_proto.errors import BackendUnavailable, Internal, InvalidRequest, LayoutUnsupported, UnsupportedByEngine
from hicache_proto.model import (
    Capabilities,
    EffectiveState,
    GuardReport,
    IdleReport,
    Mode,
    OpUsage,
    Plan,
    RankIdentity,
    StoreUsage,
    TargetState,
    ThreadReport,
)

log = logging.getLogger(__name__)

# The engine's backend asserts this in the middle of its attach.
LAYOUTS = {"mooncake": ("page_first", "page_first_direct", "page_head")}
# The client package of a backend, where the engine does not bring it.
PACKAGES = {
    "aibrix": "aibrix_kvcache",
    "eic": "eic",
    "hf3fs": "hf3fs_fuse",
    "mooncake": "mooncake",
    "mori": "mori",
    "nixl": "nixl",
    "npu_memcache": "memcache_hybrid",
    "seaweedfs": "boto3",
    "simm": "simm",
    "tensorcast": "tensorcast",
}
# What SGLang registers beside real stores: no page comes back from these, so that PREPARE's canary refuses them.
NO_STORES = {
    "shm": "keeps no page in this SGLang: an attach is refused by the canary",
    "sim": "simulates a store for benchmarks, pages come back as garbage: an attach is refused by the canary",
}
# Shown as missing, and tried all the same: the engine's class has a client of its own to test with.
DISPENSABLE = ("hf3fs",)


class SglangAdapter:
    """See ``hicache_hooks.adapter.EngineAdapter``, which names each method's thread."""

    def __init__(self, scheduler: Any, problems: list[str], wake: Callable[[], None]) -> None:
        """``problems`` non-empty: nothing can be attached, and validate says why. ``wake``: any thread."""
        self._scheduler = scheduler
        self._problems = problems
        self._wake = wake
        self._identity = topology.identity()
        self._namespace = topology.namespace(scheduler)
        self._l2_tokens, self._layout = topology.host_pool(scheduler)
        self._controller = scheduler.tree_cache.cache_controller
        self.storage_threads = StorageThreads(self._controller)
        self._live = LiveState(scheduler, self._namespace)
        self._installer = Installer(scheduler, self.storage_threads, self.quarantine)
        self.groups = self._installer.groups
        self._backfill = TreeBackfill(scheduler.tree_cache)
        self._builder = BackendBuilder(scheduler, self._namespace)
        self._usage = UsageTotals()
        self._unpublished = False  # the engine's own view follows when the outcome is known
        self.on_dead_threads: Callable[[], None] = lambda: None
        self.held: Callable[[], int] = lambda: 0  # requests in front of the gate

    # ------------------------------------------------------------------ views (any thread)

    def identity(self) -> RankIdentity:
        """Constant."""
        return self._identity

    def capabilities(self) -> Capabilities:
        """Asked for at each hello: ``problems`` may have come in after this adapter was made."""
        return topology.capabilities(self._scheduler, self._problems, self._namespace)

    def effective(self) -> EffectiveState:
        """Read from the live objects."""
        return self._live.effective()

    def idle_report(self) -> IdleReport:
        """Every counter."""
        return idle_report(self._scheduler, self.storage_threads, self.held())

    def usage(self) -> dict[str, OpUsage]:
        """Over all backends since the process started."""
        self._count(self._live.backend())
        self._usage.retire_closed()  # by the engine's own detach
        return self._usage.totals()

    def stores(self) -> dict[str, StoreUsage]:
        """The same by store, and which was written and never read (F57)."""
        self._count(self._live.backend())
        self._usage.retire_closed()
        return self._usage.by_store()

    def guard(self) -> GuardReport | None:
        """Breakers and failed calls of what is attached; what failover decides on."""
        report = getattr(self._live.backend(), "guard_report", None)
        made: GuardReport | None = None if report is None else report()
        return made

    def threads(self) -> list[ThreadReport]:
        """The engine's storage threads. Dead ones are told to ``on_dead_threads``."""
        if self.storage_threads.dead():
            self.on_dead_threads()
        return self.storage_threads.reports()

    def layers(self) -> dict[str, str]:
        """Who believes what, when they disagree (F24)."""
        seen = self._live.layers()
        return {} if self._unpublished else seen

    def quarantine(self, reason: str) -> None:
        """From now on every change is refused, with ``reason``; serving goes on."""
        if reason not in self._problems:
            log.error("hicache hooks: nothing can be attached: %s", reason)
            self._problems.append(reason)

    # ------------------------------------------------------------------ off the scheduler thread

    def validate(self, target: TargetState, *, mode: str, swap: bool) -> Plan:
        """See ``EngineAdapter``."""
        del swap  # whether a replacement is allowed is decided from the plans of all ranks
        self._refuse()
        if mode == Mode.HOT:
            raise UnsupportedByEngine("SGLang cannot swap under traffic (mode hot)", details={"reason": "hot"})
        current = self._live.running()
        running = self._resolve(target, current)
        difference = compare(current, running)
        config = running.config
        warnings = frontend.limits(self._scheduler)
        if config is not None:
            self._check_layout(config.backend)
            if difference.relation not in ("same", "live"):
                _check_package(config.backend)
            warnings += knob_warnings(running.knobs, self._l2_tokens) + _warnings(running)
        return Plan(
            relation=difference.relation,
            changed_keys=difference.changed_keys,
            config_digest=config.digest if config else "",
            redacted_config=config.redacted if config else None,
            warnings=warnings,
            notes=policy_notes(running.knobs) if config is not None else [],
        )

    def build(self, target: TargetState, cancelled: Callable[[], bool]) -> object:
        """See ``EngineAdapter``."""
        self._refuse()
        base, current = self._live.backend(), self._live.running()
        running = self._resolve(target, current)
        if compare(current, running).relation in ("same", "live"):
            return LiveChange(running, base)
        if running.config is not None:
            self._check_layout(running.config.backend)
        self._backfill.restart()
        parked = self._builder.build(running, cancelled)
        if running.config is not None and not self._controller.enable_storage:
            self._backfill.native()
        return replace(parked, base=base)

    def close(self, parked: object, timeout_s: float) -> list[str]:
        """Close a backend that nothing uses any more, once no call is inside it (F23, F117)."""
        if not isinstance(parked, Parked) or parked.backend is None:
            return []
        stuck = wait_and_close(parked.backend, timeout_s)
        if not stuck and hasattr(parked.backend, "usage"):
            self._usage.retire(parked.backend)
        return stuck

    def clear(self, namespace: str) -> int:
        """See ``clear.clear_namespace``."""
        backend = self._live.backend()
        if backend is None:
            raise InvalidRequest("nothing is attached", details={"reason": "detached"})
        if namespace != self._namespace:
            raise InvalidRequest(
                "the namespace is not this rank's", details={"reason": "namespace", "namespace": self._namespace}
            )
        try:
            return clear_namespace(self._live.parked().name or "", getattr(backend, "inner", backend))
        finally:
            getattr(backend, "emptied", lambda: None)()

    def describe_backends(self) -> list[dict[str, Any]]:
        """This SGLang's registry. It has no schema of options."""
        return [_describe(name) for name in registered()]

    # ------------------------------------------------------------------ scheduler thread

    def backfill_slice(self, budget_s: float) -> bool:
        """See ``TreeBackfill``. Nothing is missing while storage is on."""
        return bool(self._controller.enable_storage) or self._backfill.slice(budget_s)

    def swap(self, new: object) -> object:
        """Install ``new``; returns what undoes it."""
        old, before = self._live.parked(), self._unpublished
        self._unpublished = True
        try:
            return self._replace(old, new)
        except BaseException:
            self._unpublished = before
            raise

    def swap_back(self, old: object) -> object:
        """The same, the other way. There will be no ``publish``: the view is set here."""
        replaced = self.swap(old)
        self.publish(old, 0)
        return replaced

    def publish(self, installed: object, revision: int) -> None:
        """The engine's own view in this process; the frontend hook sees to the HTTP process."""
        del installed, revision  # the view is read from the live objects, not from what the operation says
        self._installer.show(self._live.running())
        self._unpublished = False

    # ------------------------------------------------------------------ any thread, at once

    def set_bypass(self, enabled: bool) -> bool:
        """Reads miss, writes are skipped. Returns what it was."""
        backend = self._live.backend()
        change = getattr(backend, "set_bypass", None)
        return bool(change(enabled)) if change is not None else False

    def wake(self) -> None:
        """End the scheduler's sleep."""
        self._wake()

    # ------------------------------------------------------------------ inner

    def _resolve(self, target: TargetState, current: Running) -> Running:
        running = resolve(target, current, namespace=self._namespace, known=registered(), env=os.environ)
        if running.config is not None:
            check_watchdog(running.knobs, topology.watchdog_s(self._scheduler))
        return running

    def _refuse(self) -> None:
        if self._problems:
            raise UnsupportedByEngine(
                "; ".join(self._problems), details={"reason": "hooks_refuse", "problems": self._problems}
            )

    def _check_layout(self, name: str) -> None:
        layout, suited = self._layout, LAYOUTS.get(name)
        if suited is not None and layout not in suited:
            raise LayoutUnsupported(
                f"backend {name!r} cannot use the host layout {layout!r}; it can use {', '.join(suited)}",
                details={"layout": layout, "allowed": list(suited)},
            )

    def _replace(self, old: Parked, new: object) -> object:
        if isinstance(new, Parked | LiveChange) and new.base is not ANYTHING and new.base is not old.backend:
            raise Internal(
                "the engine's own API changed its storage while this operation was prepared",
                details={"reason": "changed_meanwhile"},
                hint="look at the drift, resolve it, and repeat",
            )
        match new:
            case Parked():
                self._installer.install(new)
                self._live.installed(new)
                _tune(new.backend, new.running)
                self._count(new.backend)
                return old
            case LiveChange():
                self._installer.live(new.running)
                _tune(old.backend, new.running)
                self._live.installed(Parked(new.running, old.backend, old.storage_config))
                return LiveChange(old.running)
            case _:
                raise Internal(f"not a storage set: {type(new).__name__}")

    def _count(self, backend: Any) -> None:
        """A guard that is met for the first time is counted from now on, whoever built it, on whatever thread."""
        if backend is not None and hasattr(backend, "usage"):
            self._usage.add(backend)


def _tune(backend: Any, running: Running) -> None:
    if hasattr(backend, "tune_guard"):
        backend.tune_guard(running.knobs.guard)


def _warnings(running: Running) -> list[str]:
    config = running.config
    if isinstance(config, EngineConfig) and config.backend == FILE and not config.values().get(FILE_PATH_KEY):
        return [f"no {FILE_PATH_KEY}: the engine uses its environment variable, else /tmp/hicache"]
    return []


def missing_packages(name: str) -> list[str]:
    """Packages that SGLang's backend ``name`` imports and that are not installed here."""
    package = PACKAGES.get(name)
    try:
        return [package] if package is not None and importlib.util.find_spec(package) is None else []
    except ValueError:  # it is imported already, by somebody who left no spec
        return []


def _check_package(name: str) -> None:
    missing = [] if name in DISPENSABLE else missing_packages(name)
    if missing:
        raise BackendUnavailable(
            f"SGLang's backend {name!r} needs the package {missing[0]!r}, which its environment lacks",
            details={"missing": missing},
        )


def _describe(name: str) -> dict[str, Any]:
    missing = missing_packages(name)
    return {
        "name": name,
        "available": not missing,
        "missing": missing,
        "layouts": list(LAYOUTS.get(name, ())),
        "options_schema": None,
        "notes": [NO_STORES.get(name, "options are SGLang's own; they are handed over as they are")],
    }
