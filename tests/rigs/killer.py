"""A backend that kills its process at one step, as a vendor's library that crashes does (F19)."""

import os
import signal
from typing import Any

from tests.rigs.backends import BK

from hicache_hooks.backends.base import StoreContext


class Killer(BK):
    """Options beside BK's: ``die_at`` (``open``, ``register``, ``batch_put``) and ``die_if``: only while this file
    exists; every attempt appends a line to ``attempts``."""

    def __init__(self, options: dict[str, Any], context: StoreContext) -> None:
        self._die_at, self._die_if = options.get("die_at"), options.get("die_if", "")
        with open(options["attempts"], "a") as file:
            file.write(f"{os.getpid()}\n")
        super().__init__(options, context)

    def _enter(self, method: str) -> Any:
        if method == self._die_at and (not self._die_if or os.path.exists(self._die_if)):
            os.kill(os.getpid(), signal.SIGKILL)
        return super()._enter(method)
