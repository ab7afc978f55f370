"""``file`` backup and prefetch through the real controller, threads and checksums, beside a page-by-page store.

The comparison does what SGLang's file store does for each page: clone, ``tofile`` to a temporary name, replace; and
``readinto`` a scratch tensor, copy. Both run in turn in the same directory on the same pages; medians of the rounds.
Ours includes the existence query, the page hashes, the checksums and the scheduler's part.
"""

import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hicache_hooks.backends.base import StoreContext
from hicache_hooks.backends.file import FileOptions, FileStore
from hicache_hooks.cache.controller import CacheController
from hicache_hooks.cache.hashing import fingerprint
from hicache_hooks.cache.knobs import Knobs
from hicache_hooks.cache.layouts import KvGeometry
from hicache_hooks.cache.pages import PageFormat
from hicache_hooks.cache.pools import DevicePool, HostPool
from hicache_hooks.cache.storage_set import SetLimits, StorageSet
from hicache_hooks.guard import Guard

PAGES = 512
PAGE_TOKENS = 16
ROUNDS = 9
BUDGET_S = 25.0  # no further round after that
WAIT_S = 60.0
GEOMETRY = KvGeometry(layers=8, kv_heads=8, head_dim=128, page_size=PAGE_TOKENS)  # 1 MiB a page


class PageByPage:
    """The comparison."""

    def __init__(self, root: Path, pool: HostPool) -> None:
        root.mkdir()
        self._root = root
        self._pages = [pool.stored(i).reshape(-1).view(torch.uint8) for i in range(PAGES)]
        self._scratch = torch.empty_like(self._pages[0])

    def put(self) -> None:
        for i, page in enumerate(self._pages):
            temporary = self._root / f"{i}.tmp"
            page.clone().numpy().tofile(temporary)
            os.replace(temporary, self._root / f"{i}.bin")

    def get(self) -> None:
        for i, page in enumerate(self._pages):
            with open(self._root / f"{i}.bin", "rb", buffering=0) as file:
                if file.readinto(memoryview(self._scratch.numpy())) != self._scratch.numel():  # type: ignore[arg-type]
                    raise OSError("short read")
            page.copy_(self._scratch)


class Ours:
    """A cache controller over the ``file`` backend."""

    def __init__(self, root: Path) -> None:
        self._came = threading.Event()
        device = DevicePool(GEOMETRY, 1)
        self.host = HostPool(GEOMETRY, PAGES)
        namespace = fingerprint("bench", GEOMETRY)
        options = FileOptions(file_storage_path=str(root)).effective({})
        context = StoreContext(namespace=namespace, page_bytes=self.host.page_bytes, layout=GEOMETRY.layout)
        self._store = FileStore(options, context)
        self._store.open()
        self._set = StorageSet(
            store=Guard(self._store, name="file"),
            device=device,
            host=self.host,
            pages=PageFormat(GEOMETRY.payload_bytes, namespace),
            knobs=Knobs(prefetch_policy="wait_complete"),
            name="file",
            limits=SetLimits(prefetch_fraction=1.0, backup_fraction=1.0),
        )
        self._set.start_parked()
        self._ctl = CacheController(device, self.host, self._set, namespace=namespace, wake=self._came.set)
        self._tokens = list(range(PAGES * PAGE_TOKENS + 1))
        self._round = 0

    def fill(self) -> None:
        """A prompt on the host whose pages hold noise."""
        state = self._ctl._s
        number = state.host_ledger.begin("bench")
        pages = state.host_ledger.take(number, PAGES)
        if pages is None:
            raise RuntimeError("the pool is not empty")
        state.host_ledger.to_tree(number, pages)
        node = state.tree.grow(state.tree.root, tuple(self._tokens[:-1]))
        node.host = pages
        self._node = node
        for i in pages:
            self.host.page(i).normal_()
        self.expected = [self.host.page(i)[0, 0, 0].clone() for i in pages]

    def put(self) -> None:
        if not self._ctl._writer.back_up(self._node):
            raise RuntimeError("the backup did not start")
        self._until_idle()
        if self._node.stored_in != self._set.id:
            raise RuntimeError(f"not all was stored: {self._ctl.stats()}")

    def empty(self) -> None:
        """Forget L2; what the pages hold is overwritten."""
        if not self._ctl.flush():
            raise RuntimeError("not idle")
        self.host._buffers.fill_(0x55)

    def get(self) -> None:
        self._round += 1
        rid = f"r{self._round}"
        self._ctl.begin(rid, self._tokens)
        while not self._ctl.ready(rid):
            self._wait()
        self._ctl.abort(rid)
        found = self._ctl.match_prefix(self._tokens)
        if found.pages != PAGES:
            raise RuntimeError(f"{found.pages} of {PAGES} pages came back")

    def verify(self) -> None:
        for page, expected in zip(self._ctl.match_prefix(self._tokens).host, self.expected, strict=True):
            if not torch.equal(self.host.page(page)[0, 0, 0], expected):
                raise RuntimeError("other bytes came back")

    def _wait(self) -> None:
        if not self._came.wait(WAIT_S):
            raise TimeoutError("no completion")
        self._came.clear()
        self._ctl.pump()

    def _until_idle(self) -> None:
        while any(self._ctl.counters().values()):
            self._wait()

    def clear(self) -> None:
        self._ctl.flush()
        self._store.clear()

    def close(self) -> None:
        if self._set.stop(WAIT_S) or not self._set.close():
            raise RuntimeError("a thread is stuck")


