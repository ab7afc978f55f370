"""A few quick cells of the matrix, and that its checks see what they are there for."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.crash import check
from tests.crash.cells import Cell, Fault, Op, Point
from tests.crash.play import CellFailed, play
from tests.crash.stand import Stand
from tests.rigs.procs import Processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

POINTS = [Point("sidecar", "outcome_b.before_fsync"), Point("rank", "commit.after_apply")]


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    root = tmp_path_factory.mktemp("crash")
    with Processes(root) as processes:
        made = Stand.make(root, POINTS, processes)
        yield made
        made.close()


@pytest.mark.parametrize(
    ("point", "fault", "op", "letter"),
    [
        (POINTS[0], Fault.SIDECAR_KILL, Op.ATTACH, "B"),  # in the file, not synced: a killed process loses nothing
        (POINTS[1], Fault.RANK_KILL, Op.SWAP, "A"),
        (POINTS[1], Fault.RANK_ERROR, Op.DETACH, "A"),
        (POINTS[1], Fault.SIDECAR_KILL, Op.DETACH, "B"),  # all had switched while their leases lived
    ],
    ids=str,
)
def test_a_cell(stand: Stand, point: Point, fault: Fault, op: Op, letter: str) -> None:
    assert play(stand, Cell(point, fault, op)) == letter


def test_the_checks_see_a_leak_and_a_rank_that_differs(stand: Stand) -> None:
    """A matrix that cannot fail proves nothing."""
    why, document = check.settle(stand)
    assert not why
    attached = document["state"] == "attached"
    config = document["desired"]["hicache_storage_backend_extra_config"] if attached else None
    other = json.dumps({"never": "attached"})
    assert check.problems(stand, document, {"B": config, "A": other}) == ("B", [])
    assert check.problems(stand, document, {"A": other})[1]  # neither A nor B
    left = stand.root / "scratch" / f"{stand.ranks[0].process.pid}-left.part"
    left.touch()
    (stand.root / "state" / "journal.tmp").touch()
    stand.ranks[1].sent += 1
    found = " ".join(check.problems(stand, document, {"B": config})[1])
    assert "temporary files" in found
    assert "journal.tmp" in found
    assert "rank 1 admitted" in found
    left.unlink()
    (stand.root / "state" / "journal.tmp").unlink()
    stand.ranks[1].sent -= 1


def test_a_damaged_journal_is_seen(stand: Stand, tmp_path: Path) -> None:
    copy = stand.journal_copy(tmp_path / "state") / "journal"
    data = bytearray(copy.read_bytes())
    data[len(data) // 3] ^= 0xFF
    stand.journal_copy = lambda into: _damaged(into, bytes(data))  # type: ignore[method-assign]
    try:
        assert check.journal_says(stand, {})[1]
    finally:
        del stand.journal_copy


def _damaged(into: Path, data: bytes) -> Path:
    into.mkdir(mode=0o700)
    (into / "journal").write_bytes(data)
    os.chmod(into / "journal", 0o600)
    return into


def test_a_point_that_is_not_met_is_a_failure(stand: Stand) -> None:
    """The ranks were not started with it, so it cannot fire."""
    with pytest.raises(CellFailed, match="never met"):
        play(stand, Cell(Point("rank", "commit.recv"), Fault.RANK_ERROR, Op.ATTACH))
    assert not check.settle(stand)[0]
