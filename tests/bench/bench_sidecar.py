"""The sidecar as an operator feels it: attach latency, status latency, resident memory, idle processor time.

Real sidecar, real dp=2 engine with a filled L2. Figures are medians; scheduler stalls are the ranks' own.
"""

import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.rigs.procs import Processes, Sidecar

from hicache_sidecar.client import Client

ROUNDS = 30
IDLE_S = 60.0
STATUS_CALLS = 500


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _rss_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise OSError(f"no VmRSS of process {pid}")


def _row(name: str, value: float, unit: str, target: str, met: bool, comparison: str = "") -> dict[str, Any]:
    return {
        "name": name,
        "value": round(value, 3),
        "unit": unit,
        "target": target,
        "met": met,
        "comparison": comparison,
    }


def _attach_rows(client: Client, root: Path) -> list[dict[str, Any]]:
    attach_ms: list[float] = []
    detach_ms: list[float] = []
    stalls: dict[str, list[int]] = {"attach": [], "detach": []}
    config = json.dumps({"file_storage_path": str(root / "store")})
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        attached = client.attach("file", config)
        attach_ms.append((time.perf_counter() - begin) * 1e3)
        begin = time.perf_counter()
        detached = client.detach()
        detach_ms.append((time.perf_counter() - begin) * 1e3)
        for kind, answer in (("attach", attached), ("detach", detached)):
            stalls[kind].append(max(rank.stall_us or 0 for rank in answer.ranks))
    attach, detach = statistics.median(attach_ms), statistics.median(detach_ms)
    rows = [
        _row("attach file, 2 ranks, request to answer", attach, "ms", "< 25", attach < 25, f"detach {detach:.1f} ms"),
    ]
    for kind, values in stalls.items():
        stall = statistics.median(values) / 1e3
        rows.append(
            _row(
                f"scheduler stall of {kind}, full L2",
                stall,
                "ms",
                "< 2",
                stall < 2,
                f"worst {max(values) / 1e3:.2f} ms",
            )
        )
    return rows


def _status_row(client: Client) -> dict[str, Any]:
    times = []
    for _ in range(STATUS_CALLS):
        begin = time.perf_counter()
        client.status()
        times.append((time.perf_counter() - begin) * 1e3)
    median = statistics.median(times)
    return _row("status on an open connection", median, "ms", "< 1", median < 1)


def _idle_rows(sidecar: Sidecar) -> list[dict[str, Any]]:
    pid = sidecar.process.pid
    before = _cpu_s(pid)
    time.sleep(IDLE_S)  # the figure is about this span; nothing is waited for
    share = (_cpu_s(pid) - before) / IDLE_S * 100
    rss = _rss_mib(pid)
    return [
        _row(f"processor time over {IDLE_S:g} s idle, 2 ranks", share, "% of a core", "< 0.5", share < 0.5),
        _row("resident memory", rss, "MiB", "< 60", rss < 60),
    ]


def run() -> list[dict[str, Any]]:
    """All rows; about 90 s."""
    with tempfile.TemporaryDirectory() as name, Processes(Path(name)) as processes:
        sidecar = processes.sidecar()
        engine = processes.engine(sidecar, "--dp", "2", "--l1-tokens", "2048", "--l2-tokens", "8192")
        for index in range(2 * 8192 // 1500 + 2):  # both replicas' L2 full
            engine.generate(f"{index:04d} " + "fill the host pool " * 79, tokens=1, dp_rank=index % 2)
        with Client.connect(sidecar.socket, client="bench") as client:
            rows = [*_attach_rows(client, Path(name)), _status_row(client)]
        return rows + _idle_rows(sidecar)
