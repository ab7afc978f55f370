"""The coordinator's own share of an attach: journal, table, events, answers; ranks that answer at once (2 and 256)."""

import os
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import trio
from tests.bench.instant_ranks import InstantLink

from hicache_proto import api
from hicache_sidecar.core.actor import Actor, Role
from hicache_sidecar.engine.context import Context
from hicache_sidecar.engine.coordinator import Coordinator
from hicache_sidecar.engine.events import EventHub
from hicache_sidecar.engine.fanout import FanOut
from hicache_sidecar.engine.registry import Registry
from hicache_sidecar.engine.settings import EngineSettings
from hicache_sidecar.store.journal import Journal

ROUNDS = {2: 100, 256: 12}
TARGET_MS = 10
ACTOR = Actor(name="bench", role=Role.ADMIN, uid=0)


async def _attaches(ranks: int, rounds: int, folder: Path) -> tuple[list[float], list[float]]:
    """Wall and processor milliseconds of each attach."""
    wall, cpu = [], []
    journal = Journal.open(folder)
    try:
        async with trio.open_nursery() as nursery:
            link = InstantLink(ranks)
            registry = Registry(link=link, settings=EngineSettings(), counters=link.counters)
            context = Context(
                registry=registry, fanout=FanOut(link), book=journal, settings=EngineSettings(),
                counters=link.counters, hub=EventHub(), nursery=nursery,
            )  # fmt: skip
            coordinator = Coordinator(context)
            nursery.start_soon(coordinator.restart.run)
            link.hello()
            while not coordinator.ready()[0]:  # noqa: ASYNC110  # the end of a recovery is no event
                await trio.sleep(0.01)
            for _ in range(rounds):
                begun, burnt = time.perf_counter(), time.process_time()
                request = api.AttachRequest(hicache_storage_backend="file")
                await coordinator.handle(request, ACTOR, lambda _progress: None)
                wall.append((time.perf_counter() - begun) * 1000)
                cpu.append((time.process_time() - burnt) * 1000)
                await coordinator.handle(api.DetachRequest(), ACTOR, lambda _progress: None)
            nursery.cancel_scope.cancel()
    finally:
        journal.close()
    return wall, cpu


def sync_ms(folder: Path) -> float:
    """Median of a plain write and fdatasync in the same place."""
    times = []
    with (folder / "plain").open("wb") as file:
        file.write(bytes(1 << 16))
        for index in range(100):
            begun = time.perf_counter()
            os.pwrite(file.fileno(), bytes(512), index * 512)
            os.fdatasync(file.fileno())
            times.append((time.perf_counter() - begun) * 1000)
    return statistics.median(times)


def run() -> list[dict[str, Any]]:
    """One row per number of ranks."""
    rows = []
    for ranks, rounds in ROUNDS.items():
        with tempfile.TemporaryDirectory(prefix="hicache-bench-") as name:
            plain = sync_ms(Path(name))
            wall, cpu = trio.run(partial(_attaches, ranks, rounds, Path(name) / "state"))
        row: dict[str, Any] = {
            "name": f"coordinator's own share of an attach, {ranks} ranks",
            "value": round(statistics.median(wall), 2),
            "unit": "ms",
            "comparison": round(plain, 3),
            "compared_with": "one fdatasync",
            "note": f"processor {statistics.median(cpu):.2f} ms; two fdatasync in it, one inside the freeze",
        }
        if ranks == 2:
            row["target"] = f"<= {TARGET_MS}"
        rows.append(row)
    return rows
