"""Attach, detach and swap on the real SGLang beside the engine's own PUT and DELETE, same server, alternating rounds.

Stall: the longest pass of the leader's scheduler loop while the operation ran, less its sleep (rig_probe); the same
instrument for both, and for passes in which nothing changes.
Latency: request to answer. Only when named (``python -m tests.bench sglang``): it starts SGLang.
"""

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.rigs.procs import Processes
from tests.rigs.sglang.stores import rig_probe
from tests.rigs.sglang_server import Stack, install_hooks

ONLY_WHEN_NAMED = True
ROUNDS = 31
SLOW_ROUNDS = 31
LOOK_BACK = 4000  # passes: more than an operation of 3 s has
AFTER_S = 0.05  # a pass ends, and is written, after the answer has left

Sample = tuple[float, float, float]  # latency, stall, processor time of the scheduler thread in it; seconds


class Bench:
    """One topology."""

    def __init__(self, root: Path, topology: str, processes: Processes) -> None:
        hooks = install_hooks(root / "hooks") if not (root / "hooks").exists() else root / "hooks"
        rig_probe.install(hooks)
        self.passes = processes.root / "passes"
        self.passes.touch()
        self.stack = Stack(processes, topology, hooks, RIG_PROBE=str(self.passes))
        self.stack.clean()
        self.got: dict[str, list[Sample]] = {}
        self.said: dict[str, list[float]] = {}  # what the answer reports as stall, ms

    def measure(self, name: str, call: Callable[[], tuple[int, Any]]) -> None:
        """One operation; waits until its last pass is written down."""
        began = time.monotonic()
        code, answer = call()
        took = time.monotonic() - began
        if code != 200:
            raise RuntimeError(f"{name}: {code} {answer}")
        time.sleep(AFTER_S)  # nothing says when the scheduler's pass after the answer ends
        passes = [(busy, used) for end, busy, used in self._read()
                  if began <= end - busy and end <= began + took + AFTER_S]  # fmt: skip
        self.got.setdefault(name, []).append((took, *max(passes, default=(0.0, 0.0))))
        ranks = answer.get("ranks", []) if isinstance(answer, dict) else []
        said = [rank["stall_us"] for rank in ranks if rank.get("stall_us")]
        self.said.setdefault(name, []).append(max(said, default=0) / 1000)

    def _read(self) -> list[Sample]:
        """End, busy time, processor time of each pass."""
        rows = []
        for line in self.passes.read_text().splitlines()[-LOOK_BACK:]:
            end, busy, used = map(float, line.split())
            rows.append((end, busy, used))
        return rows

    def ours(self, name: str, body: dict[str, Any]) -> None:
        """Attach and detach by the sidecar."""
        self.measure(f"ours attach {name}", lambda: self.stack.put({**body, "wait_timeout_s": 5}))
        self.measure(f"ours detach {name}", lambda: self.stack.admin("DELETE", "/hicache/storage-backend"))

    def theirs(self, name: str, body: dict[str, Any]) -> None:
        """Attach and detach by the engine itself."""
        self.measure(f"stock attach {name}", lambda: self.stack.server.storage("PUT", body))
        self.measure(f"stock detach {name}", lambda: self.stack.server.storage("DELETE"))

    def nothing(self) -> None:
        """Close and open admission: woken passes in which nothing changes, the floor of the instrument."""
        self.measure("floor", lambda: self.stack.admin("POST", "/hicache/drain", {"timeout_s": 30, "hold_s": 60}))
        code, answer = self.stack.admin("POST", "/hicache/resume", {})
        if code != 200:
            raise RuntimeError(f"resume: {code} {answer}")

    def median(self, name: str, column: int) -> float:
        return statistics.median(sample[column] for sample in self.got[name]) * 1000

    def row(self, topology: str, name: str, column: int, target: str | None) -> dict[str, Any]:
        """Ours beside theirs, in ms."""
        what = ("latency", "stall")[column]
        ours, stock = (self.median(f"{whose} {name}", column) for whose in ("ours", "stock"))
        return {
            "name": f"SGLang {topology}, {name}: {what}", "value": ours, "unit": "ms", "comparison": stock,
            "compared_with": "the engine's own", "target": target,
        }  # fmt: skip


def run() -> list[dict[str, Any]]:
    """tp=1 and tp=2."""
    rows: list[dict[str, Any]] = []
    root = Path(tempfile.mkdtemp(prefix="bench-sglang-"))
    try:
        for topology in ("tp1", "tp2"):
            place = root / topology
            place.mkdir()
            with Processes(place) as processes:
                bench = Bench(root, topology, processes)
                rows += _rounds(bench, topology)
                bench.stack.server.process.kill()
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return rows


def _rounds(bench: Bench, topology: str) -> list[dict[str, Any]]:
    stack = bench.stack
    plain, slow = stack.body("plain"), stack.dynamic("SlowStart", "slow")
    bench.ours("warm", plain)
    bench.theirs("warm", plain)
    for number in range(ROUNDS):
        for turn in (bench.ours, bench.theirs) if number % 2 else (bench.theirs, bench.ours):
            turn("file", plain)
    for _ in range(SLOW_ROUNDS):
        bench.ours("3 s constructor", slow)
        bench.theirs("3 s constructor", slow)
    rows = [bench.row(topology, f"{verb} file", column, "<= 1.2x" if column else None)
            for verb in ("attach", "detach") for column in (1, 0)]  # fmt: skip
    rows.append(bench.row(topology, "attach 3 s constructor", 1, "<= 0.01x"))
    stack.attach("one")
    for number in range(ROUNDS):
        body = stack.body(("two", "one")[number % 2], swap=True)
        bench.measure("swap", lambda body=body: stack.put(body))  # type: ignore[misc]
        bench.nothing()
    rows.append({
        "name": f"SGLang {topology}, swap file to file: stall", "value": bench.median("swap", 1), "unit": "ms",
        "comparison": bench.median("floor", 1), "compared_with": "closing and opening admission alone",
        "target": "<= 2" if topology == "tp1" else None,
        "note": f"the step itself, as the answer reports it: {statistics.median(bench.said['swap']):.2f} ms; processor"
        f" time of the scheduler thread in the pass: {bench.median('swap', 2):.2f} ms, of which the engine's own idle"
        f" work is about 1; closing admission alone: {bench.median('floor', 2):.2f} ms; the rest is waiting",
    })  # fmt: skip
    rows.append({
        "name": f"SGLang {topology}, swap file to file: latency", "value": bench.median("swap", 0), "unit": "ms",
    })  # fmt: skip
    stack.detach()
    return rows
