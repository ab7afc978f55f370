"""Small pools, an in-memory store and a driver that plays the scheduler for the cache tests."""

import functools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from hicache_hooks.backends.base import Got
from hicache_hooks.cache.controller import CacheController
from hicache_hooks.cache.hashing import fingerprint
from hicache_hooks.cache.knobs import Knobs
from hicache_hooks.cache.layouts import KvGeometry
from hicache_hooks.cache.pages import PageFormat
from hicache_hooks.cache.pools import DevicePool, HostPool
from hicache_hooks.cache.storage_set import SetLimits, StorageSet

PAGE = 4  # tokens
WAIT_S = 10.0  # bound of every wait in these tests


def geometry(layout: str = "page_first", **kwargs: object) -> KvGeometry:
    return replace(KvGeometry(2, 2, 4, PAGE, torch.float32, layout), **kwargs)


class MemoryStore:
    """A store in a dict. Hooks (``on_put`` and so on) run before each call, on the worker thread."""

    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}
        self.lock = threading.Lock()
        self.aside: list[tuple[str, str]] = []
        self.gets: list[str] = []
        self.exists_calls = 0
        self.put_calls = 0
        self.closed = 0
        self.bypass = False
        self.on_put: Callable[[Sequence[str]], None] = lambda keys: None
        self.on_get: Callable[[Sequence[str]], None] = lambda keys: None
        self.on_exists: Callable[[Sequence[str]], None] = lambda keys: None

    def batch_put(self, keys: Sequence[str], pages: Sequence[memoryview]) -> list[bool]:
        self.put_calls += 1
        self.on_put(keys)
        with self.lock:
            self.data.update((key, bytes(page)) for key, page in zip(keys, pages, strict=True))
        return [True] * len(keys)

    def batch_get(self, keys: Sequence[str], pages: Sequence[memoryview]) -> list[Got]:
        self.gets += keys
        self.on_get(keys)
        results = []
        for key, page in zip(keys, pages, strict=True):
            value = self.data.get(key)
            if value is not None:
                page[:] = value
            results.append(Got.MISS if value is None else Got.HIT)
        return results

    def batch_exists(self, keys: Sequence[str]) -> list[bool]:
        self.exists_calls += 1
        self.on_exists(keys)
        return [key in self.data for key in keys]

    def set_aside(self, key: str, reason: str) -> None:
        self.aside.append((key, reason))
        self.data.pop(key, None)

    def set_bypass(self, enabled: bool) -> bool:
        was, self.bypass = self.bypass, enabled
        return was

    def close(self) -> None:
        self.closed += 1


@functools.lru_cache(4096)
def _content(shape: tuple[int, ...], prefix: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(hash(prefix) & 0xFFFFFFFF))


