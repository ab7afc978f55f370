"""Hold, release and watch: what the sidecar asks of a rank outside of any operation. Scheduler thread only.

A manual drain is a hold with a lease plus the question when the rank is idle; a strict wait is the question
alone, with admission open (F5, F10). The question is asked again on every scheduler pass while the engine is
busy, when the counters change anyway; nobody polls.
"""

from hicache_hooks.gate import MAX_HOLDS, Gate, operation_hold
from hicache_hooks.idle import IdleGate
from hicache_hooks.leases import Clock, checked_s
from hicache_proto.errors import InvalidRequest
from hicache_proto.hooklink import Call, Hold, Release, WatchIdle

RESERVED = operation_hold(0).removesuffix("0")


class Manual:
    """Holds by name, and at most one idle watch (the sidecar asks for one at a time; a new one replaces it)."""

    def __init__(self, gate: Gate, idle: IdleGate, clock: Clock) -> None:
        self._gate = gate
        self._idle = idle
        self._clock = clock
        self._watch_until: float | None = None

    @property
    def watching(self) -> bool:
        """True while an idle moment is waited for."""
        return self._watch_until is not None

    def on_call(self, call: Call) -> dict[str, bool]:
        """Apply a call; returns its answer's data.

        Raises:
            ValueError, InvalidRequest: bad name or lease; nothing changed.
        """
        match call.body:
            case Hold(name=name, hold_s=seconds):
                if name.startswith(RESERVED):
                    raise InvalidRequest(f"hold names starting with {RESERVED!r} belong to operations")
                if name not in self._gate.holds() and len(self._gate.holds()) >= MAX_HOLDS - 1:
                    raise InvalidRequest("too many holds")  # one place stays free for the operation
                self._gate.hold(name, seconds)
                return {"held": True}
            case Release(name=name):
                if name.startswith(RESERVED):
                    raise InvalidRequest(f"hold names starting with {RESERVED!r} belong to operations")
                return {"released": self._gate.release(name)}
            case WatchIdle(for_s=seconds):
                self._watch_until = self._clock() + checked_s(seconds)
                return {"watching": True}
            case _:
                raise InvalidRequest(f"{call.phase} is not for this rank")

    def idle_seen(self) -> bool:
        """Test once; True when the watch is fulfilled (and over)."""
        if self._watch_until is None:
            return False
        if self._clock() >= self._watch_until:
            self._watch_until = None
            return False
        if self._idle.refusal() is not None:
            return False
        self._watch_until = None
        return True
