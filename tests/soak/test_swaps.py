"""200 hot and 50 draining swaps between two stores while requests come without a pause (issue: swap, modes).

The pools hold a fraction of the texts, so L3 is read all the time. Everything goes through the real sidecar and its
control socket. No request fails, every answer equals the run without swaps, and nothing grows: a line is fitted
through the last half of each series, and what it rises over that half is bounded (F42, F43, F88).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from tests.rigs.procs import Engine, Processes, Sidecar
from tests.soak.load import Load, Sizes, growth, prompts, reference, store_config

from hicache_sidecar.client import Client

TEXTS = 40  # of 400 tokens: 16 000 tokens, beside 2048 in L2
FLAGS = ("--context", "512", "--l1-tokens", "1536", "--l2-tokens", "2048")
MODES = {"hot": 200, "drain": 50}
REQUESTS_BETWEEN = 1  # at least so many answers between two swaps, beside those that a swap takes

# What the fitted line may rise over the last half of the swaps. Threads and descriptors: sets that are still
# closing make each sample uneven by some; a leak of one per swap would be 100. Memory, in MiB: the allocator's
# arenas breathe by 1 to 2; a leaked 64 KiB page per swap would be 6 over 100 swaps.
THREADS, DESCRIPTORS, RESIDENT_MIB = 2.0, 2.0, 3.0


@dataclass
class Rig:
    """A warm engine behind a sidecar, the answers it should give, and two stores."""

    sidecar: Sidecar
    engine: Engine
    expected: dict[str, list[int]]
    configs: list[str]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """One engine for both modes: the second finds allocator and caches warm."""
    root = tmp_path_factory.mktemp("soak")
    with Processes(root) as processes:
        sidecar = processes.sidecar()
        engine = processes.engine(sidecar, *FLAGS)
        expected = reference(engine, prompts(TEXTS))
        yield Rig(sidecar, engine, expected, [store_config(root / name) for name in ("a", "b")])


@pytest.mark.slow
@pytest.mark.timeout(800)
@pytest.mark.parametrize("mode", list(MODES))
def test_swaps_under_load(rig: Rig, mode: str) -> None:
    swaps = MODES[mode]
    with Client.connect(rig.sidecar.socket, client="soak") as client, Load(rig.engine, rig.expected) as load:
        policy = "wait_complete"
        client.attach("file", rig.configs[0], hicache_storage_prefetch_policy=policy, mode="drain", wait_timeout_s=60.0)
        load.wait_for(3 * TEXTS)
        series = {"rank": Sizes(client.status().ranks[0].pid), "sidecar": Sizes(rig.sidecar.process.pid)}
        begun, stored = load.done, load.from_storage
        for number in range(swaps):
            target = rig.configs[(number + 1) % 2]
            answer = client.swap("file", target, mode=mode, wait_timeout_s=60.0)
            assert answer.changed
            load.wait_for(REQUESTS_BETWEEN)
            for sizes in series.values():
                sizes.sample()
        served, stored = load.done - begun, load.from_storage - stored
        status = client.status(fresh=True)
        assert client.detach(mode="drain", wait_timeout_s=60.0).changed
    assert load.failed == []
    assert load.wrong == []
    assert served >= swaps
    assert stored > served / 3, f"{stored} of {served} requests read L3"
    assert status.drift == []
    assert status.usage["get"].error == status.usage["get"].timeout == 0
    for name, sizes in series.items():
        rises = {
            "threads": (growth(sizes.threads, swaps // 2), THREADS),
            "descriptors": (growth(sizes.descriptors, swaps // 2), DESCRIPTORS),
            "resident MiB": (growth(sizes.resident_mib, swaps // 2), RESIDENT_MIB),
        }
        print(mode, name, {what: round(rise, 2) for what, (rise, _) in rises.items()}, "requests", served)
        assert all(rise <= bound for rise, bound in rises.values()), (name, rises)
