"""Operations as jobs: they outlive their client, can be repeated by id, cancelled, dry-run, listed, rolled back."""

import pytest
import trio
from tests.protocol.support import ADMIN, OPERATOR, rig, sidecar, stub_sees
from tests.rigs.stub_link import NEVER

from hicache_proto import api
from hicache_proto.errors import (
    DeadlineExceeded,
    Forbidden,
    HicacheError,
    InvalidRequest,
    NoEngine,
    NotFound,
    NotIdle,
    OperationInProgress,
    PrepareFailed,
    RevisionMismatch,
    RolledBack,
)
from hicache_sidecar.core.actor import Actor, Role


async def test_goes_on_when_the_client_leaves(tmp_path):
    """A cancelled caller leaves the operation alone; its id tells how it ended."""
    async with rig(tmp_path, dp=2) as (side, stub):
        stub.ranks[0].set(counters={"running_batch": 1})
        with trio.CancelScope() as client:
            async with trio.open_nursery() as nursery:

                async def put():
                    await side.attach(wait_timeout_s=9)

                nursery.start_soon(put)
                await stub_sees(stub, lambda: ("watch_idle", 0) in stub.ranks[0].log)
                job = side.coordinator.ctx.running
                client.cancel()
        assert not job.done.is_set()
        await trio.to_thread.run_sync(lambda: stub.ranks[0].set(counters={}))
        with trio.fail_after(5):
            await job.done.wait()
        polled = await side.ask(api.OperationsRequest(operation_id=job.id))
        assert (polled.done, polled.answer.success) == (True, True)
        assert stub.backends == {0: "file", 1: "file"}


async def test_if_match(tmp_path):
    """If-Match: another revision is refused with the current one; the right one passes."""
    async with rig(tmp_path) as (side, _stub):
        current = (await side.status()).revision
        with pytest.raises(RevisionMismatch) as refused:
            await side.attach(if_revision=current + 5)
        assert refused.value.details["current"] == current
        assert (await side.attach(if_revision=current)).changed
        assert side.coordinator.ctx.running is None


async def test_order_of_checks(tmp_path):
    """The first of all failing checks answers, in the contract's order."""
    bad = {"hicache_write_policy": "never", "if_revision": 99}
    viewer = Actor(name="v", role=Role.VIEWER)
    async with sidecar(tmp_path) as side:
        with pytest.raises(Forbidden):
            await side.ask(api.AttachRequest(hicache_storage_backend="file"), actor=viewer)
        with pytest.raises(InvalidRequest):
            await side.attach(**bad)
        with pytest.raises(NoEngine):
            await side.attach("floppy", if_revision=99)
    async with rig(tmp_path) as (side, stub):
        stub.ranks[0].set(counters={"running_batch": 1})
        with pytest.raises(RevisionMismatch):
            await side.attach("floppy", if_revision=99)
        with pytest.raises(HicacheError) as refused:
            await side.attach("floppy")
        assert refused.value.code == "unknown_backend"
        with pytest.raises(NotIdle):
            await side.attach()


@pytest.mark.parametrize(
    "options",
    [
        {"timeout_s": float("nan")},
        {"timeout_s": 0.0},
        {"wait_timeout_s": -1.0},
        {"wait_timeout_s": float("inf")},
        {"mode": "gently"},
        {"reason": "x" * 2000},
        {"hicache_storage_prefetch_policy": "maybe"},
    ],
    ids=str,
)
async def test_bad_values(tmp_path, options):
    """Values that types do not catch are refused by name, before an engine is even needed."""
    async with sidecar(tmp_path) as side:
        with pytest.raises(InvalidRequest) as refused:
            await side.attach(**options)
        assert refused.value.details["field"] == next(iter(options))


async def test_detach_is_idempotent(tmp_path):
    """Nothing to detach: success, not changed, also while busy."""
    async with rig(tmp_path, dp=2) as (side, stub):
        stub.ranks[0].set(counters={"running_batch": 1})
        answer = await side.detach()
        assert (answer.success, answer.changed, answer.state) == (True, False, "detached")
        assert len(answer.ranks) == 2


