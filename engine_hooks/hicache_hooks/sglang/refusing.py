"""A scheduler to which nothing can be attached: it says hello, is seen, and says why (F12).

For engines that run without the hierarchical cache, or with a tree that has no storage: the sidecar shows the rank and
refuses every change by name, instead of waiting for a rank that never comes.
"""

from collections.abc import Callable
from typing import Any, NoReturn

from hicache_hooks.sglang import topology
from hicache_hooks.sglang.idle import idle_report
from hicache_hooks.sglang.threads import NoThreads
from hicache_proto.errors import UnsupportedByEngine
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


class RefusingAdapter:
    """See the module's text and ``hicache_hooks.adapter.EngineAdapter``."""

    def __init__(self, scheduler: Any, problems: list[str], wake: Callable[[], None]) -> None:
        self._scheduler = scheduler
        self._problems = problems
        self._wake = wake
        self._identity = topology.identity()
        self.storage_threads = NoThreads()
        self.on_dead_threads: Callable[[], None] = lambda: None
        self.held: Callable[[], int] = lambda: 0  # requests in front of the gate

    def identity(self) -> RankIdentity:
        """Constant."""
        return self._identity

    def capabilities(self) -> Capabilities:
        """With the reasons."""
        return topology.capabilities(self._scheduler, self._problems, "")

    def effective(self) -> EffectiveState:
        """Nothing is attached."""
        return EffectiveState()

    def idle_report(self) -> IdleReport:
        """The engine's own predicates."""
        return idle_report(self._scheduler, self.storage_threads, self.held())

    def usage(self) -> dict[str, OpUsage]:
        """None."""
        return {}

    def threads(self) -> list[ThreadReport]:
        """None."""
        return []

    def layers(self) -> dict[str, str]:
        """All agree."""
        return {}

    def validate(self, target: TargetState, *, mode: str, swap: bool) -> Plan:
        """Refused."""
        del target, mode, swap
        self._refuse()

    def build(self, target: TargetState, cancelled: Callable[[], bool]) -> object:
        """Refused."""
        del target, cancelled
        self._refuse()

    def backfill_slice(self, budget_s: float) -> bool:
        """Nothing to hash."""
        del budget_s
        return True

    def swap(self, new: object) -> object:
        """Refused."""
        del new
        self._refuse()

    def swap_back(self, old: object) -> object:
        """Refused."""
        del old
        self._refuse()

    def publish(self, installed: object, revision: int) -> None:
        """Nothing to show."""

    def close(self, parked: object, timeout_s: float) -> list[str]:
        """Nothing to close."""
        del parked, timeout_s
        return []

    def set_bypass(self, enabled: bool) -> bool:
        """Nothing to bypass."""
        del enabled
        return False

    def clear(self, namespace: str) -> int:
        """Refused."""
        del namespace
        self._refuse()

    def describe_backends(self) -> list[dict[str, Any]]:
        """None that could be used."""
        return []

    def wake(self) -> None:
        """End the scheduler's sleep."""
        self._wake()

    def _refuse(self) -> NoReturn:
        raise UnsupportedByEngine(
            "; ".join(self._problems), details={"reason": "hooks_refuse", "problems": list(self._problems)}
        )
