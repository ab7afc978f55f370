"""What the engine-neutral hook needs of an engine: the one seam between ``agent``/``transaction`` and an engine.

``embedded/`` and ``sglang/`` each implement it. A method's thread is part of its contract:

* *any*: plain reads, no lock that the scheduler could hold for long, no I/O;
* *agent*, *builder*, *closer*: off the scheduler thread; may take time;
* *scheduler*: inside ``run_pending``; must not block.
"""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from hicache_proto.model import (
    Capabilities,
    EffectiveState,
    IdleReport,
    OpUsage,
    Plan,
    RankIdentity,
    TargetState,
    ThreadReport,
)


class EngineAdapter(Protocol):
    """One scheduler process of an engine."""

    def identity(self) -> RankIdentity:
        """*any*: place in the topology; constant."""

    def capabilities(self) -> Capabilities:
        """*any*: what this engine can do; ``problems`` names hooks that did not take."""

    def effective(self) -> EffectiveState:
        """*any*: what runs now, read from the live objects. The hook fills in ``revision``."""

    def idle_report(self) -> IdleReport:
        """*any*: every counter. Binding only when read on the scheduler thread."""

    def usage(self) -> dict[str, OpUsage]:
        """*any*: results per backend call kind since the process started."""

    def threads(self) -> list[ThreadReport]:
        """*any*: worker threads of the installed set."""

    def layers(self) -> dict[str, str]:
        """*any*: per-layer view (controller, backend, tree, config) of what is attached, for F24."""

    def validate(self, target: TargetState, *, mode: str, swap: bool) -> Plan:
        """*agent*: parse, check and compare; touches nothing.

        Raises:
            HicacheError: UnknownBackend, InvalidConfig, BackendUnavailable, LayoutUnsupported, UnsupportedByEngine.
        """

    def build(self, target: TargetState, cancelled: Callable[[], bool]) -> object:
        """*builder*: make the target's storage set, parked: backend open, pools registered, canary passed.

        Builds nothing when target and present state differ in live keys only. The result is opaque to the hook.

        Raises:
            HicacheError: what failed; whatever was opened is closed again.
        """

    def backfill_slice(self, budget_s: float) -> bool:
        """*scheduler*: compute missing page hashes for at most ``budget_s``; True when none is missing."""

    def swap(self, new: object) -> object:
        """*scheduler*: install ``new`` and return what was installed. If it raises, nothing changed."""

    def swap_back(self, old: object) -> object:
        """*scheduler*: install ``old`` again and return what was replaced."""

    def publish(self, installed: object, revision: int) -> None:
        """*scheduler*: bring the engine's own config view, labels and metrics in step after FINALIZE."""

    def close(self, parked: object, timeout_s: float) -> list[str]:
        """*closer*: stop its threads, empty its queues as cancelled, close its backend.

        Returns:
            Names of threads that did not stop in time (with stacks in the log). Then the backend stays open (F117).
        """

    def set_bypass(self, enabled: bool) -> bool:
        """*any*: reads miss, writes are skipped, at once. Returns what it was."""

    def clear(self, namespace: str) -> int:
        """*agent*: delete this namespace's pages from the attached store; returns how many.

        Raises:
            HicacheError: nothing attached, another namespace, or the store failed.
        """

    def describe_backends(self) -> list[dict[str, Any]]:
        """*agent*: known backends: ``{name, available, missing, layouts, manifest, options_schema, notes}``."""

    def wake(self) -> None:
        """*any*: make a sleeping scheduler call ``run_pending`` soon."""


@runtime_checkable
class Checkpoints(Protocol):
    """An adapter whose engine can store the whole tree before it lets a store go (F58). All *scheduler*."""

    def checkpoint_slice(self, built: object, budget_s: float) -> bool:
        """Store what the store that stays lacks of the tree, for at most ``budget_s``; True when it has all: the parked
        set ``built`` when it has a store, else the installed one. A change of live keys has nothing to do.

        Raises:
            PrepareFailed: reason ``checkpoint_failed``; nothing was cleared.
        """

    def checkpoint_waits(self) -> bool:
        """True when only a completion can bring it forward; ``wake`` is called then."""

    def end_checkpoint(self) -> None:
        """Begin nothing more of it."""
