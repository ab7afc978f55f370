"""The state directory fails, or we do: full, gone, an fsync that fails, a defect in mid-operation."""

import shutil

import pytest
from tests.protocol.support import endpoint, rig, sidecar, stub_sees
from tests.rigs.stub_engine import StubEngine

from hicache_proto.errors import HicacheError, PrepareFailed
from hicache_sidecar.engine.drive import Drive
from hicache_sidecar.engine.transact import Transactor
from hicache_sidecar.store.disk import Disk


class FullDisk(Disk):
    """No more room once ``full`` is set."""

    full = False

    def reserve(self, fd: int, offset: int, size: int) -> None:
        if self.full:
            raise OSError(28, "No space left on device")
        super().reserve(fd, offset, size)


@pytest.mark.parametrize("where", ["prepare", "commit"])
async def test_a_defect_in_mid_operation_is_settled_like_a_crash(tmp_path, monkeypatch, where):
    """A BEGIN without an outcome would refuse every later operation until the next start of the daemon."""
    async with rig(tmp_path, dp=2) as (side, stub):

        def defect(*_args):
            monkeypatch.undo()
            raise RuntimeError("scripted")

        if where == "prepare":
            stub.ranks[1].set(build_error=PrepareFailed("cannot"))
            monkeypatch.setattr(Transactor, "_stuck", defect)
        else:
            monkeypatch.setattr(Drive, "_fsync_outcome", defect)
        with pytest.raises(HicacheError) as caught:
            await side.attach(config='{"path": "/a"}')
        assert caught.value.code == "internal"
        stub.ranks[1].set(build_error=None)
        await side.until(lambda: side.journal.pending is None and not side.coordinator.ctx.recovering)
        await stub_sees(stub, stub.settled)
        want = None if where == "prepare" else "file"
        assert stub.backends == {0: want, 1: want}
        assert (await side.attach("mem", swap=True)).changed


async def test_full_disk_refuses_before_anything_moves(tmp_path):
    """Disk full at BEGIN: refused, no rank heard of it, and the next attempt works once there is room."""
    async with rig(tmp_path, dp=2) as (side, stub):
        disk = FullDisk()
        side.journal._disk = disk
        disk.full = True
        for rank in stub.ranks.values():
            rank.log.clear()
        with pytest.raises(HicacheError) as refused:
            await side.attach(reason="x" * 900)
            await side.detach(reason="x" * 900)
        assert refused.value.details["reason"] == "disk_full"
        assert stub.settled()
        disk.full = False
        assert (await side.attach("mem", swap=True)).changed


async def test_a_state_directory_that_is_gone_refuses_before_anything_moves(tmp_path):
    """Not written into a file that no start would find; and the daemon lives."""
    async with rig(tmp_path, dp=2) as (side, stub):
        shutil.rmtree(side.journal.path.parent)
        for _ in range(2):
            with pytest.raises(HicacheError) as refused:
                await side.attach()
            assert (refused.value.details["reason"], refused.value.retryable) == ("journal_gone", False)
        assert stub.settled()
        assert side.journal.pending is None
        side.journal.path.parent.mkdir(mode=0o700)
        assert (await side.attach()).changed


class DyingDisk(Disk):
    """fsync fails once ``broken`` is set."""

    broken = False

    def sync(self, fd: int) -> None:
        if self.broken:
            raise OSError(5, "Input/output error")
        super().sync(fd)


async def test_failed_fsync_ends_the_daemon(tmp_path):
    """A failed fsync of the outcome ends the process: nothing is sent on; the ranks go back by their leases."""
    with StubEngine(endpoint(tmp_path), dp=2) as stub:
        with pytest.raises(BaseExceptionGroup) as ended:
            async with sidecar(tmp_path) as side:
                await side.ready()
                disk = DyingDisk()
                side.journal._disk = disk

                def when_switched(session):
                    disk.broken = disk.broken or session.report.op_phase == "switched"

                side.coordinator.registry.on_report.append(when_switched)
                await side.attach()
        assert "journal" in str(ended.value.exceptions[0]) or _holds(ended.value, "JournalFailed")
        await stub_sees(stub, stub.settled)
        assert stub.backends == {0: None, 1: None}


def _holds(group, name):
    return any(
        type(e).__name__ == name or (isinstance(e, BaseExceptionGroup) and _holds(e, name)) for e in group.exceptions
    )
