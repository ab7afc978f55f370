"""Puts together what a rank says about itself. Any thread; never raises; cheap enough for every heartbeat.

The record and the live objects are read without a lock, so a swap may come between them: the record is read
again afterwards, and the whole is taken once more when it moved. What an adapter cannot say is named in
``layers`` instead of failing the report: a rank that cannot report would look dead.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from hicache_hooks.abandoned import THREADS
from hicache_hooks.adapter import EngineAdapter
from hicache_hooks.gate import Gate
from hicache_hooks.leases import Clock
from hicache_hooks.verdict import View
from hicache_proto.model import EffectiveState, IdleReport, RankReport

ATTEMPTS = 3  # swaps and changes of a dictionary last microseconds; what moves three times in a row is said as it is


class Reporter:
    """Reads one rank."""

    def __init__(self, adapter: EngineAdapter, gate: Gate, view: Callable[[], View], clock: Clock) -> None:
        self._adapter = adapter
        self._gate = gate
        self._view = view
        self._clock = clock

    def report(self) -> RankReport:
        """The rank's state now."""
        for _ in range(ATTEMPTS):
            view = self._view()
            report = self._read(view)
            if self._view() is view:
                break
        return report

    def _read(self, view: View) -> RankReport:
        broken: dict[str, str] = {}

        def ask(name: str, question: Callable[[], Any], otherwise: Any) -> Any:
            why = ""
            for _ in range(ATTEMPTS):
                try:
                    return question()
                except RuntimeError as error:  # "changed size during iteration": the scheduler goes on meanwhile
                    why = f"{type(error).__name__}: {error}"
                except Exception as error:
                    why = f"{type(error).__name__}: {error}"
                    break
            broken[f"report.{name}"] = why
            return otherwise

        adapter, record = self._adapter, view.record
        state = ask("effective", lambda: adapter.effective(), EffectiveState())
        fields: dict[str, Any] = {
            "idle": ask("idle", lambda: adapter.idle_report(), IdleReport()),
            "usage": ask("usage", lambda: adapter.usage(), {}),
            "threads": ask("threads", lambda: adapter.threads(), []),
        }
        # An engine that guards its stores another way has no such methods.
        fields["guard"] = ask("guard", lambda: getattr(adapter, "guard", lambda: None)(), None)
        fields["stores"] = ask("stores", lambda: getattr(adapter, "stores", dict)(), {})
        fields["checkpoint_pages"] = ask(
            "checkpoint_pages", lambda: getattr(adapter, "checkpoint_pages", lambda: 0)(), 0
        )
        layers = ask("layers", lambda: adapter.layers(), {})
        left = None if view.lease_deadline is None else max(0.0, view.lease_deadline - self._clock())
        return RankReport(
            state=msgspec.structs.replace(state, revision=record.revision),
            op_n=record.n,
            op_phase=record.phase.value,
            op_ended=record.ended.value,
            lease_left_s=left,
            abandoned=THREADS.count,
            holds=self._gate.holds(),
            quarantine=view.quarantine,
            layers={**layers, **view.notes, **broken},
            **fields,
        )
