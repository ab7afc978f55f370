"""The cache controller with real threads and an in-memory store: tiers, policies, failures."""

import pytest
from tests.unit.cache.support import MemoryStore, Rig, prompt

from hicache_proto.model import LAYOUTS


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_tier_gives_the_same_bytes(layout: str) -> None:
    store = MemoryStore()
    rig = Rig(store=store, layout=layout)
    tokens = prompt(6)
    assert rig.serve(tokens) == (0, 0, 0)
    assert len(store.data) == 6
    assert rig.serve(tokens) == (24, 0, 0)
    rig.ctl._writer.device_room(rig.device.num_pages)  # evict L1
    assert rig.serve(tokens) == (0, 24, 0)
    rig.flush()
    assert rig.serve(tokens) == (0, 0, 24)
    assert rig.host.num_pages == rig.ctl.host_ledger.free + 6
    rig.close()
    assert store.closed == 1
