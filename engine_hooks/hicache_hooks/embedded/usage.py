"""Totals over every store that a process has used: counters never go down when a set is swapped (F91)."""

import re
import threading
from typing import Protocol

from hicache_hooks.guard import Guard
from hicache_proto.model import GuardReport, OpUsage, StoreUsage
from hicache_proto.usage import stores, total

MAX_STORES = 16  # names per process (F92): a dynamic backend may be called anything
OTHERS = "others"


class Counted(Protocol):
    """A guard: ours, or another engine's."""

    def usage(self) -> dict[str, OpUsage]: ...


class UsageTotals:
    """Sums the guards that live and remembers those that are gone. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live: list[Counted] = []
        self._past: dict[str, StoreUsage] = {}

    def add(self, guard: Counted) -> None:
        """A store was opened."""
        with self._lock:
            self._live.append(guard)

    def retire(self, guard: Counted) -> None:
        """A store was closed: its last numbers are kept. Again: nothing."""
        with self._lock:
            if guard in self._live:
                self._live.remove(guard)
                self._past = stores([self._past, {self._name(guard): _use(guard)}])

    def by_store(self) -> dict[str, StoreUsage]:
        """By the name of the backend and its inner connector (F75)."""
        with self._lock:
            return stores([self._past, *({self._name(guard): _use(guard)} for guard in self._live)])

    def totals(self) -> dict[str, OpUsage]:
        """By call kind, since the process started."""
        return total(store.ops for store in self.by_store().values())

    def _name(self, guard: Counted) -> str:
        name = re.sub(r"[^A-Za-z0-9_.:-]", "_", _title(guard))[:64]
        return name if name in self._past or len(self._past) < MAX_STORES else OTHERS


def _title(guard: Counted) -> str:
    if isinstance(guard, Guard):
        return f"{guard.name}:{guard.inner}" if guard.inner else guard.name
    report: GuardReport | None = getattr(guard, "guard_report", lambda: None)()
    return report.name if report is not None else "store"


def _use(guard: Counted) -> StoreUsage:
    return guard.store_usage() if isinstance(guard, Guard) else StoreUsage(ops=guard.usage())
