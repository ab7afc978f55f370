"""F19 with the real engine: a config under which its process dies is quarantined, shown, and not tried again."""

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.engine.conftest import POOLS, SMALL
from tests.rigs.procs import Engine, Processes, Sidecar

from hicache_proto.errors import HicacheError, Quarantined
from hicache_sidecar.client import Client

ROOT = Path(__file__).resolve().parents[3]
WAIT_S = 60.0


@dataclass
class Rig:
    sidecar: Sidecar
    engine: Engine
    client: Client
    root: Path

    def config(self, **options: Any) -> str:
        inner = {"attempts": str(self.root / "attempts"), **options}
        return json.dumps(
            {"backend_name": "killer", "module_path": "tests.rigs.killer", "class_name": "Killer", "options": inner}
        )

    @property
    def attempts(self) -> int:
        path = self.root / "attempts"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def until_restarted(self, epoch: int) -> None:
        """The engine replaced its dead process, and the sidecar has seen the new one and settled."""

        def back() -> bool:
            status = self.client.status(fresh=True)
            ranks = [rank for rank in status.ranks if rank.epoch >= epoch]
            return len(ranks) == 1 and status.state != "engine_down"

        self.sidecar.process.wait_until(f"epoch {epoch}", back, WAIT_S)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with Processes(tmp_path) as processes:
        sidecar = processes.sidecar()
        engine = processes.engine(
            sidecar, *SMALL, *POOLS, HICACHE_DYNAMIC_BACKENDS="tests.rigs.killer:Killer", PYTHONPATH=str(ROOT)
        )
        with Client.connect(sidecar.socket) as client:
            yield Rig(sidecar, engine, client, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("step", ["open", "batch_put"])
def test_a_config_that_kills_the_engine_is_quarantined(rig: Rig, step: str) -> None:
    """F19: the operation fails with the loss of the rank as its cause, and the same config is refused afterwards."""
    config = rig.config(die_at=step)
    with pytest.raises(HicacheError) as failed:
        rig.client.attach("dynamic", config)
    assert failed.value.code == "prepare_failed"
    assert failed.value.details["reason"] in ("rank_lost", "engine_restarted")
    assert "rank 0 lost" in failed.value.message
    rig.until_restarted(2)
    assert rig.engine.generate("still serving", 4)["output_ids"]
    assert rig.client.status().hicache_storage_backend is None
    with pytest.raises(Quarantined) as refused:
        rig.client.attach("dynamic", config)
    assert refused.value.details["reason"] == "config_quarantined"
    assert "died while this config was being attached" in refused.value.message
    assert rig.attempts == 1
    # Another config of the same class is another config.
    assert rig.client.attach("dynamic", rig.config(die_at="never")).state == "attached"


@pytest.mark.slow
def test_a_desired_config_that_kills_a_restarted_engine_is_tried_once(rig: Rig) -> None:
    """F19: it served before; after a restart of the engine it kills: one attempt, then shown, serving without L3."""
    trigger = rig.root / "now"
    config = rig.config(die_at="open", die_if=str(trigger))
    assert rig.client.attach("dynamic", config).state == "attached"
    trigger.touch()
    pid = rig.client.status().ranks[0].pid
    os.kill(pid, signal.SIGKILL)
    rig.until_restarted(3)  # its first successor died in the attempt to bring it back
    rig.sidecar.process.wait_until("quarantine", lambda: rig.client.status().state == "quarantined", WAIT_S)
    assert rig.engine.generate("still serving", 4)["output_ids"]
    status = rig.client.status(fresh=True)
    assert status.hicache_storage_backend is None
    assert any("quarantined" in warning for warning in status.warnings), status.warnings
    assert [row.result for row in rig.client.history().revisions if row.kind == "converge"] == ["rolled_back"]
    assert rig.attempts == 2
    # An operator ends it: with force once the cause is mended, and then it is the desired state as before.
    trigger.unlink()
    with pytest.raises(Quarantined):
        rig.client.attach("dynamic", config)
    assert rig.client.attach("dynamic", config, force=True).state == "attached"
    assert rig.client.status(fresh=True).state == "attached"
