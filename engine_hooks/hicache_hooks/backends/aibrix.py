"""Backend ``aibrix``: AIBrix KVCache with its DRAM cache (L1) and one of its connectors (L2) behind one name.

Rules:

1. One page buffer, trailer included, is one block of the vendor's. Pages are copied in and out of its slabs.
2. A batch counts as far as the vendor says, from the front; what lies behind a hole is asked for again. L1, RocksDB
   and the mock end a read at the first hole (tried). With SHFS, and who knows with what else, ``get`` counts what it
   found, wherever the holes are, and hands out blocks that nobody filled: there reads ask ``exists`` first, trust its
   prefix only, and read one by one where less came. RocksDB alone is read past all that (``aibrix_direct``).
3. A put that was taken in part, or that raised, is asked for, page by page. Within a process a page is put by one
   thread at a time: two of SHFS's writers take each other's temporary file away.
4. A page that exists and cannot be read (another length) is removed, else it would be a stale hit for ever.
5. The vendor's time-outs give memory back that a late read still fills. Such bytes are found by the page check.
6. RocksDB belongs to one process: each rank has a directory of its own below ``rocksdb_root``, by namespace.
"""

import importlib.util
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar

import msgspec

from hicache_hooks.backends.aibrix_direct import DirectReads, direct_reads
from hicache_hooks.backends.aibrix_look import L1View, facts, refusal, stored, view
from hicache_hooks.backends.aibrix_manager import end, make
from hicache_hooks.backends.aibrix_options import BLOCK_TOKENS, CONNECTORS, GIB, L2_OPTIONS, LOCAL, AibrixOptions
from hicache_hooks.backends.aibrix_reopen import Reopener
from hicache_hooks.backends.base import LARGE_BATCH, Got, Manifest, StoreContext
from hicache_hooks.backends.known import Known
from hicache_hooks.backends.native import OpenState, Turns
from hicache_hooks.backends.options import invalid
from hicache_hooks.backends.registry import BackendSpec
from hicache_hooks.backends.slots import Slot, claim
from hicache_hooks.backends.upkeep import Upkeep, part_or_raise
from hicache_proto.model import LAYOUTS

log = logging.getLogger(__name__)

BATCH = 32  # pages of one call of the vendor; its transit memory holds three such batches
CLOSE_WAIT_S = 30.0
PUT_WAIT_S = 10.0  # for another thread's put of the same page
ENDS_AT_HOLES = ("", "MOCK", "ROCKSDB")  # rule 2, by ``l2_backend``
RESET_EVERY = 512  # calls; the vendor's metrics are lists that grow until they are reset
DEFAULT_ROCKSDB_ROOT = "~/.kv_cache_ol/rocksdb"  # the vendor's


