"""The attach/detach box: from a target state to a plan (VALIDATE) or a parked storage set (PREPARE).

Runs off the scheduler thread. ``validate`` touches nothing. ``build`` goes construct -> open -> register pools ->
canary -> storage set -> threads, parked; a failure at any step undoes the former ones in reverse order, and the
backend is closed exactly once (F14). The scheduler thread then only swaps one reference (design.md, rule 10).
"""

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from hicache_hooks.backends import registry
from hicache_hooks.backends.asking import Asking
from hicache_hooks.backends.base import Backend, Manifest, StoreContext
from hicache_hooks.backends.canary import Scratch, Sealer, run_canary
from hicache_hooks.backends.options import StoreFacts
from hicache_hooks.backends.probe import StoreProbe
from hicache_hooks.cache.config import ResolvedConfig, Running, compare, knob_warnings, resolve
from hicache_hooks.cache.knobs import Knobs, policy_notes
from hicache_hooks.guard import Guard, describe_exception
from hicache_proto.errors import HicacheError, InvalidConfig, LayoutUnsupported, PrepareFailed, UnsupportedByEngine
from hicache_proto.model import KNOBS, LAYOUTS, EffectiveState, Mode, Plan, TargetState

if TYPE_CHECKING:
    from hicache_hooks.cache.storage_set import StorageSet

log = logging.getLogger(__name__)

VALIDATED_S = 30.0  # PREPARE comes milliseconds after VALIDATE; an ``@/path`` file may be another one later
MAX_LATE = 4  # stores that never answer PREPARE's questions: each costs a thread and stays open (F46)
STOP_S = 5.0  # for the threads of a set that never ran

# Of ``Backend.health``, for status: what does not change while the store is attached.
_LASTING = (
    "inner", "path", "mount", "bucket", "endpoint", "master", "segment_bytes", "slots", "max_size", "eviction", "ttl_s",
    "rocksdb_ttl_s", "settings", "direct_io", "direct_io_reason", "never_run_against_the_service",
)  # fmt: skip
MAX_FACT = 200  # characters

# The controller's factory: makes the set for a guarded backend (None: the detached set). Parked, not started.
SetFactory = Callable[[Guard | None, Knobs, str], "StorageSet"]


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """This rank's pools and its place in the topology; constant."""

    layout: str
    page_size: int  # tokens
    page_bytes: int  # of a page buffer, trailer included
    l2_tokens: int
    namespace: str  # fingerprint
    tp_rank: int = 0
    tp_size: int = 1
    pp_size: int = 1
    hot: bool = False  # the engine can swap under traffic


@dataclass(frozen=True, slots=True)
class Parked:
    """A storage set that COMMIT can install, with what it was made of. ``guard`` None: the detached set."""

    set: "StorageSet"
    running: Running
    guard: Guard | None = None
    scratch: Scratch | None = None  # registered memory must outlive the backend

    def close(self, timeout_s: float) -> list[str]:
        """Stop its threads and close its backend; *closer* thread.

        Returns:
            Threads that did not stop. Then the backend stays open (F117).
        """
        stuck = self.set.stop(timeout_s)
        if not stuck and not self.set.close():
            stuck = self.set.still_inside()
        return stuck


@dataclass(frozen=True, slots=True)
class LiveChange:
    """The target differs in live keys only: COMMIT replaces the knobs of the set that runs. Nothing was built."""

    running: Running


@dataclass(frozen=True, slots=True)
class _Validated:
    """The last VALIDATE: PREPARE builds what was checked, and need not read and parse it again."""

    target: TargetState
    current: Running
    running: Running
    at: float  # monotonic


