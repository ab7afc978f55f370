"""What COMMIT installs on SGLang and UNDO puts back: a backend object with all that belongs to it."""

from dataclasses import dataclass, field
from typing import Any

from hicache_hooks.cache.config import Running

ANYTHING: Any = object()
"""As a ``base``: whatever runs is replaced (UNDO)."""


@dataclass(frozen=True, slots=True)
class Parked:
    """``backend`` None: nothing attached. The engine's threads are its controller's own and are not part of it.

    ``base``: the backend object that ran when PREPARE decided what to build, None for none. COMMIT replaces that one
    and no other: the engine's own API is open meanwhile.
    """

    running: Running
    backend: Any = field(default=None, repr=False)
    storage_config: Any = field(default=None, repr=False)
    base: Any = field(default=ANYTHING, repr=False, compare=False)

    @property
    def name(self) -> str | None:
        """The backend's type string."""
        return self.running.config.backend if self.running.config is not None else None


@dataclass(frozen=True, slots=True)
class LiveChange:
    """Only knobs or policies differ: nothing was built. ``base`` as in ``Parked``."""

    running: Running
    base: Any = field(default=ANYTHING, repr=False, compare=False)
