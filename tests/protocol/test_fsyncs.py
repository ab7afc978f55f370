"""How often an operation waits for the disk: once inside the freeze, where serving waits with it."""

import os

import pytest
from tests.protocol.support import rig

from hicache_proto import api
from hicache_proto.hooklink import Call
from hicache_sidecar.engine.link import HookLink


@pytest.fixture
def seen(monkeypatch):
    """Phases as they are sent and syncs as they end, in one order."""
    log = []
    send = HookLink.send

    def sending(self, peer, message):
        if isinstance(message, Call):
            log.append(message.phase)
        return send(self, peer, message)

    monkeypatch.setattr(HookLink, "send", sending)
    for name in ("fsync", "fdatasync"):
        real = getattr(os, name)

        def syncing(fd, real=real):
            real(fd)
            log.append("SYNC")

        monkeypatch.setattr(os, name, syncing)
    return log


@pytest.mark.parametrize(("mode", "hold"), [("strict", "freeze"), ("drain", "freeze"), ("hot", "commit")])
async def test_one_sync_between_freeze_and_finalize(tmp_path, seen, mode, hold):
    """The outcome's; BEGIN's comes before PREPARE, while traffic flows, and nothing is synced after FINALIZE."""
    async with rig(tmp_path, dp=2) as (side, _stub):
        await side.attach()  # the journal's first records may make its file larger
        for request in (
            api.AttachRequest(hicache_storage_backend="mem", swap=True, mode=mode),
            api.DetachRequest(mode=mode),
        ):
            seen.clear()
            assert (await side.ask(request)).changed
            begin, held, end = seen.index("prepare"), seen.index(hold), seen.index("finalize")
            assert seen[:begin].count("SYNC") >= 1
            assert seen[begin:held].count("SYNC") == 0
            assert seen[held:end].count("SYNC") == 1
            assert seen[end:].count("SYNC") == 0


async def test_a_refused_operation_syncs_nothing_in_the_freeze(tmp_path, seen):
    """A dry run is undone before it freezes: BEGIN and outcome A, none while anything is held."""
    async with rig(tmp_path, dp=2) as (side, _stub):
        seen.clear()
        await side.attach(dry_run=True)
        assert "freeze" not in seen
        assert seen.count("SYNC") == 2
