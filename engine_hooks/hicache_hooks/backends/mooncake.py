"""Backend ``mooncake``: pages in the memory of a Mooncake cluster, moved by its transfer engine without a copy.

Rules, each for something that was measured (``mooncake_client.py`` has those of set-up and close):

1. The client is called only while it is open, and never in a forked child: a call after ``close()`` ends the process.
2. A page goes to the client only from memory that was registered with it. Over tcp Mooncake takes any memory, so
   nothing but us would notice before RDMA hardware refuses.
3. A read counts only when the stored size is the page's: a longer buffer gets the stored bytes and says their size.
   An object of another size is removed.
4. A key that exists keeps its old bytes and the put says stored. What is bad is found by the page check and removed.
5. Removing skips a reader's lease when it must: what such a reader gets is caught by its own page check.
6. Within a process a key is put by one thread at a time: a put beside an unfinished one says stored, and the page
   cannot be read yet. A key is read once per batch: of two buffers for it Mooncake fills one and reports both.
7. A master that is gone (-900) or silent (-901) for a whole batch raises; the guard tells misses from failures.

The engine contributes ``global_segment_size``: pages stored there end with this client, those on other nodes stay.
"""

import importlib.util
import logging
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, ClassVar

from hicache_hooks.backends.base import LARGE_BATCH, Got, Manifest, StoreContext
from hicache_hooks.backends.mooncake_client import (
    LEASED,
    MISSING,
    NO_SPACE,
    NOT_READY,
    REAPER,
    RPC_FAILED,
    RPC_TIMEOUT,
    WRONG_SIZE,
    answers,
)
from hicache_hooks.backends.mooncake_kept import KEPT, Client, obtain
from hicache_hooks.backends.mooncake_options import MooncakeOptions
from hicache_hooks.backends.native import OpenState, Ranges, Turns, address_of
from hicache_hooks.backends.registry import BackendSpec
from hicache_hooks.backends.slots import Slot, claim
from hicache_hooks.backends.upkeep import Upkeep

log = logging.getLogger(__name__)

CLOSE_WAIT_S = 10.0  # for calls inside: a dead master holds one for 4.6 s
PUT_WAIT_S = 10.0  # for another thread's put of the same page; beside it the page would read as a miss for a moment
LAYOUTS = ("page_first", "page_first_direct", "page_head")


