"""How many threads of this process were given up and have not come back, for ``/metrics`` (F46).

Nothing can stop a thread that stands in a store's code. Where one is given up its number is bounded, by whoever did
it; here they are counted. Calls of the installed store are not: its guard reports those by name.
"""

import threading


class Abandoned:
    """A count. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0

    def add(self) -> None:
        """One was given up."""
        with self._lock:
            self._count += 1

    def back(self) -> None:
        """One that was given up has ended."""
        with self._lock:
            self._count -= 1

    @property
    def count(self) -> int:
        """How many there are now."""
        return self._count


THREADS = Abandoned()
