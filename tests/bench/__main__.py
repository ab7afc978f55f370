"""``make bench``: run every bench_*.py of this folder and print medians, each beside its comparison and its target.

A bench module has ``run() -> list[dict]``. Keys of a row: ``name``, ``value`` (a median), ``unit``, and optionally
``comparison`` (a number in the same unit, measured in the same run), ``compared_with`` (what that is), ``target``: a
number or text such as ``"<= 25"``, ``">= 1.5x"`` (``x``: of value / comparison), and ``note``. A bare number means
"at most". Exit code 1 when a target is missed or a module fails, so that a slow build is seen.

    python -m tests.bench [--json] [NAME ...]      NAME: a part of a module's name
"""

import argparse
import importlib
import json
import re
import sys
import traceback
from pathlib import Path
from typing import Any

_TARGET = re.compile(r"^\s*(<=|>=|<|>|≤|≥)?\s*([0-9.]+)\s*(x|×)?")
_HOLDS = {
    "<=": lambda value, bound: value <= bound,
    "<": lambda value, bound: value < bound,
    ">=": lambda value, bound: value >= bound,
    ">": lambda value, bound: value > bound,
}


def ratio_of(row: dict[str, Any]) -> float | None:
    """value / comparison, where both are numbers; or what a bench of alternating rounds says (``paired_ratio``)."""
    if isinstance(row.get("paired_ratio"), float):
        return float(row["paired_ratio"])
    comparison = row.get("comparison")
    if not isinstance(comparison, int | float) or isinstance(comparison, bool) or not comparison:
        return None
    return float(row["value"]) / float(comparison)


def target_met(row: dict[str, Any]) -> bool | None:
    """Whether the row's target holds; None when it has none.

    Raises:
        ValueError: a target that cannot be read, or one of a ratio without a comparison.
    """
    target = row.get("target")
    if target is None:
        return None
    match = _TARGET.match(str(target))
    if match is None:
        raise ValueError(f"{row['name']}: target {target!r} cannot be read")
    sign = {"≤": "<=", "≥": ">=", None: "<="}.get(match[1], match[1])
    measured: float | None = float(row["value"])
    if match[3]:
        measured = ratio_of(row)
        if measured is None:
            raise ValueError(f"{row['name']}: target {target!r} needs a comparison")
    return bool(_HOLDS[str(sign)](measured, float(match[2])))


def shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 10_000 else f"{value:.0f}"
    return "-" if value is None else str(value)


def table(rows: list[dict[str, Any]]) -> str:
    """Aligned text."""
    header = ("name", "median", "unit", "comparison", "ratio", "target", "met")
    cells = [header]
    for row in rows:
        met = target_met(row)
        comparison = shown(row.get("comparison"))
        if row.get("compared_with"):
            comparison += f" ({row['compared_with']})"
        verdict = "-" if met is None else "yes" if met else "NO"
        cells.append((row["name"], shown(row["value"]), row["unit"], comparison, shown(ratio_of(row)),
                      shown(row.get("target")), verdict))  # fmt: skip
    widths = [max(len(line[column]) for line in cells) for column in range(len(header))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in cells)


def main(argv: list[str] | None = None) -> int:
    """Run the chosen modules."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description="medians, each with its comparison")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("names", nargs="*", metavar="NAME", help="a part of a module's name")
    options = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    for path in sorted(Path(__file__).parent.glob("bench_*.py")):
        if options.names and not any(name in path.stem for name in options.names):
            continue
        print(f"... {path.stem}", file=sys.stderr, flush=True)
        try:
            module = importlib.import_module(f"tests.bench.{path.stem}")
            if getattr(module, "ONLY_WHEN_NAMED", False) and not options.names:
                continue  # needs an environment of its own
            found = module.run()
            for row in found:
                row["module"], row["ratio"], row["met"] = path.stem, ratio_of(row), target_met(row)
            rows += found
        except Exception as error:  # one broken bench must not hide the others
            traceback.print_exc()
            failed[path.stem] = f"{type(error).__name__}: {error}"
    if options.json:
        print(json.dumps({"rows": rows, "failed": failed}, indent=2))
    else:
        print(table(rows))
        for row in rows:
            if row.get("note"):
                print(f"{row['name']}: {row['note']}")
        for name, why in failed.items():
            print(f"{name} FAILED: {why}")
    return 1 if failed or any(row["met"] is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
