"""What serving pays for a swap: the scheduler's stall with a full L2, and requests beside a store that opens slowly.

The stall is the ranks' own figure. One-token requests go on, one after the other, while a store whose ``open`` takes 3
s is attached in ``hot`` mode: the slowest of them, and the longest gap that the engine's own loop measured
(``meta_info.loop_gap_ms``), each beside the same without an attach. A loop that stood still for the set-up would show
3000 ms.
"""

import json
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from tests.rigs.procs import Engine, Processes

from hicache_sidecar.client import Client

ROOT = Path(__file__).resolve().parents[2]
SWAPS = 40
L2_TOKENS = 16384
OPEN_S = 3.0
SLOW_ROUNDS = 3
STALL_MS, GAP_RATIO = 3, 3.0


def fill(engine: Engine) -> None:
    """Fill L2 and turn it over once."""
    for index in range(2 * L2_TOKENS // 1500):
        engine.generate(f"{index:04d} " + "fill the host pool " * 79, tokens=1)


def stalls(client: Client, root: Path, mode: str) -> list[float]:
    """Stall of each swap between two stores, ms."""
    configs = [json.dumps({"file_storage_path": str(root / name)}) for name in ("a", "b")]
    found = []
    for index in range(SWAPS):
        answer = client.swap("file", configs[index % 2], mode=mode, wait_timeout_s=30.0)
        found.append(max(rank.stall_us or 0 for rank in answer.ranks) / 1000)
    return found


def slow_store(root: Path, number: int) -> str:
    """A store that takes ``OPEN_S`` to open."""
    options = {"store": f"slow-{number}", "faults": {"open": {"delay_s": OPEN_S}}}
    return json.dumps(
        {"backend_name": "bk", "module_path": "tests.rigs.backends", "class_name": "BK", "options": options}
    )


Seen = tuple[float, float]  # ms: the slowest request, the loop's longest gap


def slowest(engine: Engine, until: threading.Event | None, seconds: float) -> Seen:
    """One-token requests, one after the other, for ``seconds`` and until ``until``."""
    engine.generate("how long is a gap?", tokens=1)  # what was before belongs to this one
    latency_ms = gap_ms = 0.0
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or (until is not None and not until.is_set()):
        begun = time.perf_counter()
        answer = engine.generate("how long is a gap?", tokens=1)
        latency_ms = max(latency_ms, (time.perf_counter() - begun) * 1000)
        gap_ms = max(gap_ms, answer["meta_info"]["loop_gap_ms"])
    return latency_ms, gap_ms


def beside_a_slow_attach(engine: Engine, client: Client, root: Path, number: int) -> Seen:
    """The same while a slow store is attached."""
    done = threading.Event()
    failed: list[Exception] = []

    def attach() -> None:
        try:
            client.swap("dynamic", slow_store(root, number), mode="hot", timeout_s=60.0)
        except Exception as error:
            failed.append(error)
        finally:
            done.set()

    thread = threading.Thread(target=attach)
    thread.start()
    found = slowest(engine, done, 0.0)
    thread.join()
    if failed:
        raise failed[0]
    return found


def run() -> list[dict[str, Any]]:
    """All rows; about a minute."""
    with tempfile.TemporaryDirectory(prefix="hicache-bench-") as name, Processes(Path(name)) as processes:
        root = Path(name)
        sidecar = processes.sidecar()
        engine = processes.engine(
            sidecar, "--l1-tokens", "4096", "--l2-tokens", str(L2_TOKENS),
            HICACHE_DYNAMIC_BACKENDS="tests.rigs.backends:BK", PYTHONPATH=str(ROOT),
        )  # fmt: skip
        with Client.connect(sidecar.socket, client="bench") as client:
            client.attach("file", json.dumps({"file_storage_path": str(root / "b")}), wait_timeout_s=30.0)
            fill(engine)
            rows = []
            for mode in ("strict", "drain", "hot"):
                found = stalls(client, root, mode)
                rows.append({
                    "name": f"scheduler stall of a swap, {mode}, full L2", "value": round(statistics.median(found), 3),
                    "unit": "ms", "target": f"< {STALL_MS}", "note": f"worst of {SWAPS}: {max(found):.2f} ms",
                })  # fmt: skip
            with_, without = [], []
            for number in range(SLOW_ROUNDS):
                without.append(slowest(engine, None, OPEN_S))
                with_.append(beside_a_slow_attach(engine, client, root, number))
            for index, what in enumerate(("slowest one-token request", "longest gap in the engine's loop")):
                rows.append({
                    "name": f"{what} beside an attach whose open takes {OPEN_S:g} s",
                    "value": round(statistics.median(seen[index] for seen in with_), 2), "unit": "ms",
                    "target": f"<= {GAP_RATIO:g}x", "compared_with": "without an attach",
                    "comparison": round(statistics.median(seen[index] for seen in without), 2),
                })  # fmt: skip
            client.detach(mode="drain")
    return rows
