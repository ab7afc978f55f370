"""A sample of the matrix on the embedded engine: real caches, a model, generation equal before and after."""

from collections.abc import Iterator

import pytest
from tests.crash import engine_check
from tests.crash.cells import Cell, Fault, Op, Point, plan
from tests.crash.engine_stand import EngineStand
from tests.crash.play import play
from tests.rigs.procs import Processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SAMPLE = [
    ("sidecar", "begin.after_fsync", Fault.SIDECAR_KILL, Op.ATTACH, "A"),
    ("sidecar", "prepare.recv", Fault.SIDECAR_KILL, Op.SWAP, "A"),
    ("sidecar", "commit.after_send", Fault.SIDECAR_KILL, Op.ATTACH, "AB"),
    ("sidecar", "outcome_b.before_fsync", Fault.SIDECAR_KILL, Op.SWAP, "B"),
    ("sidecar", "outcome_b.after_fsync", Fault.SIDECAR_KILL, Op.DETACH, "B"),
    ("sidecar", "finalize.after_send", Fault.SIDECAR_KILL, Op.ATTACH, "B"),
    ("sidecar", "freeze.recv", Fault.SIDECAR_STOP, Op.SWAP, "A"),
    ("sidecar", "outcome_b.after_fsync", Fault.SIDECAR_STOP, Op.DETACH, "B"),
    ("sidecar", "commit.before_send", Fault.RANK_KILL, Op.ATTACH, "A"),
    ("rank", "build.before_apply", Fault.RANK_KILL, Op.ATTACH, "A"),
    ("rank", "commit.after_apply", Fault.RANK_KILL, Op.SWAP, "A"),
    ("rank", "finalize.recv", Fault.RANK_KILL, Op.DETACH, "B"),
    ("rank", "build.before_apply", Fault.RANK_ERROR, Op.ATTACH, "A"),
    ("rank", "commit.before_apply", Fault.RANK_ERROR, Op.SWAP, "A"),
    ("rank", "commit.before_apply", Fault.RANK_HANG, Op.ATTACH, "A"),
    ("rank", "commit.before_send", Fault.LINK_CUT, Op.SWAP, "AB"),
    ("rank", "finalize.recv", Fault.LINK_CUT, Op.DETACH, "B"),
]
CELLS = [(Cell(Point(side, name), fault, op), letters) for side, name, fault, op, letters in SAMPLE]


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineStand]:
    """One engine for all cells: what a cell leaves behind meets the next one."""
    root = tmp_path_factory.mktemp("engine")
    with Processes(root) as processes:
        made = EngineStand.make_engine(root, list({cell.point: None for cell, _ in CELLS}), processes)
        engine_check.remember(made)
        yield made
        made.close()


@pytest.mark.parametrize(("cell", "letters"), CELLS, ids=[cell.label for cell, _ in CELLS])
def test_a_cell(stand: EngineStand, cell: Cell, letters: str) -> None:
    """Where the message or the answer may have been lost with its sender, both ends are right: all on the same."""
    stand.know_victim()
    assert play(stand, cell, engine_check) in letters


def test_the_sample_covers_the_matrix() -> None:
    assert len(CELLS) >= 12
    assert {cell.fault for cell, _ in CELLS} == set(Fault)
    assert {cell.op for cell, _ in CELLS} == set(Op)
    assert {plan(cell.point, cell.fault)[1] for cell, _ in CELLS}
