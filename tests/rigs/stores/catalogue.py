"""Every stand of the conformance suite, by name. A stand whose module is missing here is no stand.

``emulated`` ones are named so in every test id: they show our side of the conversation only.
"""

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.rigs.stores.base import Stand


@dataclass(frozen=True)
class Line:
    """One way to run one backend."""

    name: str
    module: str  # below tests.rigs.stores
    variant: str = ""
    emulated: bool = False

    @property
    def id(self) -> str:
        """As test ids show it."""
        return f"{self.name}-EMULATED" if self.emulated else self.name

    def stand_class(self) -> type[Stand]:
        """The class of its stand, for flags before anything is started."""
        found: Any = importlib.import_module(f"tests.rigs.stores.{self.module}").stand_class(self.variant)
        if not issubclass(found, Stand) or found.emulated != self.emulated:
            raise TypeError(f"{self.name}: not the stand that the catalogue says")
        return found  # type: ignore[no-any-return]

    def make(self, root: Path, *, small: bool = False) -> Stand:
        """The stand, not started. ``root`` is made."""
        root.mkdir(parents=True, exist_ok=True)
        return self.stand_class()(self.name, root, small=small)


# Sorted by name.
CATALOGUE: tuple[Line, ...] = (
    Line("aibrix-l1", "aibrix"),
    Line("aibrix-l1-rocksdb", "aibrix", "both"),
    Line("aibrix-rocksdb", "aibrix", "rocksdb"),
    Line("aibrix-shfs", "aibrix", "shfs"),
    Line("dynamic", "dynamic"),
    Line("eic", "eic", emulated=True),
    Line("file", "file"),
    Line("hf3fs", "hf3fs", emulated=True),
    Line("mooncake", "mooncake"),
    Line("mooncake-peer", "mooncake", "peer"),
    Line("nixl-obj", "nixl", "obj"),
    Line("nixl-posix-aio", "nixl", "aio"),
    Line("nixl-posix-posixaio", "nixl", "posix_aio"),
    Line("nixl-posix-uring", "nixl", "uring"),
    Line("redis", "redis"),
)


def line(name: str) -> Line:
    """The line of this name. Raises ``KeyError``."""
    return {item.name: item for item in CATALOGUE}[name]
