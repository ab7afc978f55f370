"""Who is connected: sessions of ranks and frontends, their topology, and whether they live.

Rules
=====

1. The first hello binds the engine id, unless the configuration names it. Another engine's hello is refused.
2. Expected ranks are what the hellos' sizes say; nobody lists ranks by hand. One incarnation is one engine launch.
3. A hello of another incarnation replaces the whole topology, but not while a rank of the present one lives: two
   engines with one id are an operator's mistake, and the one that serves is right. "Lives" is tested at that
   moment by a message to its connection, so that a killed engine's successor need not wait for a heartbeat limit
   (F102).
4. Within an incarnation a hello replaces its own rank's session: at once from the same process or with a higher
   epoch; from another process with the same epoch only once the old one is gone.
5. A rank is lost when it says goodbye, when its connection breaks and does not come back within
   ``reconnect_grace_s``, or when it is silent for ``liveness_s``. Loss fails its waiting calls at once (F32).
6. A message of an unknown session is answered with ``Rehello``: we restarted, the rank did not.

Everything here runs in the loop's thread; ``changed`` wakes whoever waits for news.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from hicache_proto.errors import HicacheError, InvalidRequest
from hicache_proto.hooklink import (
    Answer,
    Goodbye,
    Heartbeat,
    HookMessage,
    Notice,
    RankHello,
    Refused,
    Rehello,
    Welcome,
)
from hicache_proto.model import RankReport
from hicache_proto.version import negotiate
from hicache_sidecar.engine.counters import Counters
from hicache_sidecar.engine.link import HookLink, SessionLost
from hicache_sidecar.engine.settings import EngineSettings

log = logging.getLogger("hicache_sidecar.engine")

REFUSALS_TOLD = 64  # processes and reasons that are remembered as said
REFUSED_RETRY_S = 1.0  # how soon a hook that was refused because of a living predecessor asks again
MISCONFIGURED_RETRY_S = 5.0
STOPPED_S = 1.0  # waking so much later than asked means that this process was stopped (SIGSTOP, a paused VM)
LOOK_AGAIN_S = 0.05  # libzmq tells its monitor before it takes the pipe away: half of the cuts are seen later only
MAX_FRONTENDS = 64  # processes of one engine that answer its HTTP API


@dataclass(eq=False)
class Session:
    """One connected process. Times are trio's clock, seconds."""

    hello: RankHello
    report: RankReport
    seen_at: float
    report_at: float
    alive: bool = True
    why_lost: str = ""
    silent_since: float = math.inf  # the moment its connection was seen broken
    id: str = field(init=False)
    rank: int = field(init=False)

    def __post_init__(self) -> None:
        self.id, self.rank = self.hello.session, self.hello.identity.rank


