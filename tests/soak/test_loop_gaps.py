"""PREPARE off the scheduler thread: a store that takes 3 s to open costs the engine's loop nothing like that."""

from pathlib import Path

import pytest
from tests.bench.bench_swap import OPEN_S, ROOT, beside_a_slow_attach, slowest
from tests.rigs.procs import Processes

from hicache_sidecar.client import Client

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_a_store_that_opens_slowly_leaves_the_loop_alone(tmp_path: Path) -> None:
    """By the loop's own measure, with and without an attach. A set-up on its thread would be one gap of 3000 ms; a
    third of that is left for a machine that is busy with other things."""
    with Processes(tmp_path) as processes:
        sidecar = processes.sidecar()
        engine = processes.engine(sidecar, HICACHE_DYNAMIC_BACKENDS="tests.rigs.backends:BK", PYTHONPATH=str(ROOT))
        with Client.connect(sidecar.socket, client="test") as client:
            _, quiet_ms = slowest(engine, None, 1.0)
            slow_ms, gap_ms = beside_a_slow_attach(engine, client, tmp_path, 0)
            assert client.status(fresh=True).state == "attached"
            assert client.history().revisions[-1].duration_ms >= OPEN_S * 1000
    assert 0 < quiet_ms < OPEN_S * 1000 / 3
    assert 0 < gap_ms < OPEN_S * 1000 / 3, f"{gap_ms:.0f} ms, {quiet_ms:.0f} ms without an attach"
    assert slow_ms < OPEN_S * 1000 / 3