class Rig:
    """Pools, a controller and the sets made for it. The content of a page is a function of its prefix."""

    def __init__(
        self,
        *,
        store: MemoryStore | None = None,
        layout: str = "page_first",
        device_pages: int = 32,
        host_pages: int = 64,
        limits: SetLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
        manual: bool = False,
        **knobs: object,
    ) -> None:
        """``manual``: the sets get no threads, the test takes the work off their queues itself."""
        self.manual = manual
        g = geometry(layout)
        self.device = DevicePool(g, device_pages)
        self.host = HostPool(g, host_pages)
        self.namespace = fingerprint("test", g)
        self.limits = limits or SetLimits(threads_per_direction=2, batch_pages=2)
        self.knobs = Knobs(prefetch_threshold=PAGE, prefetch_policy="wait_complete")
        self.knobs = replace(self.knobs, **knobs)
        self.sets: list[StorageSet] = []
        self.woken = threading.Condition()
        self.ctl = CacheController(
            self.device, self.host, self.make_set(store), namespace=self.namespace, clock=clock, wake=self._wake
        )
        self.serial = 0

    def _wake(self) -> None:
        with self.woken:
            self.woken.notify_all()

    def make_set(self, store: MemoryStore | None, **knobs: object) -> StorageSet:
        made = StorageSet(
            store=store,
            device=self.device,
            host=self.host,
            pages=PageFormat(self.host.geometry.payload_bytes, self.namespace),
            knobs=replace(self.knobs, **knobs),
            name="memory" if store else "detached",
            limits=self.limits,
        )
        if not self.manual:
            made.start_parked()
        self.sets.append(made)
        return made

    def until(self, done: Callable[[], object], wait_s: float = WAIT_S) -> None:
        """Pump, woken by completions, until ``done``."""
        deadline = time.monotonic() + wait_s
        inbox = self.ctl._s.inbox
        while not done():
            if self.ctl.pump():
                continue
            with self.woken:
                self.woken.wait_for(lambda: bool(inbox), 0.05)
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.ctl.counters()} {self.ctl.stats()}")

    def settle(self) -> None:
        """Until no transfer is in flight; then everything must add up."""
        names = ("ongoing_write_through", "ongoing_load_back", "ongoing_prefetch", "ongoing_backup")
        self.until(lambda: not any(self.ctl.counters()[name] for name in names))
        self.check()

    def flush(self) -> None:
        """Once nothing is alive: a worker leaves its call a moment after its result."""
        self.until(self.ctl.flush)

    def check(self) -> None:
        self.ctl.check()
        assert self.ctl.stats().get("internal_errors", 0) == 0
        tree = self.ctl.tree
        for node in tree.nodes():
            pages = tree.length(node)
            assert node.device is not None or node.host is not None
            assert all(len(x) == pages for x in (node.device, node.host, node.hashes) if x is not None)
            assert node.device is None or (node.parent is not None and node.parent.device is not None)
            assert min(node.device_lock, node.host_lock) >= 0

    def content(self, tokens: Sequence[int], page: int) -> torch.Tensor:
        """What page number ``page`` of ``tokens`` must hold."""
        return _content(self.host.geometry.canonical_shape, tuple(tokens[: (page + 1) * PAGE]))

    def start(self, tokens: Sequence[int]) -> str:
        self.serial += 1
        rid = f"r{self.serial}"
        self.ctl.begin(rid, tokens)
        return rid

    def serve(self, tokens: Sequence[int], rid: str | None = None) -> tuple[int, int, int]:
        """A whole request: checks what came from the cache, computes the rest; (device, host, storage) tokens."""
        rid = self.start(tokens) if rid is None else rid
        self.until(lambda: self.ctl.ready(rid))
        self.until(lambda: self.ctl.admit(rid) is not None)
        self.until(lambda: self.ctl.loaded(rid) is not None)
        admission = self.ctl.loaded(rid)
        assert admission is not None
        for i, page in enumerate(admission.pages):
            assert torch.equal(self.device.page(page), self.content(tokens, i)), f"page {i} of {rid}"
        have = len(admission.pages)
        need = -(-len(tokens) // PAGE) - have
        self.until(lambda: self.ctl.alloc(rid, need) is not None)
        pages = self.ctl._requests[rid].pages
        for i in range(have, len(tokens) // PAGE):
            self.device.page(pages[i]).copy_(self.content(tokens, i))
        self.ctl.finish(rid, tokens)
        self.settle()
        return admission.device_tokens, admission.host_tokens, admission.storage_tokens

    def run_queued(self, count: int = 1_000_000) -> None:
        """*manual*: run up to ``count`` queued items, oldest set first."""
        for made in self.sets:
            for workers in made._all:
                while count and len(workers._queue):
                    workers._queue._items.popleft().run()
                    count -= 1

    def close(self) -> None:
        for made in self.sets:
            assert made.stop(WAIT_S) == []
        self.ctl.pump()
        assert all(made.close() for made in self.sets)


def prompt(pages: int, start: int = 1) -> list[int]:
    """A prompt whose first ``pages`` pages can be cached."""
    return [start * 1000 + i for i in range(pages * PAGE + 1)]