@dataclass
class Registry:
    """The table of sessions. ``attach_to`` wires it to a link; ``watch`` must run as a task."""

    link: HookLink
    settings: EngineSettings
    counters: Counters
    engine_id: str | None = None
    sidecar_version: str = ""
    incarnation: str = ""
    ranks: dict[int, Session] = field(default_factory=dict)  # the newest session of each rank, alive or not
    frontends: dict[str, Session] = field(default_factory=dict)
    changed: trio.lowlevel.ParkingLot = field(default_factory=trio.lowlevel.ParkingLot)
    # Synchronous listeners: a report arrived (any message of a rank), a notice, a session began or ended.
    on_report: list[Callable[[Session], None]] = field(default_factory=list)
    on_notice: list[Callable[[Session, Notice], None]] = field(default_factory=list)
    on_session: list[Callable[[Session], None]] = field(default_factory=list)
    _sessions: dict[str, Session] = field(default_factory=dict)
    _live: dict[int, Session] | None = None  # ``live``, until a session begins or ends
    _alarm: trio.lowlevel.ParkingLot = field(default_factory=trio.lowlevel.ParkingLot)
    _look_again_at: float = math.inf
    _told: set[tuple[int, str]] = field(default_factory=set)  # refusals that the log has

    def __post_init__(self) -> None:
        self.link.on_message = self._message
        self.link.on_answer = self._answer
        self.link.on_disconnect = self._disconnect

    # ---- what is known

    @property
    def expected(self) -> int:
        """Number of ranks that the topology promises; 0 before the first hello."""
        for session in self.ranks.values():
            return session.hello.identity.size
        return 0

    @property
    def live(self) -> dict[int, Session]:
        """Connected ranks, in rank order; not to be changed. Asked for at every report: made when it changed."""
        if self._live is None:
            self._live = {rank: s for rank, s in sorted(self.ranks.items()) if s.alive}
        return self._live

    @property
    def missing_ranks(self) -> list[int]:
        """Expected ranks that are not connected."""
        live = self.live
        return [rank for rank in range(self.expected) if rank not in live]

    @property
    def complete(self) -> bool:
        """All expected ranks are connected."""
        return self.expected > 0 and not self.missing_ranks

    def age_ms(self, session: Session) -> int:
        """Age of a session's last report."""
        return max(0, round((trio.current_time() - session.report_at) * 1000))

    def highest_n(self) -> int:
        """The highest operation number or revision that any rank has shown (rule 6 of the design)."""
        return max((max(s.report.op_n, s.report.state.revision) for s in self.ranks.values()), default=0)

    # ---- messages

    def _message(self, peer: bytes, message: HookMessage) -> None:
        if isinstance(message, RankHello):
            self._hello(peer, message)
            return
        session = self._sessions.get(message.session)
        if session is None or not session.alive:
            self.counters.unknown_sessions += 1
            if not isinstance(message, Goodbye):
                self._send(peer, Rehello(session=message.session))
            return
        self.link.route(session.id, peer)
        if isinstance(message, Goodbye):
            self._lose(session, f"it left: {message.reason}" if message.reason else "it left")
        elif isinstance(message, Heartbeat):
            self._reported(session, message.report)
        elif isinstance(message, Notice):
            self._reported(session, message.report)
            for listener in self.on_notice:
                listener(session, message)

    def _answer(self, _peer: bytes, answer: Answer) -> None:
        session = self._sessions.get(answer.session)
        if session is not None and session.alive:
            self._reported(session, answer.report)

    def _reported(self, session: Session, report: RankReport) -> None:
        now = trio.current_time()
        session.report, session.report_at, session.seen_at = report, now, now
        session.silent_since = math.inf
        for listener in self.on_report:
            listener(session)
        self.changed.unpark_all()

    # ---- hello

    def _hello(self, peer: bytes, hello: RankHello) -> None:
        known = self._sessions.get(hello.session)
        if known is not None and known.alive and _same_place(known.hello, hello):
            self.link.route(known.id, peer)  # said twice: the first welcome was late
            self._send(peer, self._welcome(known))
            self._reported(known, hello.report)
            return
        try:
            self._admit(hello)
        except HicacheError as exc:
            reason = str(exc.details.get("reason", exc.code))
            self.counters.hellos_refused[reason] += 1
            self._say_refused(hello, reason, exc.message)
            retry_s = REFUSED_RETRY_S if reason == "rank_in_use" else MISCONFIGURED_RETRY_S
            self._send(peer, Refused(session=hello.session, error=exc.body(), retry_s=retry_s))
            return
        now = trio.current_time()
        session = Session(hello=hello, report=hello.report, seen_at=now, report_at=now)
        self.engine_id = hello.engine_id
        self.counters.hellos_accepted += 1
        if hello.role == "rank":
            self._seat(session)
        else:
            self.frontends[session.id] = session
        self._sessions[session.id] = session
        self.link.route(session.id, peer)
        if not self._send(peer, self._welcome(session)):
            self._lose(session, "its connection is gone")
            return
        for listener in self.on_session:
            listener(session)
        self._alarm.unpark_all()
        self.changed.unpark_all()

    def _say_refused(self, hello: RankHello, reason: str, message: str) -> None:
        """Log it once per process and reason: a hook asks again every second or so."""
        key = (hello.pid, reason)
        if key in self._told:
            return
        if len(self._told) >= REFUSALS_TOLD:
            self._told.clear()
        self._told.add(key)
        said = "hello of process %d, engine %.64r, is refused (%s): %.300r"  # a stranger's words: quoted
        log.warning(said, hello.pid, hello.engine_id, reason, message)

    def _welcome(self, session: Session) -> Welcome:
        return Welcome(
            session=session.id,
            protocol=negotiate(session.hello.protocol),
            heartbeat_s=self.settings.heartbeat_s,
            sidecar_version=self.sidecar_version,
        )

    def _admit(self, hello: RankHello) -> None:
        """Check a hello against the rules."""
        negotiate(hello.protocol)
        if self.engine_id is not None and hello.engine_id != self.engine_id:
            raise InvalidRequest(
                f"this sidecar serves engine {self.engine_id!r}, not {hello.engine_id!r}",
                details={"reason": "engine_id"},
                hint="one sidecar serves one engine: run another instance for the other one",
            )
        if not hello.session or hello.session in self._sessions:
            raise InvalidRequest("a session id is used once", details={"reason": "session"})
        if hello.role == "frontend":
            if len(self.frontends) >= MAX_FRONTENDS:
                raise InvalidRequest(f"more than {MAX_FRONTENDS} frontends", details={"reason": "frontends"})
            return
        if hello.role != "rank":
            raise InvalidRequest(f"unknown role {hello.role!r}", details={"reason": "role"})
        who = hello.identity
        fits = (
            0 <= who.dp_rank < who.dp_size and 0 <= who.pp_rank < who.pp_size and 0 <= who.tp_rank < who.tp_size
        )  # fmt: skip
        if not fits:
            raise InvalidRequest("the rank is outside its own topology", details={"reason": "topology"})
        if hello.incarnation == self.incarnation:
            self._admit_restart(hello)
        else:
            self._admit_incarnation(hello)

    def _admit_incarnation(self, hello: RankHello) -> None:
        for session in self.live.values():
            if self._lives(session):
                raise InvalidRequest(
                    f"rank {session.rank} of this engine still runs as process {session.hello.pid}",
                    details={"reason": "rank_in_use", "rank": session.rank, "pid": session.hello.pid},
                    hint="stop the other engine, or give this one its own engine id and sidecar",
                )

    def _admit_restart(self, hello: RankHello) -> None:
        for session in self.ranks.values():
            if session.hello.identity.size != hello.identity.size:
                raise InvalidRequest("ranks of one engine disagree about its sizes", details={"reason": "topology"})
        old = self.ranks.get(hello.identity.rank)
        if old is None or not old.alive or old.hello.pid == hello.pid or hello.epoch > old.hello.epoch:
            return
        if hello.epoch < old.hello.epoch or self._lives(old):
            raise InvalidRequest(
                f"rank {old.rank} is connected already as process {old.hello.pid}",
                details={"reason": "rank_in_use", "rank": old.rank, "pid": old.hello.pid},
            )

    def _lives(self, session: Session) -> bool:
        if not session.alive or trio.current_time() - session.seen_at > self.settings.liveness_s:
            return False
        return self.link.reachable(session.id, self._welcome(session))

    def _seat(self, session: Session) -> None:
        if session.hello.incarnation != self.incarnation:
            for old in list(self.ranks.values()):
                self._lose(old, "the engine was restarted", quiet=True)
            self.ranks.clear()
            self.incarnation = session.hello.incarnation
        before = self.ranks.get(session.rank)
        self.ranks[session.rank] = session
        self._live = None
        if before is not None:
            same = before.hello.pid == session.hello.pid and before.hello.epoch == session.hello.epoch
            self._lose(before, "it said hello again" if same else "it was restarted", quiet=True)

    # ---- loss

    def _disconnect(self) -> None:
        """Some connection broke; libzmq does not say whose, so ask every session's: now, and once it is surely gone."""
        self._look_for_broken()
        self._look_again_at = trio.current_time() + LOOK_AGAIN_S
        self._alarm.unpark_all()

    def _look_for_broken(self) -> None:
        now = trio.current_time()
        for session in [*self.ranks.values(), *self.frontends.values()]:
            if not session.alive or not math.isinf(session.silent_since):
                continue
            if not self.link.reachable(session.id, self._welcome(session)):
                session.silent_since = now

    def _lose(self, session: Session, why: str, *, quiet: bool = False) -> None:
        if not session.alive:
            self._sessions.pop(session.id, None)
            return
        session.alive, session.why_lost = False, why
        self._live = None
        self._sessions.pop(session.id, None)
        self.frontends.pop(session.id, None)
        if not quiet:
            self.counters.sessions_lost += 1
        self.link.forget(session.id, why)
        for listener in self.on_session:
            listener(session)
        self.changed.unpark_all()

    async def watch(self) -> None:
        """Look for silent sessions until cancelled; sleeps until the next one can be due."""
        due = trio.current_time()
        while True:
            now = trio.current_time()
            slept_too_long = now - due > STOPPED_S and not math.isinf(due)
            if now >= self._look_again_at:
                self._look_again_at = math.inf
                self._look_for_broken()
            for session in [*self.ranks.values(), *self.frontends.values()]:
                if not session.alive:
                    continue
                if slept_too_long:  # we were stopped, they were not: their heartbeats wait in our socket
                    session.seen_at = max(session.seen_at, now - self.settings.liveness_s + STOPPED_S)
                if now - session.seen_at >= self.settings.liveness_s:
                    self._lose(session, f"silent for {self.settings.liveness_s:g} s")
                elif now - session.silent_since >= self.settings.reconnect_grace_s:
                    self._lose(session, "its connection broke")
            due = self._next_due()
            with trio.move_on_at(due):
                await self._alarm.park()
                due = trio.current_time()

    def _next_due(self) -> float:
        due = self._look_again_at
        for session in [*self.ranks.values(), *self.frontends.values()]:
            if session.alive:
                due = min(due, session.seen_at + self.settings.liveness_s)
                due = min(due, session.silent_since + self.settings.reconnect_grace_s)
        return due

    def _send(self, peer: bytes, message: Welcome | Refused | Rehello) -> bool:
        try:
            self.link.send(peer, message)
        except SessionLost:
            return False
        return True


def _same_place(one: RankHello, other: RankHello) -> bool:
    """Whether two hellos are of one process at one place."""
    facts = ("pid", "epoch", "incarnation", "role", "identity", "engine_id")
    return all(getattr(one, name) == getattr(other, name) for name in facts)