async def test_dry_run_builds_everywhere_and_keeps_nothing(tmp_path):
    """check: every rank prepares, then undoes; busy or not; the answer says what would change."""
    async with rig(tmp_path, dp=2) as (side, stub):
        stub.ranks[1].set(counters={"running_batch": 1})
        answer = await side.attach(config='{"path": "/a", "token": "tttttt"}', dry_run=True)
        assert (answer.success, answer.changed, answer.dry_run) == (True, False, True)
        row = (await side.ask(api.HistoryRequest())).revisions[-1]
        assert (row.kind, row.result) == ("check", "checked")  # it did what it should: nothing failed
        assert [row["relation"] for row in answer.diff] == ["attach", "attach"]
        assert answer.diff[0]["from"]["write_policy"] == answer.diff[0]["to"]["write_policy"] == "write_through"
        assert "tttttt" not in str(answer)
        assert stub.backends == {0: None, 1: None}
        assert all(("undo", s.rec.n) in s.log and not s.admission for s in stub.ranks.values())
        assert side.journal.pending is None
        stub.ranks[0].set(build_error=PrepareFailed("cannot"))
        with pytest.raises(PrepareFailed):
            await side.attach(dry_run=True)


async def test_a_dry_run_says_attach_or_swap_by_what_is_there(tmp_path):
    """``hicachectl check`` always allows a swap; what it would be, the ranks know."""
    async with rig(tmp_path, dp=2) as (side, _stub):
        answer = await side.attach(swap=True, dry_run=True)
        assert [rank.message for rank in answer.ranks] == ["can attach file", "can attach file"]
        await side.attach()
        answer = await side.attach("mem", swap=True, dry_run=True)
        assert [rank.message for rank in answer.ranks] == ["can swap mem", "can swap mem"]
        answer = await side.attach(swap=True, dry_run=True)
        nothing = "file is attached as asked: nothing was built, and the store was not tried"
        assert [rank.message for rank in answer.ranks] == [nothing] * 2
        answer = await side.attach(hicache_write_policy="write_back", swap=True, dry_run=True)
        live = "can change what differs while file stays: the store was not tried"
        assert [rank.message for rank in answer.ranks] == [live] * 2


async def test_cancel_restores(tmp_path):
    """Cancel before the outcome: every rank is back, the client is told, the job says so."""
    async with rig(tmp_path, dp=2) as (side, stub):
        stub.ranks[1].set(build_delay_s=NEVER)

        async def put():
            with pytest.raises(RolledBack) as cancelled:
                await side.attach()
            assert cancelled.value.details["reason"] == "cancelled"

        async with trio.open_nursery() as nursery:
            nursery.start_soon(put)
            await stub_sees(stub, lambda: stub.ranks[1].rec.phase == "preparing")
            job = side.coordinator.ctx.running
            document = await side.ask(api.CancelRequest(operation_id=job.id))
            assert document.done
        assert stub.backends == {0: None, 1: None}
        assert stub.settled()
        with pytest.raises(NotFound):
            await side.ask(api.CancelRequest(operation_id="op-none"))


async def test_progress_is_told(tmp_path):
    """A waiting client hears the phases, in order, with the operation's id."""
    async with rig(tmp_path) as (side, _stub):
        told = []
        await side.ask(api.AttachRequest(hicache_storage_backend="file"), progress=told.append)
        phases = [t["phase"] for t in told]
        assert phases == ["begin", "prepare", "freeze", "commit", "finalize", "done"]
        assert len({t["operation_id"] for t in told}) == 1


async def test_rollback_to_a_revision_without_a_config_drops_the_present_one(tmp_path):
    """``None`` in a target keeps what is attached; a revision's ``None`` says that it had no config."""
    async with rig(tmp_path, dp=2) as (side, _stub):
        bare = await side.attach()
        await side.attach(config='{"path": "/b"}', swap=True)
        await side.ask(api.RollbackRequest(revision=bare.revision))
        shown = await side.status()
        assert shown.hicache_storage_backend_extra_config == "{}"
        assert shown.drift == []
        assert [rank.hicache_storage_backend_extra_config for rank in shown.ranks] == ["{}", "{}"]


async def test_policies_change_while_nothing_is_attached(tmp_path):
    """A policy is the engine's own: with no store attached it is set on every rank, and a rollback brings it back."""
    async with rig(tmp_path, dp=2) as (side, stub):
        was = await side.status()
        answer = await side.ask(api.PolicyRequest(hicache_write_policy="write_back"))
        assert (answer.changed, answer.changed_keys) == (True, ["hicache_write_policy"])
        assert {rank.state.write_policy for rank in stub.ranks.values()} == {"write_back"}
        again = await side.ask(api.PolicyRequest(hicache_write_policy="write_back"))
        assert (again.changed, {row.message for row in again.ranks}) == (False, {"already so"})
        assert (await side.detach()).changed is False
        assert (await side.ask(api.RollbackRequest(revision=was.revision))).changed
        status = await side.status(fresh=True)
        assert (status.hicache_write_policy, status.drift) == (was.hicache_write_policy, [])


