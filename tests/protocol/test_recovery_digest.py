"""What recovery takes for the desired config: a settled rank's, never one in doubt. Found by the crash matrix."""

import contextlib

import pytest
import trio
from tests.protocol.support import endpoint, fast, sidecar, stub_sees
from tests.rigs.stub_engine import StubEngine

from hicache_proto.errors import HicacheError

OLD, NEW = '{"path": "/old"}', '{"path": "/new"}'


async def _swap_until_it_dies(side):
    with contextlib.suppress(HicacheError):
        await side.attach("file", NEW, swap=True, timeout_s=30)


@pytest.mark.parametrize("all_switch", [True, False])
async def test_a_sidecar_that_dies_in_a_swap_finds_no_drift(tmp_path, all_switch):
    """A to another config of the same backend; killed when ranks have switched: all end on one state, shown as such.

    A switched rank reports B's config under A's revision. Taken for A's, every rank was shown as drift for good.
    """
    settings = fast(in_doubt_s=8.0, freeze_s=1.0, prepared_s=8.0)
    with StubEngine(endpoint(tmp_path), dp=2) as stub:
        async with sidecar(tmp_path, settings) as first:
            await first.ready()
            await first.attach("file", OLD)
            stub.ranks[0].set(answer_delay_s={"commit": 60.0})
            if all_switch:
                stub.ranks[1].set(answer_delay_s={"commit": 60.0})
            else:
                stub.ranks[1].set(silent=frozenset({"commit"}))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_swap_until_it_dies, first)
                switched = [0, 1] if all_switch else [0]
                await stub_sees(stub, lambda: all(stub.ranks[r].rec.phase == "switched" for r in switched))
                nursery.cancel_scope.cancel()
        for rank in stub.ranks.values():
            rank.set(answer_delay_s={}, silent=frozenset())
        stub.ranks[1].set(muted=True)  # the switched one is heard first
        async with sidecar(tmp_path, settings) as second:
            await second.until(lambda: 0 in second.coordinator.registry.live)
            stub.ranks[1].set(muted=False)
            await second.ready()
            await stub_sees(stub, stub.settled)
            document = await second.status()
            assert document.drift == []
            assert document.state == "attached"
            desired = document.desired.hicache_storage_backend_extra_config
            assert desired == (NEW if all_switch else OLD)
            assert {rank.hicache_storage_backend_extra_config for rank in document.ranks} == {desired}
            assert (await second.attach("file", '{"path": "/newer"}', swap=True)).changed
