"""The matrix as a table: a row per fault point, a column per fault, in a cell the outcomes of attach, detach, swap."""

from collections.abc import Iterable

from tests.crash.cells import Fault, Op, Point, points, ruled_out
from tests.crash.run import Result

LEGEND = (
    "In a cell: the outcome of attach, detach, swap: `B` all ranks on the new state, `A` all on the old one, "
    "`FAIL`; `-` = ruled out."
)


def table(results: Iterable[Result]) -> str:
    """Markdown."""
    by_cell = {(r.cell.point, r.cell.fault, r.cell.op): r for r in results}
    rows = [
        "| fault point | " + " | ".join(Fault) + " |",
        "| --- |" + " --- |" * len(Fault),
    ]
    for point in points():
        entries = [_entry(by_cell, point, fault) for fault in Fault]
        if any(entry not in ("", "-") for entry in entries):
            rows.append(f"| {point.side} `{point.name}` | " + " | ".join(entries) + " |")
    return "\n".join(rows)


def _entry(by_cell: dict[tuple[Point, Fault, Op], Result], point: Point, fault: Fault) -> str:
    if ruled_out(point, fault):
        return "-"
    found = [by_cell.get((point, fault, op)) for op in Op]
    return " ".join("FAIL" if r.why else r.letter for r in found if r is not None)


def summary(results: list[Result], seconds: float) -> str:
    """One line."""
    failed = [r for r in results if r.why]
    letters = {letter: sum(r.letter == letter for r in results) for letter in "AB"}
    return (
        f"{len(results)} cells: {letters['B']} on B, {letters['A']} on A, {len(failed)} failed; "
        f"{seconds / 60:.1f} minutes"
    )
