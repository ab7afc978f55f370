"""``file`` backup and prefetch through the real controller, threads and checksums, beside a page-by-page store.

The comparison does what SGLang's file store does for each page: clone, ``tofile`` to a temporary name, replace; and
``readinto`` a scratch tensor, copy. Both run in turn in the same place on the same pages; medians of the rounds.
Ours includes the existence query, the page hashes, the checksums and the scheduler's part.

The targets are measured on a memory file system, where there is one with room: they are about the code. On a disk
file system the same is shown without a target, in directories that are deleted at the end only: ext4 looks at every
inode deleted in the last minutes for each new file, and after some thousand deletions (a test run before this one)
nothing else is measured. Seen: 0.2 GB/s with two processors at work in the kernel's ``recently_deleted``.
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

from hicache_hooks.backends.base import Backend, Manifest, StoreContext
from hicache_hooks.backends.file import FileOptions, FileStore
from hicache_hooks.cache.controller import CacheController
from hicache_hooks.cache.hashing import fingerprint
from hicache_hooks.cache.knobs import Knobs
from hicache_hooks.cache.layouts import KvGeometry
from hicache_hooks.cache.pages import PageFormat
from hicache_hooks.cache.pools import DevicePool, HostPool
from hicache_hooks.cache.storage_set import SetLimits, StorageSet
from hicache_hooks.guard import Guard

Step = Callable[[], None]

PAGES = 512
PAGE_TOKENS = 16
ROUNDS = 9
BUDGET_S = 15.0  # per place: no further round after that
MEMORY = "/dev/shm"
NEEDED_BYTES = 4 << 30
WAIT_S = 60.0
GEOMETRY = KvGeometry(layers=8, kv_heads=8, head_dim=128, page_size=PAGE_TOKENS)  # 1 MiB a page


class PageByPage:
    """The comparison. ``pages`` gives the pool's pages in the order of the prompt: ours moves them about."""

    def __init__(self, pool: HostPool, pages: Callable[[], list[int]]) -> None:
        self._root = Path()
        self._pool = [pool.stored(i).reshape(-1).view(torch.uint8) for i in range(PAGES)]
        self._pages = pages
        self._scratch = torch.empty_like(self._pool[0])

    def use(self, root: Path) -> None:
        """Store below ``root`` from now on."""
        self._root = root
        root.mkdir()

    def put(self) -> None:
        for i, page in enumerate(self._pages()):
            temporary = self._root / f"{i}.tmp"
            self._pool[page].clone().numpy().tofile(temporary)
            os.replace(temporary, self._root / f"{i}.bin")

    def get(self) -> None:
        for i, page in enumerate(self._pages()):
            with open(self._root / f"{i}.bin", "rb", buffering=0) as file:
                if file.readinto(memoryview(self._scratch.numpy())) != self._scratch.numel():  # type: ignore[arg-type]
                    raise OSError("short read")
            self._pool[page].copy_(self._scratch)


class Ours:
    """A cache controller over the ``file`` backend, or over another one (``use_backend``)."""

    def __init__(self, count: int = PAGES, page_format: type[PageFormat] = PageFormat) -> None:
        self._came = threading.Event()
        self._count = count
        self._format = page_format
        self._device = DevicePool(GEOMETRY, 1)
        self.host = HostPool(GEOMETRY, count)
        self._namespace = fingerprint("bench", GEOMETRY)
        self._ctl = CacheController(
            self._device, self.host, self._set(None), namespace=self._namespace, wake=self._came.set
        )
        self._tokens = list(range(count * PAGE_TOKENS + 1))
        self._round = 0

    def _set(self, guard: Guard | None) -> StorageSet:
        made = StorageSet(
            store=guard,
            device=self._device,
            host=self.host,
            pages=self._format(GEOMETRY.payload_bytes, self._namespace),
            knobs=Knobs(prefetch_policy="wait_complete"),
            name="file" if guard else "detached",
            limits=SetLimits(prefetch_fraction=1.0, backup_fraction=1.0),
        )
        made.start_parked()
        return made

    def use(self, root: Path) -> None:
        """Swap to a store below ``root``."""
        store = FileStore(FileOptions(file_storage_path=str(root)).effective({}), self.context())
        store.open()
        self.use_backend(store, "file")

    def use_backend(self, store: Backend, name: str, manifest: Manifest | None = None) -> None:
        """Swap to an open store that has what it needs registered. ``manifest``: with its options."""
        self._close(self._ctl.install(self._set(Guard(store, name=name, manifest=manifest))))

    def context(self) -> StoreContext:
        """What a backend for this pool is told."""
        return StoreContext(namespace=self._namespace, page_bytes=self.host.page_bytes, layout=GEOMETRY.layout)

    def fill(self, prompt: int = 0) -> None:
        """A prompt on the host whose pages hold noise; another ``prompt`` has other keys."""
        self._tokens = list(range(prompt, prompt + self._count * PAGE_TOKENS + 1))
        state = self._ctl._s
        number = state.host_ledger.begin("bench")
        pages = state.host_ledger.take(number, self._count)
        if pages is None:
            raise RuntimeError("the pool is not empty")
        state.host_ledger.to_tree(number, pages)
        node = state.tree.grow(state.tree.root, tuple(self._tokens[:-1]))
        node.host = pages
        self.host._buffers.random_()
        self._expected = [bytes(self.host.page_view(i)[:64]) for i in pages]

    def put(self) -> None:
        node = self._ctl.match_prefix(self._tokens).node
        if not self._ctl._writer.back_up(node):
            raise RuntimeError("the backup did not start")
        self._until_idle()
        if node.stored_in != self._ctl.storage.id:
            raise RuntimeError(f"not all was stored: {self._ctl.stats()}")

    def empty(self) -> None:
        """Forget L2; what the pages hold is overwritten."""
        if not self._ctl.flush():
            raise RuntimeError("not idle")
        self.host._buffers.fill_(0x55)

    def clear(self) -> None:
        """Empty the store through its guard, which would else find that the store lost all it held (F70)."""
        guard = self._ctl.storage.guard
        if guard is None:
            raise RuntimeError("no store")
        guard.clear()

    def get(self) -> None:
        self._round += 1
        rid = f"r{self._round}"
        self._ctl.begin(rid, self._tokens)
        while not self._ctl.ready(rid):
            self._wait()
        self._ctl.abort(rid)
        found = self._ctl.match_prefix(self._tokens)
        if found.pages != self._count:
            raise RuntimeError(f"{found.pages} of {self._count} pages came back")

    def pages(self) -> list[int]:
        """Host pages in the order of the prompt."""
        return self._ctl.match_prefix(self._tokens).host

    def verify(self) -> None:
        if [bytes(self.host.page_view(i)[:64]) for i in self.pages()] != self._expected:
            raise RuntimeError("other bytes came back")

    def _wait(self) -> None:
        if not self._came.wait(WAIT_S):
            raise TimeoutError("no completion")
        self._came.clear()
        self._ctl.pump()

    def _until_idle(self) -> None:
        while any(self._ctl.counters().values()):
            self._wait()

    def close(self) -> None:
        self._close(self._ctl.storage)

    def _close(self, made: StorageSet) -> None:
        if made.stop(WAIT_S) or not made.close():
            raise RuntimeError("a thread is stuck")


