"""Plays many points at once, each on its own stand: the cells mostly wait."""

import queue
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.crash import check
from tests.crash.cells import Cell, Point, Script, cells
from tests.crash.play import play
from tests.crash.stand import Stand
from tests.rigs.procs import Processes


@dataclass(frozen=True)
class Result:
    """How one cell ended: letter "A" or "B", or why it failed."""

    cell: Cell
    letter: str = ""
    why: str = ""
    took_s: float = 0.0


def run(
    points: Iterable[Point],
    wanted: Callable[[Cell], bool],
    *,
    jobs: int,
    told: Callable[[Result], None],
    keep: Path | None = None,
) -> list[Result]:
    """Play every wanted cell of ``points``; ``told`` hears each result as it comes. ``keep``: logs of failed stands."""
    todo: queue.Queue[list[Cell]] = queue.Queue()
    # The longest first, so that the end is not one worker's: each cell of lease_end waits for a lease.
    for point in sorted(points, key=lambda p: (p.script is not Script.LEASE, -len(cells(p)))):
        if batch := [cell for cell in cells(point) if wanted(cell)]:
            todo.put(batch)
    results: list[Result] = []
    lock = threading.Lock()
    stop = threading.Event()

    def tell(result: Result) -> None:
        with lock:
            results.append(result)
            told(result)

    def work() -> None:
        while not stop.is_set():
            try:
                batch = todo.get_nowait()
            except queue.Empty:
                return
            while batch and not stop.is_set():
                batch = _on_one_stand(batch, tell, keep, stop)

    workers = [threading.Thread(target=work) for _ in range(jobs)]
    for worker in workers:
        worker.start()
    try:
        for worker in workers:
            worker.join()
    except BaseException:  # Ctrl-C: every stand ends its cell and its processes
        stop.set()
        raise
    return results


def _on_one_stand(
    batch: list[Cell], tell: Callable[[Result], None], keep: Path | None, stop: threading.Event
) -> list[Cell]:
    """Play until one fails; the cells that are left want a fresh stand."""
    root = Path(tempfile.mkdtemp(prefix="crash-"))
    left = list(batch)
    stand = None
    try:
        with Processes(root) as processes:
            try:
                stand = Stand.make(root, [batch[0].point], processes)
                while left and not stop.is_set():
                    cell = left.pop(0)
                    started = time.monotonic()
                    letter, why = "", ""
                    try:
                        letter = play(stand, cell)
                        why = check.threads_at_rest(stand) if not left else ""
                    except Exception as error:
                        why = f"{type(error).__name__}: {error}"
                    tell(Result(cell, letter, why, time.monotonic() - started))
                    if why:
                        if keep is not None:
                            where = keep / cell.label.replace(" ", "_")
                            shutil.copytree(root, where, ignore=_no_sockets, dirs_exist_ok=True)
                        break
            finally:
                if stand is not None:
                    stand.close()
    except Exception as error:
        if stand is None:  # it never stood
            tell(Result(left.pop(0), "", f"no stand: {error}"))
        else:
            tell(Result(batch[-1], "", f"the stand did not end: {error}"))
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return left


def _no_sockets(folder: str, names: list[str]) -> set[str]:
    return {name for name in names if not (Path(folder) / name).is_file() and not (Path(folder) / name).is_dir()}
