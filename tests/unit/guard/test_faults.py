"""Every fault of ``Faulty`` alone, on a real engine: outputs right, ledger balanced, threads alive."""

from collections.abc import Iterator

import pytest
from tests.rigs.faulty import FAULTS, Faulty
from tests.rigs.faulty_engine import ALLOWED, ENV, FaultyEngine, faulty_target

from hicache_hooks.embedded.options import ModelShape

SEEDS = (1, 2)
TOKENS = 100


@pytest.fixture(scope="module")
def rig() -> Iterator[FaultyEngine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ENV, ALLOWED)
        made = FaultyEngine(model=ModelShape(layers=1, hidden=32, heads=2, kv_heads=1, head_dim=16, seed=7))
        made.learn(SEEDS, TOKENS)
        yield made
        made.close()


@pytest.mark.parametrize("fault", FAULTS)
def test_outputs_are_right_whatever_the_store_does(rig: FaultyEngine, fault: str) -> None:
    """F38, F41, F80, F81: written with faults, read with faults, and once more when the faults are over."""
    content = rig.attach(faulty_target(fault, {fault: 0.6}, seed=1, hang_s=0.5))
    for _ in range(2):
        rig.check(SEEDS, TOKENS)
        rig.rest()
        assert rig.engine.flush().ok
    assert content.fired[fault] > 0
    assert content.closed_under_a_call == 0
    assert all(report.alive for report in rig.adapter.threads())
    content.quiet = True
    rig.check(SEEDS, TOKENS)
    rig.rest()
    rig.detach()
    assert Faulty.of(fault).inside == 0
    assert rig.engine.flush().ok


def test_a_store_that_is_well_again_delivers(rig: FaultyEngine) -> None:
    """The breaker closes by its own probes; hits return without an operator."""
    content = rig.attach(faulty_target("back", {"hang": 1.0}, hang_s=0.6))
    rig.check(SEEDS, TOKENS)
    report = rig.adapter.guard()
    assert report is not None
    assert report.breaker != "closed"
    assert report.reason == "hung"
    content.quiet = True
    rig.rest()
    rig.engine.until("closed breaker", lambda: (rig.adapter.guard() or report).breaker == "closed")
    assert rig.engine.flush().ok
    rig.check(SEEDS, TOKENS)  # written
    rig.rest()
    assert rig.engine.flush().ok
    rig.check(SEEDS, TOKENS)
    assert rig.adapter.usage()["get"].hit >= 2 * (TOKENS // 16)
    rig.rest()
    rig.detach()
    assert rig.engine.flush().ok
