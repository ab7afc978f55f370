"""The embedded engine as the hook sees it: ``EngineAdapter`` over the scheduler, the cache and the attachment.

What is installed is one immutable object (``Parked``: set, config, guard), replaced in one store on the scheduler
thread, so that any thread reads a consistent whole. A change of live keys alone swaps the knobs of the set that runs
and a ``LiveChange`` that knows the way back.
"""

import importlib.metadata
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec

from hicache_hooks.backends import registry
from hicache_hooks.cache.attachment import LiveChange, Parked, PoolFacts, StorageAttachment, effective_state
from hicache_hooks.cache.config import Running
from hicache_hooks.cache.knobs import Knobs
from hicache_hooks.cache.storage_set import StorageSet
from hicache_hooks.embedded.rank import Rank
from hicache_hooks.embedded.usage import UsageTotals
from hicache_hooks.guard import Guard
from hicache_proto.errors import Internal, InvalidRequest
from hicache_proto.model import (
    Capabilities,
    EffectiveState,
    GuardReport,
    IdleReport,
    OpUsage,
    Plan,
    RankIdentity,
    StoreUsage,
    TargetState,
    ThreadReport,
)

DRAIN_SHARE = 0.5  # of a set's closing time: how long accepted writes may still reach the store

Publish = Callable[[EffectiveState], None]