def _timed(call: Step) -> float:
    begin = time.perf_counter()
    call()
    return PAGES * GEOMETRY.payload_bytes / (time.perf_counter() - begin) / 1e9


def _list(rates: list[float]) -> str:
    return " ".join(f"{rate:.2f}" for rate in rates)


def _round(ours: Ours, theirs: PageByPage, turn: int) -> dict[str, float]:
    """Every rate once; who goes first changes by the turn."""
    rates: dict[str, float] = {}

    def our_get() -> None:
        ours.empty()
        rates["get"] = _timed(ours.get)
        ours.verify()

    def their_get() -> None:
        rates["their get"] = _timed(theirs.get)

    def our_put() -> None:
        rates["put"] = _timed(ours.put)

    def their_put() -> None:
        rates["their put"] = _timed(theirs.put)

    for step in (*_turned(our_put, their_put, turn), *_turned(our_get, their_get, turn)):
        step()
    return rates


def _turned(a: Step, b: Step, turn: int) -> tuple[Step, Step]:
    return (a, b) if turn % 2 else (b, a)


def _measure(base: str, rounds: int, budget_s: float, *, keep: bool) -> dict[str, list[float]]:
    """Rates of at most ``rounds`` rounds in new directories, which live on until the end when ``keep``."""
    rates: dict[str, list[float]] = {name: [] for name in ("put", "get", "their put", "their get")}
    root = Path(tempfile.mkdtemp(prefix="hicache-bench-", dir=base))
    ours = Ours()
    try:
        ours.fill()
        theirs = PageByPage(ours.host, ours.pages)
        end = time.monotonic() + budget_s
        for turn in range(rounds + 1):
            place = root / str(turn)
            place.mkdir()
            ours.use(place / "ours")
            theirs.use(place / "theirs")
            if turn and not keep:
                shutil.rmtree(root / str(turn - 1))  # at once before the writes, which get this memory again
            elif keep:
                os.sync()  # else the kernel throttles who comes later
            found = _round(ours, theirs, turn)
            for name in rates:
                if turn:  # the first round warms up: a virtual machine's memory is slow at its first use
                    rates[name].append(found[name])
            if turn > 1 and time.monotonic() > end:
                break
    finally:
        ours.close()
        shutil.rmtree(root, ignore_errors=True)
    return rates


def _rows(place: str, rates: dict[str, list[float]], targets: dict[str, str | None]) -> list[dict[str, Any]]:
    return [
        {
            "name": f"file {kind} ({place})",
            "value": round(statistics.median(rates[kind]), 2),
            "unit": "GB/s",
            "comparison": round(statistics.median(rates[f"their {kind}"]), 2),
            "compared_with": "page by page",
            "target": target,
            "note": f"{PAGES} pages of 1 MiB; rounds: {_list(rates[kind])} beside {_list(rates[f'their {kind}'])}",
        }
        for kind, target in targets.items()
    ]


def run() -> list[dict[str, Any]]:
    """Rates in GB/s in memory (with the targets) and on disk."""
    targets: dict[str, str | None] = {"put": ">= 1.5x", "get": ">= 1.1x"}
    disk = tempfile.gettempdir()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a rank of the engine
    try:
        if not os.path.isdir(MEMORY) or shutil.disk_usage(MEMORY).free < NEEDED_BYTES:
            return _rows(disk, _measure(disk, 3, BUDGET_S, keep=True), targets)
        rows = _rows(MEMORY, _measure(MEMORY, ROUNDS, BUDGET_S, keep=False), targets)
        return rows + _rows(disk, _measure(disk, 3, BUDGET_S, keep=True), dict.fromkeys(targets))
    finally:
        torch.set_num_threads(threads)
