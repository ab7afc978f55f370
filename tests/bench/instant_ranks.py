"""A link whose ranks answer at once: the coordinator's own share of an operation, without the ranks' work or ZMQ.

The ranks follow the real table (``rank_step``); an answer comes in the loop's next pass, as if the wire took no time.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import trio

from hicache_proto.hooklink import Answer, Call, Commit, Finalize, Freeze, Prepare, RankHello, SidecarMessage, Undo
from hicache_proto.hooklink import Validate as ValidateCall
from hicache_proto.model import (
    MANDATORY_COUNTERS,
    Capabilities,
    EffectiveState,
    IdleReport,
    Plan,
    RankIdentity,
    RankReport,
)
from hicache_proto.transaction import On, RankEvent, RankRecord, rank_step
from hicache_proto.version import PROTOCOL_VERSION
from hicache_sidecar.engine.counters import Counters
from hicache_sidecar.engine.link import HookLink

EVENTS = {Prepare: On.PREPARE, Freeze: On.FREEZE, Commit: On.COMMIT, Finalize: On.FINALIZE, Undo: On.UNDO}
IDLE = IdleReport(counters=dict.fromkeys(MANDATORY_COUNTERS, 0))


class InstantRank:
    """One rank: a record and the name of what it runs."""

    def __init__(self, rank: int, size: int) -> None:
        self.identity = RankIdentity(dp_rank=rank, dp_size=size)
        self.session = f"s{rank}"
        self.record = RankRecord()
        self.state = EffectiveState(prefetch_policy="best_effort", write_policy="write_through")
        self._target = self.state

    def report(self) -> RankReport:
        rec = self.record
        state = msgspec.structs.replace(self.state, revision=rec.revision)
        return RankReport(state=state, op_n=rec.n, op_phase=rec.phase.value, op_ended=rec.ended.value, idle=IDLE)

    def hello(self) -> RankHello:
        return RankHello(
            protocol=PROTOCOL_VERSION, engine_id="instant", session=self.session, role="rank", pid=1,
            identity=self.identity, incarnation="one", epoch=1, capabilities=Capabilities(hot=True),
            report=self.report(),
        )  # fmt: skip

    def take(self, call: Call) -> Answer:
        plan = None
        body = call.body
        if isinstance(body, ValidateCall):
            plan = Plan(relation="attach" if body.target.backend else "detach", config_digest="d")
        if isinstance(body, Prepare):
            self._target = msgspec.structs.replace(self.state, backend=body.target.backend)
        on = EVENTS.get(type(body))
        if on is not None:
            self._feed(RankEvent(on, call.n, round=getattr(body, "round", 0), idle=True))
            if on is On.PREPARE:
                self._feed(RankEvent(On.BUILT, call.n))
            elif on is On.FREEZE:
                self._feed(RankEvent(On.IDLE, call.n))
            elif on is On.COMMIT:
                self.state = self._target
        return Answer(
            session=call.session, n=call.n, phase=call.phase, call=call.call, ok=True, report=self.report(), plan=plan
        )

    def _feed(self, event: RankEvent) -> None:
        self.record, _ = rank_step(self.record, event)


class InstantLink(HookLink):
    """Delivers to ``ranks`` in this process instead of sending."""

    def __init__(self, ranks: int) -> None:
        super().__init__(Counters())
        self.ranks = {f"s{rank}": InstantRank(rank, ranks) for rank in range(ranks)}
        self.sent: list[str] = []

    def hello(self) -> None:
        """Every rank says hello."""
        for rank in self.ranks.values():
            self.on_message(rank.session.encode(), rank.hello())

    def send(self, peer: bytes, message: SidecarMessage) -> None:
        """Take the call now, answer in the loop's next pass."""
        if isinstance(message, Call):
            self.sent.append(message.phase)
            answer = self.ranks[message.session].take(message)
            trio.lowlevel.current_trio_token().run_sync_soon(self._answered, peer, answer)

    @contextmanager
    def burst(self) -> Iterator[None]:
        """Nothing to look at."""
        yield
