"""Stand of ``dynamic``: the scriptable store in memory, allow-listed as an operator would do it."""

from pathlib import Path
from typing import Any

from tests.rigs.stores.base import Stand

ROOT = Path(__file__).resolve().parents[3]


class DynamicStand(Stand):
    """See the module's text."""

    backend_name = "dynamic"
    why_not_small = "BK keeps pages in the engine's memory, without a limit"
    refuses_fork = False  # memory of the process; a child has its own copy

    def config(self) -> dict[str, Any]:
        return {
            "backend_name": "bk", "module_path": "tests.rigs.backends", "class_name": "BK", "options": {"store": "s"}
        }  # fmt: skip

    def env(self) -> dict[str, str]:
        return {"HICACHE_DYNAMIC_BACKENDS": "tests.rigs.backends:BK", "PYTHONPATH": str(ROOT)}


def stand_class(variant: str) -> type[Stand]:
    """The one there is."""
    return DynamicStand
