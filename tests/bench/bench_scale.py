"""Attach latency by the number of ranks: real sidecar, real ZMQ, one process that hosts all the light ranks.

The ranks are the real agent, gate and transaction over nothing but numbers, so what is measured is the fan-out:
messages, registry, journal, and the ranks' own part of the protocol. All ranks share one interpreter and its lock,
so that process stays on one core and is the slower side: the note says how much of the processor each side took.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.rigs.procs import Processes, http_ok

from hicache_sidecar.client import Client

ROUNDS = {2: 40, 16: 20, 64: 12, 256: 8}
TARGET_MS = 1500  # at 256 ranks, on two cores
GROWTH = 1.25  # of four times the ranks: at most 4 x the latency, and a quarter for noise
READY_S = 60.0


def cpu_ms(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * 1000 / os.sysconf("SC_CLK_TCK")


def measure(ranks: int, rounds: int) -> tuple[float, str]:
    """Median attach in ms at so many ranks, and a note about processor time."""
    with tempfile.TemporaryDirectory(prefix="hicache-scale-") as folder, Processes(Path(folder)) as processes:
        sidecar = processes.sidecar()
        command = [sys.executable, "-m", "tests.rigs.light_rank", "--endpoint", sidecar.endpoint]
        command += ["--ranks", str(ranks), "--dp-size", str(ranks), "--one-core"]
        host = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        try:
            sidecar.process.wait_until("all ranks", lambda: http_ok(f"{sidecar.url}/readyz"), READY_S)
            with Client.connect(sidecar.socket, client="bench") as client:
                client.attach("light")
                client.detach()
                before = cpu_ms(sidecar.process.pid), cpu_ms(host.pid)
                times = []
                for _ in range(rounds):
                    begun = time.perf_counter()
                    answer = client.attach("light")
                    times.append((time.perf_counter() - begun) * 1000)
                    if len(answer.ranks) != ranks:
                        raise RuntimeError(f"{len(answer.ranks)} ranks answered, expected {ranks}")
                    client.detach()
                after = cpu_ms(sidecar.process.pid), cpu_ms(host.pid)
        finally:
            host.kill()
            host.wait()
    per = [(late - early) / rounds / 2 for early, late in zip(before, after, strict=True)]
    return statistics.median(times), f"processor per operation: sidecar {per[0]:.0f} ms, all ranks {per[1]:.0f} ms"


def run() -> list[dict[str, Any]]:
    """One row per number of ranks; about a minute."""
    rows: list[dict[str, Any]] = []
    medians: dict[int, float] = {}
    for ranks, rounds in ROUNDS.items():
        medians[ranks], note = measure(ranks, rounds)
        row: dict[str, Any] = {
            "name": f"attach, {ranks} light ranks", "value": round(medians[ranks], 1), "unit": "ms", "note": note,
        }  # fmt: skip
        fewer = ranks // 4
        if fewer in medians:
            row |= {
                "comparison": round(medians[fewer], 1),
                "compared_with": f"{fewer} ranks",
                "target": f"<= {4 * GROWTH:g}x",
            }
        rows.append(row)
    rows.append({"name": "attach, 256 light ranks, two cores", "value": round(medians[256], 1), "unit": "ms",
                 "target": f"<= {TARGET_MS}"})  # fmt: skip
    return rows
