"""The guard's own calls into a store that traffic is kept away from, or that nobody uses just now (F79).

A read probe is a page's whole way: put, exists, get, compare, delete. A store that takes nothing just now (a full
disk) still serves reads (F62), so then it must only answer about a page that nobody stored. Blocks as the store does.
"""

import os
import secrets
from contextlib import suppress

from hicache_hooks.backends.base import Backend, Got
from hicache_hooks.backends.canary import Scratch, Sealer


class StoreProbe:
    """Probes one opened backend; each call of ``read`` and ``write`` is one probe."""

    def __init__(self, backend: Backend, sealer: Sealer, scratch: Scratch) -> None:
        """``scratch`` is registered with the backend where that needs it, and lives as long."""
        self._backend = backend
        self._sealer = sealer
        self._exists = getattr(backend, "confirm", backend.batch_exists)
        self._written, self._read = scratch.pages[:2]

    def _key(self) -> str:
        return f"{self._sealer.namespace}.{secrets.token_hex(32)}"

    def write(self) -> bool:
        """True when the store took a page. Raises what the store raises."""
        key = self._key()
        self._seal(key)
        try:
            return self._backend.batch_put([key], [self._written]) == [True]
        finally:
            self._drop(key)

    def read(self, put: bool) -> bool:
        """True when the store answers rightly; ``put`` False: it takes nothing now. Raises what the store raises."""
        key = self._key()
        taken = False
        if put:
            with suppress(Exception):
                self._seal(key)
                taken = self._backend.batch_put([key], [self._written]) == [True]
        try:
            if self._exists([key]) != [taken]:
                return False
            got = self._backend.batch_get([key], [self._read])
            if not taken:
                return got == [Got.MISS]
            return got == [Got.HIT] and self._sealer.check(self._read, key) is None
        finally:
            if taken:
                self._drop(key)

    def _seal(self, key: str) -> None:
        self._written[:4096] = os.urandom(4096)
        self._sealer.seal(self._written, key)

    def _drop(self, key: str) -> None:
        with suppress(BaseException):  # a page that stays is random, small and in our namespace: clear finds it
            self._backend.delete([key])
