"""Several agents for files, so that threads move pages side by side.

Each call registers its files, and the library takes the whole agent for that: beside a transfer of another thread it
waits until that has moved its bytes (with aio the post itself does, 5 ms for 32 MiB; two threads on one agent were
slower than one). Each agent has the in-flight limit of ``nixl_agent`` and its own errors.
"""

import threading
from collections.abc import Sequence

from hicache_hooks.backends.nixl_agent import Transfers

LANES = 2  # memory is full with two copies at a time; an agent costs 50 ms at open, and some megabytes


class Lanes:
    """As one ``Transfers``. Thread-safe."""

    def __init__(self, plugin: str, parameters: dict[str, str], *, rebuild_after_error: bool, count: int) -> None:
        """Does nothing yet."""
        self._lanes = [
            Transfers(plugin, parameters, "FILE", rebuild_after_error=rebuild_after_error) for _ in range(count)
        ]
        self._busy = [0] * count
        self._lock = threading.Lock()

    @property
    def cap(self) -> int:
        """Most I/Os in flight on each agent."""
        return self._lanes[0].cap

    @property
    def rebuilt(self) -> int:
        """Agents that were made again after an error."""
        return sum(lane.rebuilt for lane in self._lanes)

    def open(self) -> None:
        """Raises as ``Transfers.open``; ``close`` ends what was opened."""
        for lane in self._lanes:
            lane.open()

    def register(self, memory: memoryview) -> None:
        """Raises as ``Transfers.register``."""
        for lane in self._lanes:
            lane.register(memory)

    def close(self) -> None:
        """Idempotent."""
        for lane in self._lanes:
            lane.close()

    def run(
        self, op: str, pages: Sequence[memoryview], targets: Sequence[tuple[int, str]], deadline_s: float | None
    ) -> None:
        """On the agent with the fewest calls. Raises as ``Transfers.run``."""
        with self._lock:
            i = min(range(len(self._busy)), key=self._busy.__getitem__)
            self._busy[i] += 1
        try:
            self._lanes[i].run(op, pages, targets, deadline_s)
        finally:
            with self._lock:
                self._busy[i] -= 1
