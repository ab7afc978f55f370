"""Time to the first token while the store's server is dead, beside an engine that never had a store (issue 5: 1.25).

For every store with a server of its own, the real server, killed. Both engines have the same weights and are asked new
prompts in turn, so that the machine's other work meets both; medians of the pairs. The breaker is open by then: what
is measured is what it leaves to pay.
"""

import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.e2e.engine.test_equality import prompts
from tests.rigs.stores.catalogue import CATALOGUE
from tests.rigs.stores.serving import Serving, guard_knobs, serving, until

PAIRS = 60
OPEN_S = 60.0


def dead(run: Serving, pairs: int) -> tuple[float, float]:
    """Kill the server, wait for the breaker, measure."""
    run.attach(**guard_knobs())
    run.stand.kill()
    asked = iter(range(10_000))

    def opened() -> bool:
        run.engine.generate(f"open {next(asked)} {prompts(12)[4]}", 4)
        return run.guard().breaker != "closed"

    until("an open breaker", opened, OPEN_S)
    run.first_tokens([f"warm {i} {prompts(12)[4]}" for i in range(5)])
    return run.first_tokens([f"{i} {prompts(12)[4]}" for i in range(pairs)])


def run() -> list[dict[str, Any]]:
    """Milliseconds."""
    rows: list[dict[str, Any]] = []
    for line in CATALOGUE:
        try:
            if not line.stand_class().has_server:
                continue
            missing = line.stand_class().missing()
        except ImportError as exc:
            missing = f"{exc.name} is not installed"
        if missing:
            print(f"    {line.name} left out: {missing}", file=sys.stderr)
            continue
        with tempfile.TemporaryDirectory(prefix="hicache-bench-") as root, ExitStack() as stack:
            stand = stack.enter_context(line.make(Path(root) / "store"))
            ours, theirs = dead(stack.enter_context(serving(stand, Path(root), plain=True)), PAIRS)
        rows.append({
            "name": f"first token, {line.name} killed",
            "value": round(ours * 1e3, 2),
            "unit": "ms",
            "comparison": round(theirs * 1e3, 2),
            "compared_with": "no store",
            "target": "<= 1.25x",
            "note": f"medians of {PAIRS} pairs asked in turn",
        })  # fmt: skip
    return rows
