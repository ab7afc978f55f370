"""Admission: a set of named holds, each with its own lease; open means that the set is empty (rule 12).

Theory of operation
===================

Only the scheduler thread changes the gate (rule 8). Any thread may read ``is_open`` and ``holds()``: both are
whole objects replaced in one store. A closed gate tells the engine to keep new requests in a list of its own,
in front of its queues, where they are no blockers and where aborts still find them. It never drops a request.

An operation's hold is renewed together with the operation's lease and normally opened by the transaction's own
lease end; its expiry here is the second lock on the same door: whatever happens, admission opens again.
"""

from hicache_hooks.leases import Clock, checked_s, monotonic

MAX_HOLDS = 16  # one operation and a few drains; more means a caller that never releases


def operation_hold(n: int) -> str:
    """Name of operation ``n``'s hold."""
    return f"operation-{n}"


class Gate:
    """The holds of one rank."""

    __slots__ = ("_clock", "_until", "is_open")

    def __init__(self, clock: Clock = monotonic) -> None:
        self._clock = clock
        self._until: dict[str, float] = {}  # replaced, never changed in place: readers see one state
        self.is_open: bool = True

    def hold(self, name: str, lease_s: float) -> None:
        """Close admission under ``name`` for ``lease_s`` seconds from now; again = renew.

        Raises:
            ValueError: a bad name or lease, or too many holds.
        """
        if not name or len(name) > 64:
            raise ValueError("a hold's name has 1 to 64 characters")
        if name not in self._until and len(self._until) >= MAX_HOLDS:
            raise ValueError(f"{MAX_HOLDS} holds already")
        self._set({**self._until, name: self._clock() + checked_s(lease_s)})

    def release(self, name: str) -> bool:
        """Drop a hold; False when there was none."""
        if name not in self._until:
            return False
        self._set({key: until for key, until in self._until.items() if key != name})
        return True

    def expire(self) -> list[str]:
        """Drop the holds whose lease has ended; returns their names."""
        now = self._clock()
        over = [name for name, until in self._until.items() if until <= now]
        if over:
            self._set({name: until for name, until in self._until.items() if until > now})
        return over

    def holds(self) -> list[str]:
        """Names of the present holds, sorted."""
        return sorted(self._until)

    @property
    def deadline(self) -> float | None:
        """When the next hold ends (this gate's clock); None when open."""
        until = self._until  # asked for at every turn of the agent, and nearly always empty
        return min(until.values()) if until else None

    def _set(self, until: dict[str, float]) -> None:
        self._until = until
        self.is_open = not until
