"""Backend ``eic``: Volcano Engine's Elastic Instant Cache, by the client that its images carry.

**Never run against the service**: written against the call surface that SGLang's and AIBrix's backends use, and tested
with a fake of it (README, "eic"). Pages go from and to the registered host pool without copies. What the service
stores is checked by the page's own trailer like everything else. The client cannot list keys, so ``clear`` is refused:
pages end by ``ttl_second``.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from hicache_hooks.backends import eic_client
from hicache_hooks.backends.base import Got, Manifest, StoreContext
from hicache_hooks.backends.eic_client import EicClient, EicFailed
from hicache_hooks.backends.eic_options import EicConfig, EicOptions, endpoint_of
from hicache_hooks.backends.native import OpenState, Ranges, address_of
from hicache_hooks.backends.registry import BackendSpec
from hicache_hooks.backends.upkeep import stored_or_raise
from hicache_proto.errors import PrepareFailed
from hicache_proto.model import LAYOUTS

MAX_BATCH = 1024  # keys per call, as SGLang's backend asks
CLOSE_WAIT_S = 5.0
_STAMP_BYTES = 16  # at a page's end before a read; a whole page never holds the same ones


class EicStore:
    """The ``Backend`` (see base.py)."""

    manifest: ClassVar[Manifest] = Manifest(
        name="eic",
        layouts=LAYOUTS,
        needs_registration=True,
        parallel_axes=("tp", "pp"),
        summary="Elastic Instant Cache; never run against the service",
    )

    def __init__(self, options: EicOptions, context: StoreContext) -> None:
        """``options`` must be effective ones. No I/O."""
        self._page_bytes = context.page_bytes
        self._client = EicClient(options)
        self._endpoint = endpoint_of(options.config) if isinstance(options.config, EicConfig) else ""
        self._namespace, self._ttl = options.namespace, options.ttl_second
        self._state = OpenState("eic")
        self._ranges = Ranges()

    def open(self) -> None:
        """Connect.

        Raises:
            EicFailed: the client could not be initialised, or the service answers without sense.
        """
        self._client.open()
        self._state.opened()

    def register(self, pool: memoryview) -> None:
        """Raises EicFailed."""
        with self._state.inside():
            address = address_of(pool)
            if self._ranges.add(address, pool.nbytes):
                try:
                    self._client.register(address, pool.nbytes)
                except BaseException:
                    self._ranges.drop(address)
                    raise

    def close(self) -> None:
        """Idempotent; also after an ``open`` that failed half-way."""
        self._state.shut(CLOSE_WAIT_S)
        self._client.drop()

    # -------------------------------------------------------------- traffic

    def batch_put(self, keys: Sequence[str], pages: Sequence[memoryview]) -> list[bool | None]:
        """Raises EicFailed when not one could be stored. None: this key or its batch failed, another was stored."""
        with self._state.inside():
            parts = self._parts(pages, self._client.direct[0])
            done: list[bool | None] = []
            for at in range(0, len(keys), MAX_BATCH):
                try:
                    done += self._client.put(keys[at : at + MAX_BATCH], parts[at : at + MAX_BATCH])
                except EicFailed as exc:
                    return stored_or_raise(done, len(keys), exc)
            if keys and not any(done):
                raise EicFailed(f"none of {len(keys)} pages was stored")
            return done

    def batch_get(self, keys: Sequence[str], pages: Sequence[memoryview]) -> list[Got]:
        """The client does not say how long an object was: a page whose end was not written is a miss.

        Raises EicFailed when a whole batch failed before one page was read.
        """
        with self._state.inside():
            parts = self._parts(pages, self._client.direct[1])
            stamp = os.urandom(_STAMP_BYTES)
            for page in pages:
                page[-_STAMP_BYTES:] = stamp
            found: list[bool | None] = []
            for at in range(0, len(keys), MAX_BATCH):
                try:
                    found += self._client.get(keys[at : at + MAX_BATCH], parts[at : at + MAX_BATCH])
                except EicFailed:
                    if not any(found):
                        raise
                    found += [None] * (len(keys) - len(found))  # what was read before counts (F80)
                    break
            return [_got(item, page, stamp) for item, page in zip(found, pages, strict=True)]

    def batch_exists(self, keys: Sequence[str]) -> list[bool]:
        """Raises EicFailed when all that was asked for failed."""
        with self._state.inside():
            return self._exists(keys)

    def _exists(self, keys: Sequence[str]) -> list[bool]:
        found: list[bool | None] = []
        for at in range(0, len(keys), MAX_BATCH):
            found += self._client.exists(keys[at : at + MAX_BATCH])
        if found and all(item is None for item in found):
            raise EicFailed(f"exists failed for all of {len(keys)} keys")
        return [bool(item) for item in found]

    def _parts(self, pages: Sequence[memoryview], direct: bool) -> list[tuple[int, int, bool]]:
        parts = []
        for page in pages:
            if page.nbytes != self._page_bytes:
                raise ValueError(f"page buffer of {page.nbytes} bytes, expected {self._page_bytes}")
            address = address_of(page)
            parts.append((address, page.nbytes, direct and self._ranges.covers(address, page.nbytes)))
        return parts

    # -------------------------------------------------------------- upkeep

    def delete(self, keys: Sequence[str]) -> int:
        """The client does not say what was there: it is asked before."""
        with self._state.inside():
            there = [key for key, yes in zip(keys, self._exists(keys), strict=True) if yes] if keys else []
            if there:
                self._client.delete(list(dict.fromkeys(there)))
            return len(set(there))

    def set_aside(self, key: str, reason: str) -> None:
        """Deleted: the service has no place for a look."""
        with self._state.inside():
            self._client.delete([key])

    def clear(self) -> int:
        """
        Raises:
            PrepareFailed: always; the client's calls cannot list a namespace's keys.
        """
        with self._state.inside():
            raise PrepareFailed(
                "EIC's client cannot list keys, so nothing can be cleared; pages end by ttl_second",
                details={"reason": "clear_unsupported"},
            )

    def health(self) -> dict[str, Any]:
        """Facts for status, after one question to the service.

        Raises:
            EicFailed: it does not answer.
        """
        with self._state.inside():
            self._exists(["hicache-health"])
            return {
                "inner": "eic",
                "endpoint": self._endpoint,
                "namespace": self._namespace,
                "ttl_second": self._ttl,
                "registered_bytes": self._ranges.nbytes(),
                "never_run_against_the_service": True,
            }


def _got(found: bool | None, page: memoryview, stamp: bytes) -> Got:
    if found is None:
        return Got.ERROR
    return Got.HIT if found and bytes(page[-_STAMP_BYTES:]) != stamp else Got.MISS


def _create(options: Any, context: StoreContext, env: Mapping[str, str]) -> EicStore:
    del env
    return EicStore(options, context)


SPEC = BackendSpec(
    manifest=lambda options, env: EicStore.manifest,
    options=EicOptions,
    create=_create,
    missing=eic_client.missing,
    layouts=EicStore.manifest.layouts,
    notes=(
        "needs the closed client of Volcano Engine's images; no package index has it",
        "tested with a fake of its calls; never run against the service; clear is not possible",
    ),
    inner=lambda options: "eic",
)