async def test_history_and_rollback(tmp_path):
    """History has who, why, what and the result; roll-back goes to a revision's state, secrets and all."""
    async with rig(tmp_path, dp=2) as (side, stub):
        one = await side.attach(config='{"path": "/a", "password": "hunter22"}', reason="first")
        await side.attach("mem", swap=True)
        stub.ranks[0].set(build_error=PrepareFailed("x"))
        with pytest.raises(PrepareFailed):
            await side.attach("file", swap=True)
        stub.ranks[0].set(build_error=None)
        history = await side.ask(api.HistoryRequest())
        assert [r.result for r in history.revisions] == ["adopted", "committed", "committed", "rolled_back"]
        row = history.revisions[1]
        assert (row.actor, row.reason, row.revision) == ("test-admin", "first", one.revision)
        assert (row.n, row.mode, row.prepare_ms) == (one.revision, "strict", one.prepare_ms)
        assert row.began_at <= row.at
        assert "hunter22" not in str(history)
        answer = await side.ask(api.RollbackRequest(revision=one.revision))
        assert answer.changed
        assert {s.state.extra_config for s in stub.ranks.values()} == {'{"path": "/a", "password": "hunter22"}'}
        with pytest.raises(NotFound):
            await side.ask(api.RollbackRequest(revision=999))


async def test_events_are_numbered_and_resume(tmp_path):
    """A snapshot first, then numbers without a gap; a follower resumes after the last it saw."""
    async with rig(tmp_path) as (side, _stub):
        stream = side.coordinator.watch(api.WatchRequest(), ADMIN)
        snapshot = await anext(stream)
        assert snapshot.kind == "snapshot"
        assert snapshot.data["state"] == "detached"
        await side.attach()
        seen = [await anext(stream) for _ in range(4)]
        await stream.aclose()
        assert [e.id for e in seen] == list(range(snapshot.id + 1, snapshot.id + 5))
        again = side.coordinator.watch(api.WatchRequest(last_event_id=seen[1].id), ADMIN)
        resumed = [await anext(again), await anext(again)]
        await again.aclose()
        assert resumed == seen[2:4]
        foreign = side.coordinator.watch(api.WatchRequest(last_event_id=3), ADMIN)
        told = await anext(foreign)
        assert (told.kind, told.data["missed_after"]) == ("snapshot", 3), "the gap is said"
        assert "missed_after" not in snapshot.data
        await foreign.aclose()


