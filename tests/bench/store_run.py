"""The process that measures one store for ``bench_backends.py``: ours and the store's own client, in turn.

Ours is the whole way of the engine: controller, worker threads, page hashes, guard, and the trailer with or without
its checksum. Each round uses new keys, since several stores keep what they have. Both sides put noise (a store may
compress), wipe the pages between put and get (a store goes on working after a put), and must get the same bytes back.
"""

import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tests.bench.bench_storage import GEOMETRY, Ours
from tests.bench.store_loops import LOOPS

from hicache_hooks.backends import registry
from hicache_hooks.backends.base import Manifest
from hicache_hooks.cache.config import Running, resolve
from hicache_hooks.cache.knobs import Knobs
from hicache_hooks.cache.pages import PageFormat
from hicache_proto.model import TargetState

PAGES = 256
ROUNDS = 31  # after one that warms up; mooncake's rounds differ by a quarter
BUDGET_S = 40.0  # per mode: no further round after that
KINDS = ("put", "get")


class Unsummed(PageFormat):
    """The trailer without the checksum over the payload."""

    def _checksum(self, page: memoryview, head: bytes) -> int:
        return 0


def timed(call: Callable[[], None]) -> float:
    """GB/s of payload."""
    begin = time.perf_counter()
    call()
    return PAGES * GEOMETRY.payload_bytes / (time.perf_counter() - begin) / 1e9


def opened(name: str, config: dict[str, Any], ours: Ours) -> tuple[Any, Manifest]:
    """The backend as the attach path makes it, with what it is good for."""
    target = TargetState(backend=name, extra_config=json.dumps(config))
    resolved = resolve(target, Running(None, Knobs()), namespace=ours.context().namespace).config
    if resolved is None:
        raise RuntimeError("no config")
    spec = registry.usable(name)
    backend = spec.create(resolved.options, ours.context(), os.environ)
    backend.open()
    manifest = spec.manifest(resolved.options, os.environ)
    if manifest.needs_registration:
        backend.register(ours.host.memory())
    return backend, manifest


def measure(name: str, config: dict[str, Any], page_format: type[PageFormat], root: Path) -> dict[str, float]:
    """Medians in GB/s: ``put``, ``get``, ``their put``, ``their get``; and ``put ratio``, ``get ratio``.

    A ratio is the median of the rounds' own: what disturbs this machine for a round disturbs both sides of it.
    """
    rates: dict[str, list[float]] = {name: [] for kind in KINDS for name in (kind, f"their {kind}", f"{kind} ratio")}
    ours = Ours(PAGES, page_format)
    place = root / page_format.__name__
    place.mkdir()
    backend, manifest = opened(name, config, ours)
    ours.use_backend(backend, name, manifest)
    loop = LOOPS[name](config, ours.host.memory(), place)
    pages = [ours.host.page_view(i) for i in range(PAGES)]
    end = time.monotonic() + BUDGET_S
    for turn in range(ROUNDS + 1):
        found: dict[str, float] = {}

        def us(turn: int = turn, found: dict[str, float] = found) -> None:
            ours.fill(turn * 1_000_000)
            found["put"] = timed(ours.put)
            ours.empty()
            found["get"] = timed(ours.get)
            ours.verify()
            ours.empty()
            ours.clear()

        def them(turn: int = turn, found: dict[str, float] = found) -> None:
            keys = [f"{page_format.__name__}-{turn}-{i}" for i in range(PAGES)]
            ours.host._buffers.random_()
            expected = [bytes(page[:64]) for page in pages]
            found["their put"] = timed(lambda: loop.put(keys, pages))
            ours.host._buffers.fill_(0x55)
            found["their get"] = timed(lambda: loop.get(keys, pages))
            if [bytes(page[:64]) for page in pages] != expected:
                raise RuntimeError("the loop got other bytes back")
            loop.forget(keys)

        for step in (us, them) if turn % 2 else (them, us):
            step()
        found |= {f"{kind} ratio": found[kind] / found[f"their {kind}"] for kind in KINDS}
        for name in rates:
            if turn:
                rates[name].append(found[name])
        if turn and time.monotonic() > end:
            break
    ours.close()
    return {kind: statistics.median(values) for kind, values in rates.items()}


def main() -> None:
    """``JSON``: backend, config, root. Prints one JSON line; ends without the vendors' exit code."""
    asked = json.loads(sys.argv[1])
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vendors print is no result
    torch.set_num_threads(1)  # as in a rank of the engine
    root = Path(asked["root"])
    found = {
        mode: measure(asked["backend"], asked["config"], page_format, root)
        for mode, page_format in (("checksum", PageFormat), ("no checksum", Unsummed))
    }
    print(json.dumps(found), file=out, flush=True)
    shutil.rmtree(root, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    main()
