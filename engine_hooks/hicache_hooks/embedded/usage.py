"""Totals over every store that a process has used: counters never go down when a set is swapped (F91)."""

import re
import threading
import weakref
from typing import Protocol

import msgspec

from hicache_hooks.guard import Guard
from hicache_proto.model import GuardReport, OpUsage, RecentUse, StoreUsage
from hicache_proto.usage import stores, total, written_never_read

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
        self._retired: weakref.WeakSet[Counted] = weakref.WeakSet()

    def add(self, guard: Counted) -> None:
        """A store was opened. Again, by whoever meets it, or after it was closed: nothing."""
        with self._lock:
            if guard not in self._retired and not self._lives(guard):
                self._live.append(guard)

    def retire(self, guard: Counted) -> None:
        """A store was closed: its last numbers are kept. Again: nothing."""
        with self._lock:
            self._retire(guard)

    def retire_closed(self) -> None:
        """Retire what somebody else closed (an engine, with its own detach)."""
        with self._lock:
            for guard in [each for each in self._live if getattr(each, "closed", False) is True]:
                self._retire(guard)

    def by_store(self) -> dict[str, StoreUsage]:
        """By ``backend[@instance][:inner connector]`` (F75, F92)."""
        with self._lock:
            return stores([self._past, *({self._name(guard): _use(guard)} for guard in self._live)])

    def totals(self) -> dict[str, OpUsage]:
        """By call kind, since the process started."""
        return total(store.ops for store in self.by_store().values())

    def _lives(self, guard: Counted) -> bool:
        return any(each is guard for each in self._live)

    def _retire(self, guard: Counted) -> None:
        if self._lives(guard):
            self._live = [each for each in self._live if each is not guard]
            self._retired.add(guard)
            last = msgspec.structs.replace(_use(guard), recent=RecentUse())  # no more look-ups: no window either
            self._past = stores([self._past, {self._name(guard): last}])

    def _name(self, guard: Counted) -> str:
        name = re.sub(r"[^A-Za-z0-9_.:@-]", "_", _title(guard))[:64]
        return name if name in self._past or len(self._past) < MAX_STORES else OTHERS


def _title(guard: Counted) -> str:
    if isinstance(guard, Guard):
        named = f"{guard.name}@{guard.instance}" if guard.instance else guard.name
        return f"{named}:{guard.inner}" if guard.inner else named
    report: GuardReport | None = getattr(guard, "guard_report", lambda: None)()
    return report.name if report is not None else "store"


def _use(guard: Counted) -> StoreUsage:
    if isinstance(guard, Guard):
        return guard.store_usage()
    # Another engine's guard sees calls, not requests: a look-up of one is a call or some (F57).
    ops = guard.usage()
    lookups = ops["exists"].latency.count if "exists" in ops else 0
    return StoreUsage(ops=ops, lookups=lookups, write_only=written_never_read(ops, lookups))