def _timed(call: Callable[[], None]) -> float:
    begin = time.perf_counter()
    call()
    return PAGES * GEOMETRY.payload_bytes / (time.perf_counter() - begin) / 1e9


def _list(rates: list[float]) -> str:
    return " ".join(f"{rate:.2f}" for rate in rates)


def _round(ours: Ours, root: Path, turn: int) -> dict[str, float]:
    """Every rate once; who goes first changes by the turn."""
    ours.fill()
    theirs = PageByPage(root / "theirs", ours.host)
    rates: dict[str, float] = {}

    def our_get() -> None:
        ours.empty()
        rates["get"] = _timed(ours.get)
        ours.verify()

    def their_get() -> None:
        rates["their get"] = _timed(theirs.get)

    for name, put in _turned([("put", ours.put), ("their put", theirs.put)], turn):
        rates[name] = _timed(put)
    for _, get in _turned([("get", our_get), ("their get", their_get)], turn):
        get()
    ours.clear()
    shutil.rmtree(root / "theirs")
    return rates


def _turned(pair: list[tuple[str, Callable[[], None]]], turn: int) -> list[tuple[str, Callable[[], None]]]:
    return pair if turn % 2 else pair[::-1]


def run() -> list[dict[str, Any]]:
    """Four numbers in GB/s, of which two are the comparison."""
    rates: dict[str, list[float]] = {name: [] for name in ("put", "get", "their put", "their get")}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a rank of the engine
    root = Path(tempfile.mkdtemp(prefix="hicache-bench-"))
    try:
        ours = Ours(root / "ours")
        try:
            end = time.monotonic() + BUDGET_S
            _round(ours, root, turn=0)  # warm-up: a virtual machine's memory is slow at its first use
            while len(rates["put"]) < ROUNDS and (time.monotonic() < end or len(rates["put"]) < 2):
                for name, rate in _round(ours, root, turn=len(rates["put"])).items():
                    rates[name].append(rate)
        finally:
            ours.close()
    finally:
        torch.set_num_threads(threads)
        shutil.rmtree(root, ignore_errors=True)
    median = {name: statistics.median(values) for name, values in rates.items()}
    what = f"{PAGES} pages of 1 MiB, {len(rates['put'])} rounds after a warm-up, in {root.parent}"
    return [
        {
            "name": f"file {kind}",
            "value": round(median[kind], 2),
            "unit": "GB/s",
            "comparison": round(median[f"their {kind}"], 2),
            "compared_with": "page by page",
            "target": target,
            "note": f"{what}; all: {[round(x, 2) for x in rates[kind]]}"
            f" beside {[round(x, 2) for x in rates[f'their {kind}']]}",
        }
        for kind, target in (("put", ">= 1.5x"), ("get", ">= 1.1x"))
    ]
