"""One embedded engine on one stand's store, beside an engine of the same weights that never had a store."""

import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.rigs.procs import POLL_S, Engine, Processes
from tests.rigs.stores.base import Stand

from hicache_hooks.guard_settings import GuardSettings
from hicache_proto.model import GuardReport
from hicache_sidecar.client.typed import Client

# A small model; L2 holds three prompts of some hundred bytes, so that storage is read all the time.
FLAGS = (
    "--layers", "2", "--hidden", "64", "--head-dim", "16", "--seed", "7", "--context", "1024", "--l1-tokens", "1024",
    "--l2-tokens", "1536",
)  # fmt: skip
# Shorter than the defaults, so that a test need not wait for them; the probes go on once a second or two.
GUARD = GuardSettings(deadline_s=2.0, window_s=5.0, min_calls=4, hold_s=0.5, hold_max_s=2.0)
TIMED = ("deadline_s", "window_s", "min_calls", "hold_s", "hold_max_s")


def until(what: str, true: Callable[[], object], timeout_s: float) -> None:
    """Poll with a deadline."""
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, f"no {what} within {timeout_s} s"
        time.sleep(POLL_S)  # pace of a poll


@dataclass
class Serving:
    """See the module's text. ``plain`` is None where nothing is compared."""

    stand: Stand
    engine: Engine
    client: Client
    plain: Engine | None = None
    socket: str = ""  # the sidecar's, for a second client

    def attach(self, **knobs: Any) -> None:
        """Attach the stand's store. Requests wait for what it has, so that a hit depends on no race; a short threshold,
        so that small prompts are fetched."""
        config = json.dumps({**self.stand.config(), "prefetch_threshold": 32, **knobs})
        answer = self.client.attach(
            self.stand.backend_name, config, mode="drain", wait_timeout_s=20.0,
            hicache_storage_prefetch_policy="wait_complete",
        )  # fmt: skip
        assert answer.success, answer

    def detach(self) -> None:
        """Once the backups have ended."""
        assert self.client.detach(mode="drain", wait_timeout_s=20.0).success

    def guard(self) -> GuardReport:
        """What the one rank's guard says now."""
        (rank,) = self.client.status(fresh=True).ranks
        assert rank.guard is not None
        return rank.guard

    def first_tokens(self, texts: list[str]) -> tuple[float, float]:
        """Seconds to the first token, here and on the engine without a store: medians of pairs, asked in turn."""
        assert self.plain is not None
        both: dict[str, list[float]] = {"stored": [], "plain": []}
        for i, text in enumerate(texts):
            order = (("stored", self.engine), ("plain", self.plain))
            for name, engine in order if i % 2 else reversed(order):
                began = time.perf_counter()
                engine.generate(text, 1)
                both[name].append(time.perf_counter() - began)
        return statistics.median(both["stored"]), statistics.median(both["plain"])


def guard_knobs() -> dict[str, Any]:
    """``GUARD`` as an operator writes it."""
    return {f"guard_{name}": getattr(GUARD, name) for name in TIMED}


@contextmanager
def serving(stand: Stand, root: Path, *, plain: bool = False) -> Iterator[Serving]:
    """Sidecar and engine beside the running ``stand``."""
    with ExitStack() as stack:
        processes = stack.enter_context(Processes(root))
        sidecar = processes.sidecar()
        engine = processes.engine(sidecar, *FLAGS, **stand.env())
        other = processes.engine(None, *FLAGS) if plain else None
        client = stack.enter_context(Client.connect(sidecar.socket))
        yield Serving(stand, engine, client, other, sidecar.socket)
