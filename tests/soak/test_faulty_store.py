"""A randomized soak: an engine that serves while its store goes wrong in every way, is swapped, bypassed and flushed.

``HICACHE_SOAK_S`` seconds (default 60; 600 for the long run), ``HICACHE_SOAK_SEED`` (default from the clock, printed).
"""

import os
import random
import threading
import time
from dataclasses import replace

import pytest
from tests.rigs.faulty import FAULTS
from tests.rigs.faulty_engine import ALLOWED, ENV, FaultyEngine, faulty_target

from hicache_hooks.embedded.options import ModelShape
from hicache_proto.model import TargetState

SOAK_S = float(os.environ.get("HICACHE_SOAK_S", "60"))
SEED = int(os.environ.get("HICACHE_SOAK_SEED", str(time.time_ns() % 1_000_000)))
TOKENS = 100
PROMPTS = range(1, 25)  # many times the small host pool: pages are evicted and reused all the time
POLICIES = ("best_effort", "wait_complete", "timeout")


def storm(rng: random.Random) -> dict[str, float]:
    """A handful of faults, each rare enough that some calls are good; sometimes none, sometimes an outage."""
    kind = rng.random()
    if kind < 0.15:
        return {}
    if kind < 0.3:
        return {rng.choice(("hang", "error", "scribble", "nospace")): 1.0}
    return {fault: rng.uniform(0.02, 0.3) for fault in rng.sample(FAULTS, rng.randint(1, 5))}


@pytest.mark.slow
@pytest.mark.timeout(SOAK_S + 300)
def test_outputs_ledgers_and_threads_survive_a_store_that_goes_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Issue "Shown by": all outputs right, ledger balanced, no thread lost."""
    monkeypatch.setenv(ENV, ALLOWED)
    rng = random.Random(SEED)
    print(f"seed {SEED}, {SOAK_S:.0f} s")
    shape = ModelShape(layers=1, hidden=32, heads=2, kv_heads=1, head_dim=16, seed=7)
    rig = FaultyEngine(model=shape, l1_tokens=512, l2_tokens=1024)
    rig.learn(PROMPTS, TOKENS)
    at_rest = threading.active_count()
    fired: dict[str, int] = {}
    until = time.monotonic() + SOAK_S
    rounds = answers = 0
    content = None
    while time.monotonic() < until:
        rounds += 1
        store = f"soak-{rng.randrange(3)}"
        # Every other round one fault alone, each in its turn: a slow machine has few rounds, and must meet all.
        rates = {FAULTS[rounds // 2 % len(FAULTS)]: 1.0} if rounds % 2 == 0 else storm(rng)
        target = faulty_target(store, rates, rng.choice(POLICIES), seed=rng.randrange(1 << 30), hang_s=0.5)
        content = rig.attach(target)
        before = dict(content.fired)
        for _ in range(rng.randint(1, 6)):
            seeds = rng.sample(PROMPTS, rng.randint(1, 6))
            rig.check(seeds, TOKENS)
            answers += len(seeds)
            action = rng.random()
            if action < 0.2:
                rig.adapter.set_bypass(True)
                rig.check(rng.sample(PROMPTS, 2), TOKENS)
                rig.adapter.set_bypass(False)
            elif action < 0.3:
                installed = rig.adapter._installed.set
                installed.set_knobs(replace(installed.knobs, prefetch_policy=rng.choice(POLICIES)))
            elif action < 0.4:
                rig.rest()
                assert rig.engine.flush().ok
            elif action < 0.5:
                assert rig.engine.flush().ok  # beside calls that were given up
        for fault, n in content.fired.items():
            fired[fault] = fired.get(fault, 0) + n - before.get(fault, 0)
        assert content.closed_under_a_call == 0
        guard = rig.adapter.guard()
        assert guard is not None
        assert len(guard.stuck) <= 2 * 3 * 3
        if rng.random() < 0.3:
            rig.rest()
            rig.detach()
            assert content.inside == 0
    rig.rest()
    assert content is not None
    content.quiet = True
    rig.check(PROMPTS, TOKENS)
    rig.rest()
    rig.close_old(rig.adapter.swap(rig.adapter.build(TargetState(), lambda: False)))
    assert rig.engine.flush().ok
    ledger = rig.engine.cache.host_ledger
    assert (ledger.free, ledger.open) == (ledger.total, 0)
    assert sum(ledger.started.values()) == sum(ledger.ended.values())
    assert content.inside == 0
    deadline = time.monotonic() + 30
    while threading.active_count() > at_rest and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threading.active_count() <= at_rest, [item.name for item in threading.enumerate()]
    print(f"{rounds} rounds, {answers} answers, faults {dict(sorted(fired.items()))}, "
          f"storage hits {rig.adapter.usage()['get'].hit}")  # fmt: skip
    if rounds >= 4 * len(FAULTS):
        assert set(fired) >= set(FAULTS), set(FAULTS) - set(fired)
        assert rig.adapter.usage()["get"].hit > 0
    rig.close()
