"""What COMMIT installs on SGLang and UNDO puts back: a backend object with all that belongs to it."""

from dataclasses import dataclass, field
from typing import Any

from hicache_hooks.cache.config import Running


@dataclass(frozen=True, slots=True)
class Parked:
    """``backend`` None: nothing attached. The engine's threads are its controller's own and are not part of it."""

    running: Running
    backend: Any = field(default=None, repr=False)
    storage_config: Any = field(default=None, repr=False)

    @property
    def name(self) -> str | None:
        """The backend's type string."""
        return self.running.config.backend if self.running.config is not None else None


@dataclass(frozen=True, slots=True)
class LiveChange:
    """Only knobs or policies differ: nothing was built."""

    running: Running
