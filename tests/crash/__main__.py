"""``make crash-matrix``: play the matrix, print the table, write it as markdown; exit 1 when a cell failed."""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.crash.cells import Cell, Fault, Op, points
from tests.crash.run import Result, run
from tests.crash.table import LEGEND, summary, table

JOBS = 8  # most of a cell's time is a stop, a lease or a pause: two cores carry so many stands


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 when every cell ended as it must."""
    parser = argparse.ArgumentParser(prog="python -m tests.crash", description=__doc__)
    parser.add_argument("--jobs", type=int, default=JOBS)
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "crash-matrix.md")
    parser.add_argument("--keep", type=Path, help="keep the logs of stands whose cell failed below this directory")
    parser.add_argument("--point", action="append", default=[], help="only points whose label contains this")
    parser.add_argument("--fault", action="append", default=[], help="only faults whose name contains this")
    parser.add_argument("--op", action="append", default=[], choices=list(Op))
    args = parser.parse_args(argv)

    def wanted(cell: Cell) -> bool:
        return (
            (not args.point or any(text in cell.point.label for text in args.point))
            and (not args.fault or any(text in cell.fault for text in args.fault))
            and (not args.op or cell.op in args.op)
        )

    count = 0

    def told(result: Result) -> None:
        nonlocal count
        count += 1
        print(f"{count:5} {result.took_s:5.1f} s  {result.letter or 'FAIL'}  {result.cell.label}", flush=True)
        if result.why:
            print(f"      {result.why}", flush=True)

    started = time.monotonic()
    results = run(points(), wanted, jobs=args.jobs, told=told, keep=args.keep)
    text = table(results)
    line = summary(results, time.monotonic() - started)
    print(f"\n{text}\n\n{LEGEND}\n{line}")
    args.out.write_text(f"{text}\n\n{LEGEND}\n\n{line}\n")
    failed = [result for result in results if result.why]
    for result in failed:
        print(f"FAIL {result.cell.label}: {result.why}")
    print(f"{len(Fault)} faults, {len(Op)} operations; table in {args.out}")
    return 1 if failed or not results else 0


if __name__ == "__main__":
    sys.exit(main())
