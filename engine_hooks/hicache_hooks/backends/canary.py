"""PREPARE's canary: two pages through the same batch calls as traffic, before anything depends on the store.

Steps: contract, ``exists`` of unknown keys, write, ``exists``, read with a hole in the middle, compare with the
trailer, ``exists`` again, delete. Each catches a defect that a store really had: a class without batch methods (F15),
``exists`` that always says no (F67), other bytes than were written, a hole that reads as zeros, a short object with a
stale tail. Keys are random, so ranks and repeats never meet; they are deleted whatever happens.
"""

import mmap
import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn, Protocol, TypeVar

from hicache_hooks.backends.base import Backend, Got
from hicache_hooks.backends.dynamic import REQUIRED_METHODS
from hicache_hooks.guard import describe_exception
from hicache_proto.errors import PrepareFailed

T = TypeVar("T")
_EDGE = 4096  # bytes of a page that a short read leaves alone at its end: trailer and padding are in them
_POISON = bytes([0xA5]) * _EDGE


class Sealer(Protocol):
    """The page trailer (``cache/pages.py``)."""

    namespace: str
    page_bytes: int

    def seal(self, page: memoryview, key: str) -> None: ...
    def check(self, page: memoryview, key: str) -> str | None: ...


class Scratch:
    """Page buffers of the canary's own: page-aligned memory outside the pool, whose pages belong to requests.

    A backend that needs registration gets it registered like a pool, so it must live as long as the backend.
    """

    PAGES = 5  # two written, three read

    def __init__(self, page_bytes: int) -> None:
        self._map = mmap.mmap(-1, self.PAGES * page_bytes)
        self.memory = memoryview(self._map)
        self.pages = [self.memory[i * page_bytes : (i + 1) * page_bytes] for i in range(self.PAGES)]


def run_canary(
    backend: Backend,
    sealer: Sealer,
    scratch: Scratch,
    cancelled: Callable[[], bool] = lambda: False,
    health: Callable[[], dict[str, Any]] | None = None,
) -> None:
    """Prove the opened ``backend``; leaves nothing in it. ``health`` asks it about itself, within a time.

    Raises:
        PrepareFailed: ``details.reason`` is ``backend_contract``, ``canary_write_failed``, ``canary_exists_mismatch``,
            ``canary_read_failed``, ``canary_mismatch`` or ``cancelled``.
    """
    missing = [name for name in REQUIRED_METHODS if not callable(getattr(backend, name, None))]
    if missing:
        _fail("backend_contract", f"the backend has no {', '.join(missing)}", missing=missing)
    # Shaped like a page key (cache/hashing.py), so that every store's naming rules are met too.
    keys = [f"{sealer.namespace}.{secrets.token_hex(32)}" for _ in range(3)]
    try:
        _Run(backend, sealer, scratch, keys, cancelled, health or backend.health).steps()
    finally:
        with suppress(BaseException):  # a store whose delete fails was found out above, or leaves two odd pages
            backend.delete(keys)


class _Run:
    def __init__(
        self,
        backend: Backend,
        sealer: Sealer,
        scratch: Scratch,
        keys: list[str],
        cancelled: Callable[[], bool],
        health: Callable[[], dict[str, Any]],
    ) -> None:
        self.backend = backend
        self.sealer = sealer
        self.written, self.read = scratch.pages[:2], scratch.pages[2:]
        self.first, self.absent, self.second = keys
        self.cancelled = cancelled
        self.health = health

    def steps(self) -> None:
        self._exists([False, False, False])
        self._write()
        self._exists([True, False, True])
        self._read()
        self._exists([True, False, True])

    def _write(self) -> None:
        stored = [self.first, self.second]
        for key, page in zip(stored, self.written, strict=True):
            page[:] = os.urandom(4096) * (page.nbytes // 4096) + os.urandom(page.nbytes % 4096)
            self.sealer.seal(page, key)
        done = self._call("canary_write_failed", lambda: self.backend.batch_put(stored, self.written), 2)
        if not all(done):
            _fail("canary_write_failed", "the store did not take the canary pages", health=_plain(self.health))

    def _exists(self, expected: list[bool]) -> None:
        keys = [self.first, self.absent, self.second]
        found = self._call("canary_exists_mismatch", lambda: self.backend.batch_exists(keys), 3)
        confirm = getattr(self.backend, "confirm", None)
        if confirm is not None and [bool(item) for item in found] == expected:  # what it remembers shows nothing
            found = self._call("canary_exists_mismatch", lambda: confirm(keys), 3)
        if [bool(item) for item in found] != expected:
            what = "does not find a page that it stored" if expected[0] else "finds pages that nobody stored"
            if expected[0] and found[1]:
                what = "finds a page that nobody stored"
            _fail("canary_exists_mismatch", f"exists {what}")

    def _read(self) -> None:
        for page in self.read:
            page[-_EDGE:] = _POISON[: page.nbytes]
        keys = [self.first, self.absent, self.second]
        got = self._call("canary_read_failed", lambda: self.backend.batch_get(keys, self.read), 3)
        if got[1] == Got.HIT:
            _fail("canary_mismatch", "a page that nobody stored was read as a hit")
        if got[0] != Got.HIT or got[2] != Got.HIT:
            _fail("canary_read_failed", "a canary page was stored and could not be read")
        for key, page, original in (
            (self.first, self.read[0], self.written[0]),
            (self.second, self.read[2], self.written[1]),
        ):
            wrong = self.sealer.check(page, key)
            # The checksum vouches for the payload; comparing whole views would take 4 ms per MiB.
            if wrong is not None or bytes(page[-_EDGE:]) != bytes(original[-_EDGE:]):
                _fail("canary_mismatch", f"a canary page came back with other bytes ({wrong or 'padding'})")

    def _call(self, reason: str, call: Callable[[], Sequence[T]], results: int) -> Sequence[T]:
        if self.cancelled():
            _fail("cancelled", "cancelled")
        failed: BaseException | None = None
        out: Sequence[T] = ()
        try:
            out = call()
        except BaseException as exc:  # SystemExit too: the thread is the engine's (F38)
            failed = exc
        if isinstance(failed, NotImplementedError | AttributeError):
            _fail("backend_contract", f"the backend does not implement what it promises: {describe_exception(failed)}")
        if failed is not None:
            _fail(reason, f"the store failed: {describe_exception(failed)}")
        if not isinstance(out, list) or len(out) != results:
            _fail("backend_contract", "the backend does not answer with one result per key")
        return out


def _plain(health: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What the store says about itself, for the refusal (a full disk, say)."""
    with suppress(Exception):
        return {key: value for key, value in health().items() if isinstance(value, bool | int | str | None)}
    return {}


def _fail(reason: str, message: str, **details: Any) -> NoReturn:
    raise PrepareFailed(message, details={"reason": reason, **details}) from None