class AibrixStore:
    """The ``Backend`` (see base.py)."""

    manifest: ClassVar[Manifest] = Manifest(
        name="aibrix",
        layouts=LAYOUTS,
        alignment=2 * BLOCK_TOKENS,
        parallel_axes=("tp", "pp"),
        summary="AIBrix KVCache: DRAM cache and a connector",
        batch_bytes=LARGE_BATCH,  # a call takes locks and Python: a fifth of a read of L1 in calls of 7 MiB
    )

    def __init__(self, options: AibrixOptions, context: StoreContext, source: str = "options") -> None:
        """``options`` must be effective ones. No I/O."""
        if options.l1_capacity_gb is None or options.l2_backend is None:
            raise invalid("l2_backend", "was not resolved", "missing_option")
        self._options, self._source = options, source
        self._page_bytes = context.page_bytes
        self._namespace = context.namespace
        self._l1_bytes = int(options.l1_capacity_gb * GIB)
        self._state = OpenState("aibrix")
        self._turns = Turns(PUT_WAIT_S)
        self._manager: Any = None
        self._slot: Slot | None = None
        self._hashes: Any = None  # the vendor's key class
        self._calls = 0
        self._upkeep = threading.Lock()
        self._tidy = Upkeep("aibrix")
        self._known = Known(enabled=options.keeps_all)
        self._l1: L1View | None = None
        self._reopener: Reopener | None = None
        self._direct: DirectReads | None = None

    def open(self) -> None:
        """Make the manager.

        Raises:
            BackendUnavailable: the package is not usable; others are the vendor's.
            OSError: the directory cannot be used.
        """
        ours = {}
        if self._options.l2_backend == "ROCKSDB":
            root = os.path.expanduser(str(self._options.l2_options.get("rocksdb_root", DEFAULT_ROCKSDB_ROOT)))
            self._slot = claim(os.path.join(root, self._namespace))
            ours["rocksdb_root"] = self._slot.path
        elif self._options.l2_backend == "SHFS" and "shfs_root" in self._options.l2_options:
            # The vendor takes a path that cannot be a directory, and fails at every put.
            os.makedirs(str(self._options.l2_options["shfs_root"]), mode=0o770, exist_ok=True)
        self._manager = make(self._page_bytes, self._options.settings(**ours), self._l1_bytes)
        self._hashes = importlib.import_module("aibrix_kvcache").BlockHashes
        with suppress(AttributeError, ImportError):  # another version of the package: it is asked by its API
            self._l1 = view(self._manager, BLOCK_TOKENS)
        if self._options.l2_backend == "ROCKSDB":
            self._direct = direct_reads(self._manager, self._hashes, self._page_bytes, BLOCK_TOKENS)
            self._reopener = Reopener(
                self._manager._l2_cache._backend, self._state,
                unasked=bool(self._options.l1_capacity_gb), reopened=self._known.clear,
            )  # fmt: skip
        self._state.opened()

    def register(self, pool: memoryview) -> None:
        """Pages are copied: none is needed."""

    def close(self) -> None:
        """Idempotent; waits for writes that the vendor still has in its queue.

        Raises:
            TimeoutError: calls are still inside, or it does not end; the manager is left alone for good.
        """
        try:
            if self._state.shut(CLOSE_WAIT_S):
                manager, self._manager = self._manager, None
                try:
                    end(manager)
                except TimeoutError:
                    self._manager = manager  # it lives on: its directory stays claimed
                    raise
        finally:
            if self._slot is not None and self._manager is None:
                self._slot.release()

    # -------------------------------------------------------------- traffic

    def batch_put(self, keys: Sequence[str], pages: Sequence[memoryview]) -> list[bool | None]:
        """A key that exists is written again. False: not stored, for want of memory or of room on the disk.

        None: the connector failed with this page, or did not answer after others were stored.

        Raises:
            TimeoutError, RuntimeError: the connector does not answer, and not one page is stored.
        """
        todo = dict(zip(keys, pages, strict=True))
        done: dict[str, bool | None] = {}
        if self._reopener is not None:
            self._reopener.heal()
        with self._state.inside(), self._turns.of(todo):
            since = self._known.now
            self._check(pages)
            try:
                for batch in _batches(list(todo)):
                    self._put(batch, [todo[key] for key in batch], done)
            except Exception as exc:
                if not any(done.values()):
                    raise
                log.warning("aibrix: a put ended early: %s", type(exc).__name__)
            finally:
                if self._reopener is not None and not all(done.get(key) for key in todo):
                    self._reopener.refused()
            self._known.add((key for key, yes in done.items() if yes), since)
        return [done.get(key) for key in keys]

    def _put(self, keys: list[str], pages: list[memoryview], done: dict[str, bool | None]) -> None:
        """Adds each key's result to ``done`` as it is known."""
        while keys:
            status = self._manager.allocate_for(None, self._hashes(keys, BLOCK_TOKENS))
            if not status.is_ok():
                break
            handle = status.get()
            fits = len(handle)
            for tensor, page in zip(handle.to_tensors(), pages, strict=False):
                tensor.view(-1).copy_(_tensor(page))
            stored, otherwise = self._put_handle(keys[:fits], handle)
            done.update((key, True) for key in keys[:stored])
            for key in keys[stored:fits]:  # rule 3
                done[key] = self._prefix([key]) == 1 or otherwise
            keys, pages = keys[fits:], pages[fits:]
        done.update((key, False) for key in keys)

    def _put_handle(self, keys: list[str], handle: Any) -> tuple[int, bool | None]:
        """How many of the first ``keys`` the vendor says are stored, and what is to be said of the others."""
        try:
            status = self._manager.put(None, self._hashes(keys, BLOCK_TOKENS), handle)
        except Exception as exc:  # its error path for batches fails itself (AttributeError), and keeps the memory
            log.warning("aibrix: a put raised %s", type(exc).__name__)
            with suppress(ValueError):  # released already
                handle.release()
            return 0, None
        self._called()
        return (int(status.get()) // BLOCK_TOKENS, False) if status.is_ok() else (0, refusal(status))

    def batch_get(
        self, keys: Sequence[str], pages: Sequence[memoryview], *, arrived: Callable[[str], None] = lambda key: None
    ) -> list[Got]:
        """Raises as ``batch_put``, when not one page was read before; later pages are errors then."""
        todo = dict(zip(keys, pages, strict=True))
        got: dict[str, Got] = {}
        with self._state.inside():
            self._check(pages)
            try:
                if self._direct is not None:
                    self._read_direct(self._direct, todo, got)
                elif self._options.l2_backend in ENDS_AT_HOLES:
                    self._read_fronts(todo, got, arrived)
                else:
                    self._read_asking(list(todo), todo, got)
            except Exception as exc:
                got = dict(zip(todo, part_or_raise(list(got.values()), len(todo), exc), strict=True))
        for key, page in zip(keys, pages, strict=True):
            if page is not todo[key] and got[key] is Got.HIT:
                page[:] = todo[key]
        return [got[key] for key in keys]

    def _read_direct(self, direct: DirectReads, todo: dict[str, memoryview], got: dict[str, Got]) -> None:
        if odd := direct.read(todo, got):
            self._tidy(lambda: self._remove(odd))  # rule 4
        self._known.drop(key for key in todo if got[key] is Got.MISS)

    def _read_fronts(self, todo: dict[str, memoryview], got: dict[str, Got], arrived: Callable[[str], None]) -> None:
        """Nothing is asked first: a question costs a tenth of the read."""
        keys = list(todo)
        while keys:
            batch = keys[:BATCH]
            read, status = self._copy_front(batch, [todo[key] for key in batch], arrived=arrived)
            got.update((key, Got.HIT) for key in batch[:read])
            if not read and (status.is_timeout() or status.is_cancelled()):
                raise TimeoutError("the aibrix connector did not answer in time")
            if read < len(batch):  # a hole, or a page that cannot be read (rule 4)
                self._known.drop([batch[read]])
                self._read_asking([batch[read]], todo, got)
                read += 1
            keys = keys[read:]

    def _read_asking(self, keys: list[str], todo: dict[str, memoryview], got: dict[str, Got]) -> None:
        for run, there in self._runs(keys):
            if there:
                got.update(self._get(run, [todo[key] for key in run]))
            else:
                got.update((key, Got.MISS) for key in run)

    def _copy_front(
        self, keys: list[str], pages: list[memoryview], *,
        all_or_none: bool = False, arrived: Callable[[str], None] = lambda key: None,
    ) -> tuple[int, Any]:  # fmt: skip
        """How many of the first ``keys`` were copied into their pages, and the vendor's status."""
        status = self._manager.acquire(None, self._hashes(keys, BLOCK_TOKENS))
        self._called()
        if not status.is_ok():
            return 0, status
        tokens, handle = status.get()
        try:
            read = min(tokens // BLOCK_TOKENS, len(handle))
            if all_or_none and not read == len(handle) == len(keys):
                return 0, status
            for key, tensor, page in zip(keys, handle.to_tensors()[:read], pages, strict=False):
                _tensor(page).copy_(tensor.view(-1))
                arrived(key)
        finally:
            handle.release()
        return read, status

    def _get(self, keys: list[str], pages: list[memoryview]) -> dict[str, Got]:
        """Pages that ``exists`` has just found (rule 2)."""
        read, status = self._copy_front(keys, pages, all_or_none=True)
        if read:
            return dict.fromkeys(keys, Got.HIT)
        if len(keys) > 1:
            got: list[Got] = []
            try:
                for key, page in zip(keys, pages, strict=True):
                    got.append(self._get([key], [page])[key])
            except Exception as exc:
                got = part_or_raise(got, len(keys), exc)
            return dict(zip(keys, got, strict=True))
        if status.is_timeout() or status.is_cancelled() or status.is_out_of_memory():
            return {keys[0]: Got.ERROR}
        self._tidy(lambda: self._remove(keys))  # rule 4
        return {keys[0]: Got.MISS}

    def batch_exists(self, keys: Sequence[str]) -> list[bool]:
        """Raises as ``batch_put``."""
        with self._state.inside():
            found = {key: there for run, there in self._runs(list(dict.fromkeys(keys))) for key in run}
        return [found[key] for key in keys]

    def _runs(self, keys: list[str]) -> Iterator[tuple[list[str], bool]]:
        """``keys`` in order, in runs of at most a batch that are all stored, or of one that is not."""
        while keys:
            n = self._prefix(keys[:BATCH])
            if n:
                yield keys[:n], True
            if n < min(len(keys), BATCH):
                yield [keys[n]], False
                n += 1
            keys = keys[n:]

    def _prefix(self, keys: list[str]) -> int:
        """How many of the first ``keys`` are stored without a gap."""
        known = self._known.prefix(keys) if self._l1 is None else self._l1.prefix(keys)
        if known == len(keys) or (self._l1 is not None and not self._options.l2_backend):
            return known
        status = self._manager.exists(None, self._hashes(keys[known:], BLOCK_TOKENS))
        self._called()
        if status.is_ok():
            return known + int(status.get()) // BLOCK_TOKENS
        if status.is_timeout() or status.is_cancelled():
            raise TimeoutError("the aibrix connector did not answer in time")
        if not status.is_not_found():
            raise RuntimeError(f"the aibrix connector failed: {status.error_code.name}")
        return known

    def _check(self, pages: Sequence[memoryview]) -> None:
        for page in pages:
            if page.nbytes != self._page_bytes:
                raise ValueError(f"page buffer of {page.nbytes} bytes, expected {self._page_bytes}")

    def _called(self) -> None:
        self._calls += 1
        if self._calls % RESET_EVERY == 0:
            with suppress(Exception):  # only numbers that nobody reads
                self._manager.metrics.reset()

    # -------------------------------------------------------------- upkeep

    def delete(self, keys: Sequence[str]) -> int:
        """Remove pages. Raises as ``batch_put``."""
        with self._state.inside():
            there = [key for run, found in self._runs(list(dict.fromkeys(keys))) if found for key in run]
            self._remove(there)
        return len(there)

    def _remove(self, keys: list[str]) -> None:
        for batch in _batches(keys):
            with self._known.removing(batch):
                status = self._manager.delete(None, self._hashes(batch, BLOCK_TOKENS))
            if not status.is_ok() and not status.is_not_found():
                raise RuntimeError(f"the aibrix connector did not remove pages: {status.error_code.name}")

    def set_aside(self, key: str, reason: str) -> None:
        """Removed; nothing is kept for a look."""
        log.warning("aibrix: a page failed its check (%s) and is removed", reason)
        with self._state.inside():
            self._remove([key])

    def clear(self) -> int:
        """Delete this namespace's pages (F68).

        Raises:
            RuntimeError: the connector has no way to list its pages.
        """
        with self._state.inside(), self._upkeep:
            mine = [key for key in stored(self._manager, self._l1) if key.startswith(f"{self._namespace}.")]
            self._remove(mine)
        return len(mine)

    def health(self) -> dict[str, Any]:
        """Facts for status. Raises ``RuntimeError`` when it is not open."""
        with self._state.inside():
            return {
                **facts(self._manager, self._options, self._source),
                "l1_capacity_bytes": self._l1_bytes,
                "path": self._slot.path if self._slot else str(self._options.l2_options.get("shfs_root", "")) or None,
                "reopened": self._reopener.count if self._reopener is not None else 0,
            }


def _tensor(page: memoryview) -> Any:
    import torch

    return torch.frombuffer(page, dtype=torch.uint8)


def _batches(keys: list[str]) -> Iterator[list[str]]:
    return (keys[i : i + BATCH] for i in range(0, len(keys), BATCH))


def manifest_of(options: AibrixOptions, env: Mapping[str, str]) -> Manifest:
    """Shared only when the connector is: L1, RocksDB and the mock are this process's or this host's.

    Pages of a connector pass through the vendor's transit memory, 96 pages: not room for two calls at a time each way.
    """
    connector = options.l2_backend or ""
    return msgspec.structs.replace(AibrixStore.manifest, shared=connector not in LOCAL, calls=1 if connector else 0)


def _missing() -> list[str]:
    return [] if importlib.util.find_spec("aibrix_kvcache") else ["package aibrix-kvcache (extra aibrix)"]


SPEC = BackendSpec(
    manifest=manifest_of,
    options=AibrixOptions,
    create=lambda options, context, env: AibrixStore(options, context, options.source(env)),
    missing=_missing,
    layouts=AibrixStore.manifest.layouts,
    notes=(
        f"connectors: {', '.join(CONNECTORS)}; ROCKSDB, SHFS and MOCK need no server",
        f"l2_options, each over its variable, else the vendor's default: {', '.join(sorted(L2_OPTIONS))}",
    ),
    inner=lambda options: options.inner,
)