async def test_drain_and_resume(tmp_path):
    """F10: admission closes, idle is waited for, resume opens it; status says draining in between."""
    async with rig(tmp_path, dp=2) as (side, stub):
        stub.ranks[0].set(counters={"running_batch": 1})
        answers = []

        async def drain():
            answers.append(await side.ask(api.DrainRequest(timeout_s=8, hold_s=60)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(drain)
            await stub_sees(stub, lambda: ("watch_idle", 0) in stub.ranks[0].log)
            with pytest.raises(OperationInProgress):
                await side.attach()
            await trio.to_thread.run_sync(lambda: stub.ranks[0].set(counters={}))
        assert answers[0].state == "draining"
        assert (await side.status()).state == "draining"
        assert (await side.attach()).changed  # a drained engine takes operations
        assert (await side.status()).state == "draining"
        await side.ask(api.ResumeRequest())
        assert (await side.status()).state == "attached"
        assert all(not s.holds for s in stub.ranks.values())


async def test_drain_that_fails_reopens(tmp_path):
    """F10: busy for ever: 504 at the deadline and admission open again; the same when its client is gone."""
    async with rig(tmp_path, dp=2) as (side, stub):
        stub.ranks[0].set(counters={"running_batch": 1})
        with pytest.raises(DeadlineExceeded) as late:
            await side.ask(api.DrainRequest(timeout_s=0.5))
        assert late.value.details["blocked_by"][0]["name"] == "running_batch"
        assert all(s.admission[0] == "close" and s.admission[-1] == "open" for s in stub.ranks.values())
        with trio.move_on_after(0.2):
            await side.ask(api.DrainRequest(timeout_s=0.6))
        job = side.coordinator.ctx.running
        with trio.fail_after(5):
            await job.done.wait()
        assert all(not s.holds and s.admission[-1] == "open" for s in stub.ranks.values())


async def test_hold_ends_by_itself(tmp_path):
    """F10: after ``hold_s`` admission reopens without anybody."""
    async with rig(tmp_path) as (side, stub):
        await side.ask(api.DrainRequest(timeout_s=2, hold_s=0.3))
        await stub_sees(stub, lambda: not stub.ranks[0].holds)
        assert stub.ranks[0].admission[-1] == "open"


async def test_clear_is_guarded_and_counted(tmp_path):
    """F68, F118: the highest level, idle or bypass, the namespace said again, counts per rank, failures are errors."""
    async with rig(tmp_path, dp=2) as (side, stub):
        request = api.ClearRequest(confirm="ns-a")
        with pytest.raises(Forbidden):
            await side.ask(request, actor=OPERATOR)
        with pytest.raises(InvalidRequest):
            await side.ask(request)  # nothing attached
        await side.attach()
        with pytest.raises(InvalidRequest):
            await side.ask(api.ClearRequest(confirm="everything"))
        stub.ranks[0].set(pages=7)
        stub.ranks[1].set(pages=5, counters={"running_batch": 1})
        with pytest.raises(NotIdle) as busy:
            await side.ask(request)
        assert "Reject clear: scheduler is not idle" in busy.value.message
        await side.ask(api.BypassRequest(enabled=True))
        assert (await side.status()).state == "bypassed"
        answer = await side.ask(request)
        assert answer.deleted == 12
        assert [r.message for r in answer.ranks] == ["deleted 7", "deleted 5"]
        stub.ranks[1].set(clear_error=HicacheError("store gone"))
        with pytest.raises(HicacheError) as failed:
            await side.ask(request)
        assert failed.value.status >= 500
        assert "rank 1" in failed.value.message


async def test_bypass_works_during_an_operation(tmp_path):
    """Bypass at any moment: under load, and beside a running operation."""
    async with rig(tmp_path, dp=2) as (side, stub):
        await side.attach()
        stub.ranks[0].set(build_delay_s=NEVER, counters={"running_batch": 3})
        async with trio.open_nursery() as nursery:

            async def put():
                with pytest.raises(RolledBack):
                    await side.attach("mem", swap=True, wait_timeout_s=5)

            nursery.start_soon(put)
            await stub_sees(stub, lambda: stub.ranks[0].rec.phase == "preparing")
            answer = await side.ask(api.BypassRequest(enabled=True))
            assert (answer.success, answer.changed) == (True, True)
            assert all(s.state.bypass for s in stub.ranks.values())
            await side.ask(api.CancelRequest(operation_id=side.coordinator.ctx.running.id))
        assert not (await side.ask(api.BypassRequest(enabled=True))).changed


async def test_a_bypass_of_nothing_says_so(tmp_path):
    """A bypass belongs to the store that is attached; who sets it before an attach must not believe that it stays."""
    async with rig(tmp_path) as (side, _stub):
        assert "nothing is attached" in (await side.ask(api.BypassRequest(enabled=True))).message
        assert "nothing is attached" not in (await side.ask(api.BypassRequest(enabled=False))).message
        await side.attach()
        assert "nothing is attached" not in (await side.ask(api.BypassRequest(enabled=True))).message


async def test_backends_and_ranks(tmp_path):
    """The documents from the ranks' own words."""
    async with rig(tmp_path, dp=2) as (side, _stub):
        backends = await side.ask(api.BackendsRequest())
        assert [b["name"] for b in backends.backends] == ["file", "mem"]
        ranks = await side.ask(api.RanksRequest())
        assert (ranks.expected, [r.rank for r in ranks.ranks]) == (2, [0, 1])
        assert ranks.ranks[0].capabilities.engine == "stub"


async def test_secrets_appear_nowhere(tmp_path, caplog):
    """F94: a secret in the config, also one that a failing backend quotes: in no document, event, error or log."""
    secret = "s3ntinel-value-77"
    config = f'{{"path": "/a", "password": "{secret}"}}'
    async with rig(tmp_path, dp=2) as (side, stub):
        shown = [await side.attach(config=config), await side.status(), await side.ask(api.HistoryRequest())]
        shown.append(await side.ask(api.OperationsRequest()))
        stub.ranks[1].set(build_error=PrepareFailed(f"login with {secret} failed", details={"tried": secret}))
        with pytest.raises(PrepareFailed) as failed:
            await side.attach("mem", config=config, swap=True, request_id="r1")
        shown.append(failed.value.body())
        with pytest.raises(PrepareFailed) as again:
            await side.attach("mem", config=config, swap=True, request_id="r1")
        shown.append(again.value.body())
        with pytest.raises(HicacheError) as malformed:
            await side.attach(config=f'{{"password": "{secret}", oops')
        shown.append(malformed.value.body())
        shown += [await side.ask(api.OperationsRequest()), await side.ask(api.HistoryRequest())]
        shown += list(side.coordinator.ctx.hub._ring)
        assert secret not in repr(shown) + caplog.text
        assert side.journal.desired[0].extra_config == config