class StorageAttachment:
    """See the module's text. Stateless but for constants: what runs now is passed in."""

    def __init__(
        self,
        facts: PoolFacts,
        make_set: SetFactory,
        sealer: Sealer,
        pools: Sequence[memoryview],
        *,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """``pools`` are the host pools' memory, registered with backends that need it."""
        self.facts = facts
        self._make_set = make_set
        self._sealer = sealer
        self._pools = list(pools)
        self._env = os.environ if env is None else env
        self._validated: _Validated | None = None
        self._late: list[Asking] = []  # of stores that were given up with a question inside

    def validate(self, target: TargetState, current: Running, *, mode: str = "strict", swap: bool = False) -> Plan:
        """What moving from ``current`` to ``target`` would mean. Touches nothing.

        ``swap`` does not change the plan: whether a replacement is allowed is decided from the plans of all ranks.

        Raises:
            UnknownBackend, BackendUnavailable, InvalidConfig, Forbidden, LayoutUnsupported, UnsupportedByEngine.
        """
        if mode == Mode.HOT and not self.facts.hot:
            raise UnsupportedByEngine("this engine cannot swap under traffic (mode hot)", details={"reason": "hot"})
        running = self.resolve(target, current)
        self._validated = _Validated(target, current, running, time.monotonic())
        difference = compare(current, running)
        warnings: list[str] = []
        notes: list[str] = []
        if running.config is not None:
            if running.config is not current.config:
                warnings += self._check(running.config)
                notes += _what_is_inside(running.config)
            warnings += knob_warnings(running.knobs, self.facts.l2_tokens)
            notes += policy_notes(running.knobs)
        config = running.config
        return Plan(
            relation=difference.relation,
            changed_keys=difference.changed_keys,
            config_digest=config.digest if config else "",
            redacted_config=config.redacted if config else None,
            warnings=warnings,
            notes=notes,
        )

    def resolve(self, target: TargetState, current: Running) -> Running:
        """The effective form of ``target``. Raises as ``config.resolve``."""
        return resolve(target, current, namespace=self.facts.namespace, env=self._env)

    def _resolved(self, target: TargetState, current: Running) -> Running:
        """What VALIDATE has just found out about the same target, else ``resolve``."""
        known = self._validated
        same = known is not None and known.target == target and known.current is current
        if known is None or not same or time.monotonic() - known.at > VALIDATED_S:
            return self.resolve(target, current)
        return known.running

    def _check(self, config: ResolvedConfig) -> list[str]:
        """Manifest and options against the pools; returns warnings."""
        facts = self.facts
        if facts.page_bytes < 1 or facts.page_size < 1:
            raise InvalidConfig("the engine's page geometry is below one", details={"reason": "bad_geometry"})
        spec = registry.usable(config.backend)
        manifest = spec.manifest(config.options, self._env)
        check_manifest(manifest, facts)
        store = StoreFacts(
            layout=facts.layout,
            page_bytes=facts.page_bytes,
            l2_pages=facts.l2_tokens // facts.page_size,
            tp_size=facts.tp_size,
            pp_size=facts.pp_size,
        )
        return config.options.check(store)

    def build(
        self, target: TargetState, current: Running, cancelled: Callable[[], bool] = lambda: False
    ) -> Parked | LiveChange:
        """Make what COMMIT installs. A change of live keys alone builds nothing.

        Raises:
            HicacheError: what ``validate`` raises, or ``PrepareFailed``; everything opened is closed again.
                ``details.undo_failed`` names what could not be undone; then the rank is not clean.
        """
        running = self._resolved(target, current)
        config = running.config
        if compare(current, running).relation in ("same", "live"):
            return LiveChange(running)
        undo_failed: list[str] = []
        try:
            with ExitStack() as undo:
                made = self._detached(running, undo, undo_failed) if config is None else None
                if made is None and config is not None:
                    made = self._attached(config, running, undo, undo_failed, cancelled)
                undo.pop_all()
        except HicacheError as exc:
            if undo_failed:
                exc.details["undo_failed"] = undo_failed
            raise
        if made is None:
            raise PrepareFailed("nothing was built", details={"reason": "internal"})
        return made

    def _detached(self, running: Running, undo: ExitStack, undo_failed: list[str]) -> Parked:
        made = _step("storage set", lambda: self._make_set(None, running.knobs, "detached"))
        undo.callback(_drop_set, made, undo_failed)
        _step("threads", made.start_parked)
        return Parked(made, running)

    def _attached(
        self,
        config: ResolvedConfig,
        running: Running,
        undo: ExitStack,
        undo_failed: list[str],
        cancelled: Callable[[], bool],
    ) -> Parked:
        self._check(config)
        facts = self.facts
        context = StoreContext(
            namespace=facts.namespace,
            page_bytes=facts.page_bytes,
            layout=facts.layout,
            tp_rank=facts.tp_rank,
            tp_size=facts.tp_size,
            pp_size=facts.pp_size,
        )
        spec = registry.usable(config.backend)
        manifest = spec.manifest(config.options, self._env)
        scratch = _step("memory for the canary", lambda: Scratch(facts.page_bytes))
        self._late = [asking for asking in self._late if asking.inside]
        if len(self._late) >= MAX_LATE:
            raise PrepareFailed(
                f"{len(self._late)} stores of earlier attempts have not answered yet", details={"reason": "store_late"}
            )
        backend: Backend = _step("constructor", lambda: spec.create(config.options, context, self._env))
        closing = undo.enter_context(ExitStack())
        settings = running.knobs.guard
        asking = Asking(backend, settings.deadline_s)
        self._late.append(asking)
        closing.callback(_close_backend, asking, undo_failed)
        _go_on(cancelled)
        _step("open", backend.open)
        _go_on(cancelled)
        if manifest.needs_registration:
            for pool in (*self._pools, scratch.memory):
                _step("registration of host memory", lambda pool=pool: backend.register(pool))  # type: ignore[misc]
        run_canary(backend, self._sealer, scratch, cancelled, lambda: asking.ask("health", backend.health))
        said = _facts(asking.ask("health", lambda: _said(backend)))
        inner = str(said.pop("inner", "")) or spec.inner(config.options)
        if inner == registry.UNKNOWN_INNER:
            log.warning("attach: backend %s does not say what stores its pages (health: inner)", config.backend)
        probe = StoreProbe(backend, self._sealer, scratch)
        name, instance = config.backend, config.instance
        guard = _step(
            "guard",
            lambda: Guard(
                backend, name=name, inner=inner, instance=instance, manifest=manifest, settings=settings, probe=probe
            ),
        )
        guard.facts = said
        if callable(getattr(backend, "epoch", None)):
            asking.ask("epoch", guard.learn_epoch)
        made = _step("storage set", lambda: self._make_set(guard, running.knobs, config.backend))
        closing.pop_all()  # from here on the set owns guard and backend
        undo.callback(_drop_set, made, undo_failed)
        _step("threads", made.start_parked)
        _go_on(cancelled)
        return Parked(made, running, guard, scratch if manifest.needs_registration else None)


def _what_is_inside(config: ResolvedConfig) -> list[str]:
    """The plugin or connector behind the backend's name, whoever chose it: we, a variable or the vendor (F66, F75)."""
    inner = registry.entry(config.backend).load().inner(config.options)
    return [f"{config.backend}: {inner}"] if inner not in ("", config.backend, registry.UNKNOWN_INNER) else []


def check_manifest(manifest: Manifest, facts: PoolFacts) -> None:
    """The backend against layout and topology (F47, F76).

    Raises:
        LayoutUnsupported: ``details`` = ``{layout, allowed}``.
        UnsupportedByEngine: reason ``parallel_layout``.
        InvalidConfig: the page length does not suit; reason ``bad_geometry``.
    """
    if facts.layout not in manifest.layouts or facts.layout not in LAYOUTS:
        allowed = list(manifest.layouts)
        raise LayoutUnsupported(
            f"backend {manifest.name!r} cannot use the host layout {facts.layout!r}; it can use {', '.join(allowed)}",
            details={"layout": facts.layout, "allowed": allowed},
        )
    wanted = [axis for axis, size in (("tp", facts.tp_size), ("pp", facts.pp_size)) if size > 1]
    refused = [axis for axis in wanted if axis not in manifest.parallel_axes]
    if refused:
        raise UnsupportedByEngine(
            f"backend {manifest.name!r} does not support {' and '.join(refused)} parallel engines",
            details={"reason": "parallel_layout", "axes": refused, "allowed": list(manifest.parallel_axes)},
        )
    if manifest.alignment < 1 or facts.page_bytes % manifest.alignment:
        raise InvalidConfig(
            f"page buffers of {facts.page_bytes} bytes are no multiple of {manifest.alignment}",
            details={"reason": "bad_geometry"},
        )


def effective_state(running: Running, guard: Guard | None, *, bypass: bool, revision: int = 0) -> EffectiveState:
    """``Running`` as the rank reports it."""
    config, knobs = running.config, running.knobs
    return EffectiveState(
        backend=config.backend if config else None,
        extra_config=config.redacted if config else None,
        config_digest=config.digest if config else "",
        knobs={key: getattr(knobs, key) for key in KNOBS},
        prefetch_policy=knobs.prefetch_policy,
        write_policy=knobs.write_policy,
        revision=revision,
        bypass=bypass,
        namespace=config.namespace if config else "",
        inner=guard.inner if guard else "",
        store=dict(guard.facts) if guard else {},
    )


def _said(backend: Backend) -> dict[str, Any]:
    try:
        said = backend.health()
        return {key: said.get(key) for key in _LASTING}
    except BaseException:  # the canary passed: a health call that fails refuses nothing
        return {}


def _facts(found: dict[str, Any]) -> dict[str, bool | int | str]:
    """What the backend says of itself that stays true, its connector too (F75). Read once: status waits for nobody."""
    return {
        key: value if isinstance(value, bool | int) else str(value)[: 64 if key == "inner" else MAX_FACT]
        for key, value in found.items()
        if value is not None and value != ""
    }


def _step(name: str, action: Callable[[], Any]) -> Any:
    """Run one step; what it raises becomes ``PrepareFailed`` with the step's name, without its text (F94)."""
    failed: BaseException
    try:
        return action()
    except HicacheError:
        raise
    except BaseException as exc:  # a constructor may raise SystemExit; it never leaves the hook (F49)
        failed = exc
    log.warning("attach: %s failed: %s", name, describe_exception(failed))
    raise PrepareFailed(
        f"{name} failed: {describe_exception(failed)}", details={"reason": "build_failed", "step": name}
    )


def _go_on(cancelled: Callable[[], bool]) -> None:
    if cancelled():
        _refuse("cancelled")


def _refuse(reason: str) -> NoReturn:
    raise PrepareFailed("the operation was cancelled while the backend was built", details={"reason": reason})


def _close_backend(asking: Asking, undo_failed: list[str]) -> None:
    try:
        asking.close()
    except BaseException as exc:  # the other undo steps must run (F28)
        undo_failed.append(f"close: {describe_exception(exc)}")


def _drop_set(made: "StorageSet", undo_failed: list[str]) -> None:
    try:
        stuck = made.stop(STOP_S)
        if stuck:
            undo_failed.extend(f"thread {name}" for name in stuck)  # F117: its backend stays open
        else:
            made.close()
    except BaseException as exc:
        undo_failed.append(f"storage set: {describe_exception(exc)}")
