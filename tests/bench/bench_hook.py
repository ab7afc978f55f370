"""What the hook costs: an idle scheduler pass, a report, the scheduler's share of an operation, the link.

The idle figure is the difference between a loop with the hook's attribute test and the same loop without it, taken in
turns so that both see the same machine. The adapter is the light one: what is measured is the hook, not a cache.
"""

import statistics
import tempfile
import time
from typing import Any

from tests.hooks.driver import FILE
from tests.hooks.router import Router
from tests.rigs.light_rank import LightRank

from hicache_proto.hooklink import AskReport, Commit, Finalize, Freeze, Prepare
from hicache_proto.model import TargetState

PASSES = 200_000
ROUNDS = 7
CALLS = 300
OPERATIONS = 40


def _bare(hook: Any) -> float:
    started = time.perf_counter_ns()
    for _ in range(PASSES):
        pass
    return (time.perf_counter_ns() - started) / PASSES


def _hooked(hook: Any) -> float:
    started = time.perf_counter_ns()
    for _ in range(PASSES):
        if hook.pending:
            hook.run_pending()
    return (time.perf_counter_ns() - started) / PASSES


def _median_us(samples: list[float]) -> float:
    return round(statistics.median(samples) * 1e6, 1)


def run() -> list[dict[str, Any]]:
    """Rows for ``make bench``."""
    with tempfile.TemporaryDirectory() as folder:
        endpoint = f"ipc://{folder}/hooks.sock"
        with Router(endpoint) as sidecar:
            rank = LightRank(endpoint)
            try:
                sidecar.welcome()
                return _measure(sidecar, rank)
            finally:
                rank.close()


def _measure(sidecar: Router, rank: LightRank) -> list[dict[str, Any]]:
    pairs = [(_bare(rank.hook), _hooked(rank.hook)) for _ in range(ROUNDS)]
    idle_ns = statistics.median(hooked - bare for bare, hooked in pairs)
    reports, asks = [], []
    for _ in range(CALLS):
        started = time.perf_counter()
        rank.hook.report()
        reports.append(time.perf_counter() - started)
        started = time.perf_counter()
        sidecar.ask(AskReport())
        asks.append(time.perf_counter() - started)
    commits, finalizes, whole = [], [], []
    for n in range(1, OPERATIONS + 1):
        started = time.perf_counter()
        answers = [
            sidecar.ask(body, n)
            for body in (
                Prepare(target=FILE if n % 2 else TargetState(), prepared_s=30),
                Freeze(round=1, freeze_s=5),
                Commit(in_doubt_s=10),
                Finalize(),
            )
        ]
        whole.append(time.perf_counter() - started)
        commits.append(float(answers[2].stall_us or 0))
        finalizes.append(float(answers[3].stall_us or 0))
    return [
        {
            "name": "hook: idle scheduler pass",
            "value": round(idle_ns, 1),
            "unit": "ns",
            "target": "<= 200",
            "comparison": round(statistics.median(bare for bare, _ in pairs), 1),
            "compared_with": "the empty loop, already taken off the value",
        },
        {"name": "hook: one report", "value": _median_us(reports), "unit": "us"},
        {"name": "hook: question and answer over the link", "value": _median_us(asks), "unit": "us"},
        {"name": "hook: scheduler's stall in COMMIT", "value": statistics.median(commits), "unit": "us"},
        {"name": "hook: scheduler's stall in FINALIZE", "value": statistics.median(finalizes), "unit": "us"},
        {"name": "hook: four phases over the link, one rank", "value": _median_us(whole), "unit": "us"},
    ]
