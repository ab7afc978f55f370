"""A phase's messages on virtual time: one slow rank among 256 delays nobody, and an ended phase is over."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import trio
import trio.testing

from hicache_proto.hooklink import AskReport, Commit, Prepare
from hicache_proto.model import RankReport, TargetState
from hicache_sidecar.engine.fanout import FanOut
from hicache_sidecar.engine.link import SessionLost
from hicache_sidecar.engine.senders import MAX_OUTSTANDING, Senders

RANKS = 256
SLOW = 100
PREPARE = Prepare(target=TargetState(), prepared_s=30.0)


class Link:
    """Answers each rank's calls after ``delay_s[rank]`` of virtual time; never when that is None."""

    def __init__(self, nursery, delay_s):
        self.nursery, self.delay_s = nursery, delay_s
        self.sent = []  # (time, rank, n, body)
        self.open = {}
        self.gone = set()

    def post(self, session, n, body, ended):
        rank = int(session)
        if rank in self.gone:
            raise SessionLost("it is not connected")
        self.sent.append((trio.current_time(), rank, n, body))
        call = len(self.sent)
        self.open[call] = ended
        if self.delay_s.get(rank, 0.0) is not None:
            self.nursery.start_soon(self._answer, call, self.delay_s.get(rank, 0.0))
        return call

    async def _answer(self, call, delay_s):
        await trio.sleep(delay_s)
        if ended := self.open.pop(call, None):
            ended(SimpleNamespace(error=None, ok=True, report=RankReport()), "")

    def drop(self, call):
        self.open.pop(call, None)

    @contextmanager
    def burst(self):
        yield


@pytest.fixture
async def rig(autojump_clock):
    async with trio.open_nursery() as nursery:
        link = Link(nursery, {})
        ranks = {rank: SimpleNamespace(id=str(rank), alive=True) for rank in range(RANKS)}
        results = []
        senders = Senders(
            nursery, FanOut(link), SimpleNamespace(ranks=ranks), 7,
            lambda result, body: results.append((trio.current_time(), result.rank, body)),
        )  # fmt: skip
        yield SimpleNamespace(link=link, senders=senders, results=results, ranks=ranks)
        nursery.cancel_scope.cancel()


async def test_a_slow_rank_delays_nobody(rig, autojump_clock):
    """All messages of a phase leave at one moment, and each answer is handed on when it comes."""
    rig.link.delay_s = {rank: 0.001 * rank for rank in range(RANKS)} | {SLOW: 60.0}
    begun = trio.current_time()
    rig.senders.start(range(RANKS), PREPARE, 10.0)
    assert {at for at, *_ in rig.link.sent} == {begun}
    assert [rank for _, rank, *_ in rig.link.sent] == list(range(RANKS))
    await trio.sleep(1.0)
    assert {rank: at - begun for at, rank, _ in rig.results} == pytest.approx(
        {rank: 0.001 * rank for rank in range(RANKS) if rank != SLOW}
    )
    await trio.sleep(60.0)
    assert next(at for at, rank, _ in rig.results if rank == SLOW) - begun == pytest.approx(60.0)


async def test_leases_are_renewed_for_all_whoever_is_slow(rig, autojump_clock):
    """A message is repeated to every rank while the phase lasts; a stuck one's queue stays bounded."""
    rig.link.delay_s = {SLOW: None}
    rig.senders.start(range(RANKS), PREPARE, 10.0)
    await trio.sleep(145.0)
    times = {rank: sum(1 for _, r, *_ in rig.link.sent if r == rank) for rank in (0, SLOW, RANKS - 1)}
    assert times == {0: 15, SLOW: MAX_OUTSTANDING, RANKS - 1: 15}


async def test_an_ended_phase_is_over(rig, autojump_clock):
    """Nothing of it is sent later, and its late answers are dropped; the next phase's are taken."""
    rig.link.delay_s = dict.fromkeys(range(RANKS), 5.0)
    rig.senders.start(range(RANKS), PREPARE, 10.0)
    await trio.sleep(1.0)
    commit = Commit(in_doubt_s=10.0)
    rig.senders.start(range(2), commit, float("inf"))
    assert not rig.senders.current(PREPARE)
    assert rig.senders.current(commit)
    await trio.sleep(100.0)
    assert sorted((rank, body is commit) for _, rank, body in rig.results) == [(0, True), (1, True)]
    assert len(rig.link.sent) == RANKS + 2


async def test_a_repeat_after_the_deadline_is_not_sent(rig, autojump_clock):
    """Repeating ends with the operation's time."""
    rig.senders.start(range(1), PREPARE, 10.0, trio.current_time() + 25.0)
    await trio.sleep(100.0)
    assert len(rig.link.sent) == 3


async def test_who_is_gone_is_left_out_and_asked_again(rig, autojump_clock):
    """A rank without a session is no error here; ``again`` reaches its next session, at once or later."""
    rig.ranks[1].alive = False
    rig.link.gone = {2}
    rig.senders.start(range(4), PREPARE, float("inf"))
    assert [rank for _, rank, *_ in rig.link.sent] == [0, 3]
    rig.ranks[1].alive = True
    rig.senders.again(1)
    assert rig.link.sent[-1][1:3] == (1, 7)
    rig.senders.again(0, 0.25)
    await trio.sleep(1.0)
    assert rig.link.sent[-1][1] == 0
    rig.senders.stop()
    rig.senders.again(3, 0.25)
    rig.senders.again(3)
    await trio.sleep(1.0)
    assert len(rig.link.sent) == 4


async def test_a_message_beside_the_phase_is_of_no_operation(rig, autojump_clock):
    """It carries n = 0, and its answer moves nothing."""
    rig.senders.start(range(1), PREPARE, float("inf"))
    await trio.sleep(0.1)
    rig.senders.side(3, AskReport())
    await trio.sleep(0.1)
    assert rig.link.sent[-1][1:] == (3, 0, AskReport())
    assert [rank for _, rank, _ in rig.results] == [0]
