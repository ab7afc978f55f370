"""The registry on virtual time, over a link that is a small class: who is seated, who is lost, and when."""

import pytest
import trio

from hicache_proto.hooklink import Goodbye, Heartbeat, RankHello, Refused, Rehello, Welcome
from hicache_proto.model import RankIdentity, RankReport
from hicache_proto.version import PROTOCOL_VERSION
from hicache_sidecar.engine.counters import Counters
from hicache_sidecar.engine.link import SessionLost
from hicache_sidecar.engine.registry import LOOK_AGAIN_S, Registry
from hicache_sidecar.engine.settings import EngineSettings


class Link:
    """Remembers what was sent; peers in ``gone`` have no connection."""

    def __init__(self):
        self.sent, self.gone, self.routes, self.forgotten = [], set(), {}, []

    def route(self, session, peer):
        self.routes[session] = peer

    def forget(self, session, why):
        self.routes.pop(session, None)
        self.forgotten.append((session, why))

    def send(self, peer, message):
        if peer in self.gone:
            raise SessionLost("gone")
        self.sent.append((peer, message))

    def reachable(self, session, _probe):
        return session in self.routes and self.routes[session] not in self.gone


@pytest.fixture
def link():
    return Link()


@pytest.fixture
async def registry(link, nursery, autojump_clock):
    it = Registry(link, EngineSettings(), Counters())
    nursery.start_soon(it.watch)
    await trio.testing.wait_all_tasks_blocked()
    return it


def hello(session, rank=0, *, size=2, incarnation="i1", epoch=1, pid=100, role="rank", engine="e"):
    return RankHello(
        protocol=PROTOCOL_VERSION,
        engine_id=engine,
        session=session,
        role=role,
        identity=RankIdentity(dp_rank=rank, dp_size=size),
        pid=pid + rank,
        incarnation=incarnation,
        epoch=epoch,
    )


def say(registry, message, peer=None):
    registry.link.on_message(peer or message.session.encode(), message)


async def test_topology_comes_from_hellos(registry, link):
    """Nobody lists ranks: the first hello's sizes say how many there are."""
    say(registry, hello("a", 0))
    assert (registry.expected, registry.missing_ranks, registry.engine_id) == (2, [1], "e")
    say(registry, hello("b", 1))
    assert registry.complete
    assert [type(m) for _, m in link.sent] == [Welcome, Welcome]


async def test_silence_is_loss_at_the_limit(registry, link):
    """Rule 5: lost when silent for liveness_s, not before; waiters fail at that moment."""
    say(registry, hello("a", 0))
    say(registry, hello("b", 1))
    for _ in range(5):
        await trio.sleep(1.0)
        say(registry, Heartbeat(session="a", report=RankReport()))
    assert registry.missing_ranks == [1]
    assert link.forgotten == [("b", "silent for 3.5 s")]
    await trio.sleep(3.4)
    assert registry.live
    await trio.sleep(0.2)
    assert not registry.live


async def test_broken_connection_has_a_grace(registry, link):
    """Rule 5: a broken connection that comes back in time is no loss; one that does not is, long before silence."""
    say(registry, hello("a", 0))
    say(registry, hello("b", 1))
    link.gone |= {b"a", b"b"}
    registry.link.on_disconnect()
    await trio.sleep(0.2)
    say(registry, Heartbeat(session="a", report=RankReport()), peer=b"a2")
    await trio.sleep(0.4)
    assert list(registry.live) == [0]
    assert link.routes["a"] == b"a2"
    assert link.forgotten == [("b", "its connection broke")]


async def test_a_connection_that_is_gone_a_moment_after_its_event_is_found_too(registry, link):
    """F32: libzmq's monitor speaks first; a send to the dead peer still succeeded in 55 of 100 cuts."""
    say(registry, hello("a", 0))
    say(registry, hello("b", 1))
    registry.link.on_disconnect()
    link.gone.add(b"b")
    await trio.sleep(LOOK_AGAIN_S + EngineSettings().reconnect_grace_s + 0.01)
    assert list(registry.live) == [0]
    assert link.forgotten == [("b", "its connection broke")]


async def test_stopped_sidecar_blames_nobody(link, nursery, mock_clock):
    """After a SIGSTOP of ours the heartbeats wait in our socket: nobody is lost before they could be read."""
    registry = Registry(link, EngineSettings(), Counters())
    nursery.start_soon(registry.watch)
    await trio.testing.wait_all_tasks_blocked()
    say(registry, hello("a", 0, size=1))
    await trio.testing.wait_all_tasks_blocked()
    mock_clock.jump(12.0)
    await trio.testing.wait_all_tasks_blocked()
    assert list(registry.live) == [0]
    mock_clock.jump(0.9)
    await trio.testing.wait_all_tasks_blocked()
    assert list(registry.live) == [0]
    mock_clock.jump(0.2)
    await trio.testing.wait_all_tasks_blocked()
    assert not registry.live


async def test_second_engine_is_refused_while_the_first_lives(registry, link):
    """Rule 3: not while a rank of the present incarnation lives; at once when its connections are gone."""
    say(registry, hello("a", 0))
    say(registry, hello("x", 1, incarnation="i2", pid=900))
    refused = link.sent[-1][1]
    assert isinstance(refused, Refused)
    assert refused.error.details["reason"] == "rank_in_use"
    assert registry.incarnation == "i1"
    link.gone.add(b"a")
    say(registry, hello("y", 1, incarnation="i2", pid=900))
    assert (registry.incarnation, list(registry.live), registry.missing_ranks) == ("i2", [1], [0])


async def test_restarted_rank_replaces_its_own_session(registry, link):
    """Rule 4: a higher epoch or the same process replaces at once; a lower epoch, or a twin, does not."""
    say(registry, hello("a", 0, size=1))
    say(registry, hello("b", 0, size=1, epoch=2, pid=200))
    assert registry.ranks[0].id == "b"
    assert ("a", "it was restarted") in link.forgotten
    say(registry, hello("c", 0, size=1, epoch=2, pid=200))
    assert registry.ranks[0].id == "c"
    say(registry, hello("late", 0, size=1, epoch=1))
    say(registry, hello("twin", 0, size=1, epoch=2, pid=777))
    assert registry.ranks[0].id == "c"
    assert registry.counters.hellos_refused == {"rank_in_use": 2}


async def test_hello_said_twice_is_welcomed_twice(registry, link):
    """The welcome was late: the same hello again is answered, and starts nothing new."""
    began = []
    registry.on_session.append(began.append)
    say(registry, hello("a", 0))
    say(registry, hello("a", 0), peer=b"again")
    assert [type(m) for _, m in link.sent] == [Welcome, Welcome]
    assert len(began) == 1
    assert link.routes["a"] == b"again"
    say(registry, hello("a", 1))
    assert isinstance(link.sent[-1][1], Refused)


async def test_unknown_sessions_say_hello_again(registry, link):
    """Rule 6: we restarted, the rank did not; a goodbye of a stranger is not answered."""
    say(registry, Heartbeat(session="old", report=RankReport()))
    assert link.sent == [(b"old", Rehello(session="old"))]
    say(registry, Goodbye(session="old"))
    assert len(link.sent) == 1
    assert registry.counters.unknown_sessions == 2


async def test_frontends_are_bounded_and_apart(registry, link):
    """A frontend is no rank; a flood of them is refused."""
    for number in range(70):
        say(registry, hello(f"f{number}", role="frontend"))
    assert len(registry.frontends) == 64
    assert registry.counters.hellos_refused["frontends"] == 6
    assert registry.expected == 0
