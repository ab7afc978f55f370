"""Which memory is the engine's host pools': what a store's late call must never touch.

A pool keeps its pages in tensors among its attributes (``kv_buffer``, ``k_buffer``, lists of them), and may make them
anew later. So they are looked up at each question; a pool in which no tensor is found makes every answer "no".
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any


class PoolMemory:
    """Pools by the name they were registered under. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pools: dict[str, Any] = {}
        self._completed = False

    def add(self, name: str, pool: Any) -> bool:
        """False when this pool is known under this name."""
        with self._lock:
            if self._pools.get(name) is pool:
                return False
            self._pools[name] = pool
            return True

    def complete(self) -> bool:
        """True the first time."""
        with self._lock:
            was, self._completed = self._completed, True
            return not was

    def strangers(self, tensors: Sequence[Any]) -> bool:
        """True when none of ``tensors`` lies in a pool's memory, and that is known for sure."""
        with self._lock:
            pools = list(self._pools.values())
        spans = []
        for pool in pools:
            found = list(_spans(pool))
            if not found:
                return False
            spans += found
        if not spans:
            return False
        for tensor in tensors:
            if tensor is None:
                continue
            start = _address(tensor)
            if start is None or any(low <= start < high for low, high in spans):
                return False
        return True


def _spans(pool: Any) -> Iterator[tuple[int, int]]:
    for value in list(getattr(pool, "__dict__", {}).values()):
        members: Iterable[Any] = (value,)
        if isinstance(value, list | tuple):
            members = value
        elif isinstance(value, dict):
            members = value.values()
        for member in members:
            start = _address(member)
            if start is not None:
                storage = member.untyped_storage()
                yield int(storage.data_ptr()), int(storage.data_ptr()) + int(storage.nbytes())


def _address(value: Any) -> int | None:
    """Where a tensor's data begins; None for what is no tensor, or an empty one."""
    if not hasattr(value, "untyped_storage"):
        return None
    start = int(value.data_ptr())
    return start or None