class MooncakeStore:
    """The ``Backend`` (see base.py)."""

    manifest: ClassVar[Manifest] = Manifest(
        name="mooncake",
        layouts=LAYOUTS,
        needs_registration=True,
        parallel_axes=("tp", "pp"),
        summary="distributed memory pool; zero-copy over RDMA or tcp",
        # A call asks the master twice and moves its pages side by side. Over tcp calls of 7 MiB cost 1.3 times the
        # processor of those of 32 MiB, and two calls at a time 1.2 times that of one.
        batch_bytes=LARGE_BATCH,
        calls=1,
    )

    def __init__(self, options: MooncakeOptions, context: StoreContext) -> None:
        """``options`` must be effective ones. No I/O."""
        self._options = options
        self._page_bytes = context.page_bytes
        tag = options.extra_backend_tag
        self._tag = f"{tag}_" if tag else ""
        self._pattern = f"^{re.escape(f'{self._tag}{context.namespace}.')}"
        self._segment = options.segment_bytes(context.tp_size * context.pp_size)
        self._device = options.device_of(context.tp_rank)
        path = options.ssd_offload_path if options.enable_ssd_offload else None
        self._ssd_root = os.path.join(path, context.namespace) if path else ""
        self._ssd_slot: Slot | None = None
        self._state = OpenState("mooncake")
        self._ranges = Ranges()
        self._held: Client | None = None
        self._client: Any = None  # of ``_held``
        self._no_space = False
        self._tidy = Upkeep("mooncake")
        self._turns = Turns(PUT_WAIT_S)

    def open(self) -> None:
        """Connect; contribute the segment.

        Raises:
            PrepareFailed, BackendUnavailable: see ``mooncake_kept.obtain``.
        """
        if self._ssd_root:  # two clients that share a directory overwrite each other's files
            self._ssd_slot = claim(self._ssd_root)
        path = self._ssd_slot.path if self._ssd_slot else ""
        self._held = obtain(self._options, self._segment, self._device, path)
        self._client = self._held.api
        self._state.opened()

    def register(self, pool: memoryview) -> None:
        """Each range once: Mooncake refuses a second time (-600).

        Raises:
            RuntimeError: Mooncake refused.
            ValueError: it overlaps a registered range.
        """
        start = address_of(pool)
        with self._state.inside():
            if not self._ranges.add(start, pool.nbytes):
                return
            code = self._client.register_buffer(start, pool.nbytes)
            if code:
                self._ranges.drop(start)
                raise RuntimeError(f"Mooncake refused to register host memory: {code}")

    def close(self) -> None:
        """Idempotent. Gives the memory back; the client itself is kept for the next attach (``mooncake_kept.py``).

        With a master that does not answer both wait until it does.

        Raises:
            TimeoutError: calls are still inside; the client is left alone for good.
        """
        if not self._state.shut(CLOSE_WAIT_S):
            if self._client is None:
                self._release_slot()  # of an open that failed
            return
        client, held = self._client, self._held
        self._client = self._held = None
        for start in self._ranges.starts():
            with suppress(Exception):  # local; the memory is free to go after it
                client.unregister_buffer(start)
            self._ranges.drop(start)
        if held is None:
            return

        def end() -> None:
            held.end()
            self._release_slot()

        if held.alive():
            end()
        else:
            log.warning("the mooncake master does not answer: its client is given up when it does")
            REAPER.add(end, held.alive)

    def _release_slot(self) -> None:
        if self._ssd_slot is not None:
            self._ssd_slot.release()

    # -------------------------------------------------------------- traffic

    def batch_put(self, keys: Sequence[str], pages: Sequence[memoryview]) -> list[bool | None]:
        """False: no space. None: Mooncake failed with this page. A key that exists keeps what it has (rule 4).

        Raises:
            ConnectionError, TimeoutError: the master (rule 7).
            ValueError: a buffer outside the registered memory.
        """
        todo = dict(zip(keys, pages, strict=True))  # the same key twice is one object
        if not todo:
            return []
        with self._state.inside(), self._turns.of(todo):
            addresses = self._ranges.addresses(list(todo.values()), self._page_bytes)
            names = [self._tag + key for key in todo]
            codes = self._client.batch_put_from(names, addresses, [self._page_bytes] * len(names))
        _require_master(codes)
        self._no_space = NO_SPACE in codes
        done = {key: None if code not in (0, NO_SPACE) else code == 0 for key, code in zip(todo, codes, strict=True)}
        return [done[key] for key in keys]

    def batch_get(self, keys: Sequence[str], pages: Sequence[memoryview]) -> list[Got]:
        """Raises as ``batch_put``."""
        todo = dict(zip(keys, pages, strict=True))
        if not todo:
            return []
        with self._state.inside():
            self._ranges.addresses(pages, self._page_bytes)
            addresses = self._ranges.addresses(list(todo.values()), self._page_bytes)
            names = [self._tag + key for key in todo]
            codes = self._client.batch_get_into(names, addresses, [self._page_bytes] * len(names))
            _require_master(codes)
            bad = [
                name
                for name, code in zip(names, codes, strict=True)
                if code == WRONG_SIZE or (code >= 0 and code != self._page_bytes)
            ]
            if bad:
                self._tidy(lambda: self._remove(bad))
        got = {key: self._got(code) for key, code in zip(todo, codes, strict=True)}
        if len(todo) < len(keys):
            for key, page in zip(keys, pages, strict=True):
                if page is not todo[key] and got[key] is Got.HIT:
                    page[:] = todo[key]
        return [got[key] for key in keys]

    def _got(self, code: int) -> Got:
        if code == self._page_bytes:
            return Got.HIT
        return Got.MISS if code >= 0 or code in (MISSING, NOT_READY, WRONG_SIZE) else Got.ERROR

    def batch_exists(self, keys: Sequence[str]) -> list[bool]:
        """Raises as ``batch_put``. A node that just died is believed for ten seconds; its pages then fail to read."""
        with self._state.inside():
            found = self._client.batch_is_exist([self._tag + key for key in keys]) if keys else []
        _require_master(found)
        return [item == 1 for item in found]

    # -------------------------------------------------------------- upkeep

    def delete(self, keys: Sequence[str]) -> int:
        """Remove pages, leased ones too. Raises as ``batch_put``."""
        with self._state.inside():
            return self._remove([self._tag + key for key in dict.fromkeys(keys)])

    def _remove(self, names: list[str]) -> int:
        """Politely first: without ``force`` the master waits for nobody, but spares what is being copied."""
        if not names:
            return 0
        codes = list(self._client.batch_remove(names))
        _require_master(codes)
        leased = [i for i, code in enumerate(codes) if code == LEASED]
        if leased:
            again = self._client.batch_remove([names[i] for i in leased], True)
            _require_master(again)
            for i, code in zip(leased, again, strict=True):
                codes[i] = code
        failed = [code for code in codes if code not in (0, MISSING)]
        if failed:
            raise RuntimeError(f"Mooncake did not remove {len(failed)} pages: {failed[0]}")
        return codes.count(0)

    def set_aside(self, key: str, reason: str) -> None:
        """Removed: else the bad bytes would stay, since a put keeps them. Nothing is kept for a look."""
        log.warning("mooncake: a page failed its check (%s) and is removed", reason)
        self.delete([key])

    def clear(self) -> int:
        """Delete this namespace's pages (F68).

        Raises:
            RuntimeError: Mooncake failed.
        """
        with self._state.inside():
            gone = self._client.remove_by_regex(self._pattern, True)
        _require_master([gone])
        if gone < 0:
            raise RuntimeError(f"Mooncake could not clear the namespace: {gone}")
        return int(gone)

    def health(self) -> dict[str, Any]:
        """Facts for status.

        Raises:
            ConnectionError: the master does not answer.
        """
        with self._state.inside():
            code = self._client.health_check()  # the client's last heartbeat: no call, seconds late
        if code or not answers(self._options.master_server_address or ""):
            raise ConnectionError("the mooncake master does not answer")
        return {
            "inner": self._options.protocol,
            "master": self._options.master_server_address,
            "metadata_server": self._options.metadata_server,
            "segment_bytes": self._segment,
            "registered_bytes": self._ranges.nbytes(),
            "no_space": self._no_space,
            "clients_left_to_close": REAPER.waiting,
            "clients_kept": KEPT.count,
        }


def _require_master(codes: Sequence[int]) -> None:
    """Rule 7."""
    if codes and all(code == RPC_TIMEOUT for code in codes):
        raise TimeoutError("the mooncake master did not answer in time")
    if codes and all(code in (RPC_FAILED, RPC_TIMEOUT) for code in codes):
        raise ConnectionError("the mooncake master does not answer")


def _missing() -> list[str]:
    if importlib.util.find_spec("mooncake") is None:
        return ["package mooncake-transfer-engine (extra mooncake; without CUDA: mooncake-transfer-engine-non-cuda)"]
    return []


SPEC = BackendSpec(
    manifest=lambda options, env: MooncakeStore.manifest,
    options=MooncakeOptions,
    create=lambda options, context, env: MooncakeStore(options, context),
    missing=_missing,
    layouts=MooncakeStore.manifest.layouts,
    notes=(
        "needs a mooncake_master; Debian: libibverbs1",
        "a detach keeps the client, without its memory, for the next attach: closing it stalls the engine for 1 to 3 s",
    ),
    inner=lambda options: options.protocol or "",
)
