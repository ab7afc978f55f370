"""The matrix itself: complete by construction, nothing left out in silence, and its checks can fail."""

import re
from pathlib import Path

import pytest
from tests.crash.cells import Act, Cell, Fault, Op, Point, Script, cells, plan, points, ruled_out
from tests.crash.run import Result
from tests.crash.table import summary, table

from hicache_hooks import faults as hook_faults
from hicache_sidecar.core import faults as sidecar_faults

README = Path(__file__).resolve().parents[2] / "README.md"


def test_every_point_of_both_programs_is_in_the_matrix() -> None:
    names = {(point.side, point.name) for point in points()}
    assert names == {("sidecar", n) for n in sidecar_faults.POINTS} | {("rank", n) for n in hook_faults.POINTS}
    for point in points():
        assert len(cells(point)) == sum(3 for fault in Fault if not ruled_out(point, fault))
        assert len(cells(point)) >= 15


@pytest.mark.parametrize("point", points(), ids=lambda point: point.label)
def test_every_cell_can_be_armed(point: Point) -> None:
    """The program can do what the plan asks of the point; what it cannot do to itself is done while it is held."""
    parse = sidecar_faults.Faults if point.side == "sidecar" else hook_faults.Faults
    for fault in Fault:
        if not ruled_out(point, fault):
            action, act = plan(point, fault)
            assert parse(f"{point.name}={action}@/arm")
            assert (act is Act.NONE) != action.startswith("hold")


def test_the_readme_lists_the_points() -> None:
    """One list for both programs, in step with the code."""
    section = README.read_text().split("## Fault points", 1)[1].split("\n## ", 1)[0]
    listed = set()
    for program, phases, boundaries in re.findall(r"^\| (sidecar|rank) \| (.+?) \| (.+?) \|", section, re.MULTILINE):
        for phase in re.findall(r"`(\w+)`", phases):
            listed |= {(program, f"{phase}.{boundary}") for boundary in re.findall(r"`(\w+)`", boundaries)}
    assert listed == {(point.side, point.name) for point in points()}


def test_scripts_lead_to_the_points_that_a_plain_operation_does_not_meet() -> None:
    scripts = {point.name: point.script for point in points()}
    assert scripts["thaw.recv"] is Script.WAIT
    assert scripts["undo.before_apply"] is scripts["outcome_a.before_fsync"] is Script.UNDO
    assert scripts["lease_end.before_apply"] is Script.LEASE
    assert scripts["commit.recv"] is Script.PLAIN


def test_table_and_summary() -> None:
    point = Point("sidecar", "commit.recv")
    results = [
        Result(Cell(point, Fault.SIDECAR_KILL, Op.ATTACH), "B"),
        Result(Cell(point, Fault.SIDECAR_KILL, Op.DETACH), "A"),
        Result(Cell(point, Fault.SIDECAR_KILL, Op.SWAP), "", "leaks"),
    ]
    assert "| sidecar `commit.recv` | B A FAIL |  |  | - |  |  |" in table(results)
    assert summary(results, 60) == "3 cells: 1 on B, 1 on A, 1 failed; 1.0 minutes"
