"""Calls inside a store, and which of them have run past their deadline. Pure; the guard holds the lock.

A call that is late is given up, not ended: nothing can end a thread inside a native call. So it stays in the table
until it comes back, its result is dropped then, and until then nobody may reuse the memory that it was handed.
"""

import threading
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, eq=False)
class Call:
    """One call. Times are the guard's clock, in seconds."""

    kind: str  # "put", "get", "exists", ...
    keys: int
    started: float
    deadline: float
    owner: Any = None  # whose call it is; told when it is late
    probe: str = ""  # what it probes ("read", "write", "idle"); "" = traffic
    permit: bool = False  # traffic that is the breaker's probe as well
    late: bool = False
    thread: str = field(default_factory=lambda: threading.current_thread().name)


class Deadlines:
    """The calls inside one store."""

    def __init__(self) -> None:
        self._calls: dict[int, Call] = {}

    def enter(self, call: Call) -> None:
        """It begins."""
        self._calls[id(call)] = call

    def leave(self, call: Call) -> bool:
        """It came back; True when in time."""
        self._calls.pop(id(call), None)
        return not call.late

    def overdue(self, now: float) -> list[Call]:
        """Mark and return calls that have just become late."""
        late = [call for call in self._calls.values() if not call.late and now >= call.deadline]
        for call in late:
            call.late = True
        return late

    def next_deadline(self) -> float | None:
        """When the next call becomes late; None when no call could."""
        return min((call.deadline for call in self._calls.values() if not call.late), default=None)

    def late(self) -> list[Call]:
        """Given up and still inside."""
        return [call for call in self._calls.values() if call.late]

    def stuck_probes(self) -> int:
        """Probes among them."""
        return sum(1 for call in self._calls.values() if call.late and call.probe)

    def oldest(self) -> float | None:
        """Begin of the oldest call."""
        return min((call.started for call in self._calls.values()), default=None)

    def threads(self) -> list[str]:
        """Names of the threads of all calls."""
        return sorted(call.thread for call in self._calls.values())

    def __len__(self) -> int:
        return len(self._calls)