class EmbeddedAdapter:
    """See the module's text and ``hicache_hooks.adapter.EngineAdapter``, which names each method's thread."""

    def __init__(self, rank: Rank, *, dp_size: int = 1, publish: Publish = lambda state: None) -> None:
        """``publish`` takes the engine's own config view after an operation; *scheduler* thread."""
        self._rank = rank
        self._identity = RankIdentity(dp_rank=rank.dp_rank, dp_size=dp_size)
        self._publish = publish
        geometry = rank.host.geometry
        facts = PoolFacts(
            layout=geometry.layout,
            page_size=geometry.page_size,
            page_bytes=rank.host.page_bytes,
            l2_tokens=rank.host.num_pages * geometry.page_size,
            namespace=rank.namespace,
            hot=True,
        )
        self._attachment = StorageAttachment(facts, self._make_set, rank.pages, [rank.host.memory()])
        first = rank.cache.storage
        self._installed = Parked(first, Running(None, first.knobs))
        self._swapping = False
        self._usage = UsageTotals()

    # ------------------------------------------------------------------ views (any thread)

    def identity(self) -> RankIdentity:
        """Data parallel only: this engine has no other axis."""
        return self._identity

    def capabilities(self) -> Capabilities:
        """What this rank can do, and its sizes."""
        rank, geometry = self._rank, self._rank.host.geometry
        version = importlib.metadata.version("hicache-sidecar")
        return Capabilities(
            engine="embedded",
            engine_version=version,
            hooks_version=version,
            hot=True,
            checkpoint=True,
            tree="radix",
            layout=geometry.layout,
            page_size=geometry.page_size,
            page_bytes=geometry.payload_bytes,
            l2_tokens=rank.host.num_pages * geometry.page_size,
            fingerprint=rank.namespace,
        )

    def effective(self) -> EffectiveState:
        """Read from what is installed."""
        installed = self._installed
        return effective_state(installed.running, installed.guard, bypass=installed.set.bypassed)

    def idle_report(self) -> IdleReport:
        """Every counter of the scheduler and the cache."""
        return self._rank.scheduler.idle_report()

    def usage(self) -> dict[str, OpUsage]:
        """Of every store since the process started."""
        return self._usage.totals()

    def stores(self) -> dict[str, StoreUsage]:
        """The same by store (F57)."""
        return self._usage.by_store()

    def guard(self) -> GuardReport | None:
        """Of the installed store; None when detached."""
        guard = self._installed.guard
        return guard.report() if guard is not None else None

    def checkpoint_pages(self) -> int:
        """Written by the checkpoint that runs."""
        made = self._rank.cache.checkpoint
        return made.pages if made is not None else 0

    def threads(self) -> list[ThreadReport]:
        """Of the installed set."""
        return self._installed.set.threads()

    def layers(self) -> dict[str, str]:
        """What each layer believes is attached, when they disagree (F24); empty when all agree."""
        installed = self._installed
        storage = self._rank.cache.storage
        config, guard = installed.running.config, installed.guard
        view = {
            "config": config.backend if config else "none",
            "backend": guard.name if guard else "none",
            "controller": storage.name if storage.io is not None else "none",
        }
        if self._swapping or self._installed is not installed:
            return {}  # read across a swap: says nothing
        return view if len(set(view.values())) > 1 else {}

    # ------------------------------------------------------------------ off the scheduler thread

    def validate(self, target: TargetState, *, mode: str, swap: bool) -> Plan:
        """See ``StorageAttachment.validate``."""
        return self._attachment.validate(target, self._installed.running, mode=mode, swap=swap)

    def build(self, target: TargetState, cancelled: Callable[[], bool]) -> object:
        """See ``StorageAttachment.build``."""
        built = self._attachment.build(target, self._installed.running, cancelled)
        if isinstance(built, Parked) and built.guard is not None:
            self._usage.add(built.guard)
        return built

    def close(self, parked: object, timeout_s: float) -> list[str]:
        """Stop a set's threads, let accepted work through for half the time, close its backend (F23, F117)."""
        if not isinstance(parked, Parked):
            return []  # live keys: nothing was built
        stuck = parked.set.stop(timeout_s, drain_s=timeout_s * DRAIN_SHARE)
        if not stuck and not parked.set.close():
            stuck = parked.set.still_inside()
        if not stuck and parked.guard is not None:
            self._usage.retire(parked.guard)
        return stuck

    def clear(self, namespace: str) -> int:
        """Delete this namespace's pages from the attached store.

        Raises:
            InvalidRequest: nothing attached, or another namespace.
            PrepareFailed: the store failed.
        """
        guard = self._installed.guard
        if guard is None:
            raise InvalidRequest("nothing is attached", details={"reason": "detached"})
        if namespace != self._rank.namespace:
            raise InvalidRequest(
                "the namespace is not this engine's", details={"reason": "namespace", "namespace": self._rank.namespace}
            )
        return guard.clear()

    def describe_backends(self) -> list[dict[str, Any]]:
        """The registry."""
        return registry.describe()

    def shutdown(self, timeout_s: float) -> list[str]:
        """The process leaves: stop and close what is installed (F72). After the scheduler's last pass."""
        return self.close(self._installed, timeout_s)

    # ------------------------------------------------------------------ scheduler thread

    def backfill_slice(self, budget_s: float) -> bool:
        """See ``CacheController.backfill_slice``."""
        return self._rank.cache.backfill_slice(budget_s)

    def checkpoint_slice(self, built: object, budget_s: float) -> bool:
        """See ``adapter.Checkpoints``."""
        if not isinstance(built, Parked):
            return True  # live keys: the store stays
        target = built.set if built.guard is not None else self._installed.set
        return target.io is None or self._rank.cache.checkpoint_slice(target, budget_s)

    def checkpoint_waits(self) -> bool:
        """See ``adapter.Checkpoints``."""
        made = self._rank.cache.checkpoint
        return made is not None and made.waits

    def end_checkpoint(self) -> None:
        """See ``adapter.Checkpoints``."""
        self._rank.cache.end_checkpoint()

    def swap(self, new: object) -> object:
        """Replace one reference; returns what undoes it."""
        old = self._installed
        match new:
            case Parked():
                self._swapping = True
                try:
                    self._rank.cache.install(new.set)
                    self._installed = new
                finally:
                    self._swapping = False
                return old
            case LiveChange():
                self._installed = replace(old, running=new.running)
                old.set.set_knobs(new.running.knobs)
                return LiveChange(old.running)
            case _:
                raise Internal(f"not a storage set: {type(new).__name__}")

    def swap_back(self, old: object) -> object:
        """The same, the other way; what was hashed for a given-up attach is not continued."""
        replaced = self.swap(old)
        self._rank.cache.stop_hashing()
        return replaced

    def publish(self, installed: object, revision: int) -> None:
        """Bring the engine's own view in step."""
        del installed  # the view is read from the live objects, not from what the operation says
        self._publish(msgspec.structs.replace(self.effective(), revision=revision))

    # ------------------------------------------------------------------ any thread, at once

    def set_bypass(self, enabled: bool) -> bool:
        """Reads miss, writes are skipped. Returns what it was."""
        return self._installed.set.set_bypass(enabled)

    def wake(self) -> None:
        """End the scheduler's sleep."""
        self._rank.wake()

    # ------------------------------------------------------------------ inner

    def _make_set(self, guard: Guard | None, knobs: Knobs, name: str) -> StorageSet:
        rank = self._rank
        return StorageSet(store=guard, device=rank.device, host=rank.host, pages=rank.pages, knobs=knobs, name=name)
