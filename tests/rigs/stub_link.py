"""A stub rank's connection: hello, heartbeats, reports, answers, and the script that makes it misbehave."""

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import zmq

from hicache_proto.errors import (
    HicacheError,
)
from hicache_proto.hooklink import (
    Answer,
    Call,
    Heartbeat,
    HookMessage,
    RankHello,
    encode,
)
from hicache_proto.model import (
    MANDATORY_COUNTERS,
    BreakerReport,
    Capabilities,
    EffectiveState,
    EpochChange,
    GuardReport,
    IdleReport,
    Plan,
    RankIdentity,
    RankReport,
    TargetState,
)
from hicache_proto.transaction import RankPhase, RankRecord

WAIT_S = 10.0  # bound of every wait of a test
NEVER = float("inf")
CAPABLE = Capabilities(engine="stub", engine_version="1", tree="radix", hot=True)


@dataclass
class Script:
    """What a rank does beside the rules. Times in seconds."""

    counters: dict[str, int] = field(default_factory=dict)
    omit: tuple[str, ...] = ()  # mandatory counters left out of the report
    capabilities: Capabilities = CAPABLE
    build_delay_s: float = 0.0  # NEVER: the builder hangs
    build_error: HicacheError | None = None
    swap_error: bool = False
    undo_fails: bool = False
    close_stuck: bool = False  # threads of a set on its way out do not end
    busy_at_commit: bool = False  # a request slipped in between FREEZE and COMMIT
    finalize_silent: bool = False
    answer_delay_s: dict[str, float] = field(default_factory=dict)  # by phase
    silent: frozenset[str] = frozenset()  # phases that are neither taken nor answered
    muted: bool = False  # says nothing at all: a stopped process
    layers: dict[str, str] = field(default_factory=dict)
    pages: int = 0  # stored pages of its namespace
    clear_error: HicacheError | None = None
    validate_error: HicacheError | None = None
    sick: dict[str, str] = field(default_factory=dict)  # breaker state by backend; "open" fails its PREPARE as well
    stuck: tuple[str, ...] = ()  # threads that stand in a store's call
    epoch_change: EpochChange | None = None  # the attached store was found emptied
    checkpoint_pages: int = 0  # what its checkpoint says to have written
    freeze_error: HicacheError | None = None  # why it cannot be FROZEN although idle


class Launch(Protocol):
    """What a rank needs of its engine launch."""

    context: "zmq.Context[zmq.Socket[bytes]]"
    endpoint: str
    engine_id: str
    incarnation: str
    epoch: int
    pid: int
    protocol: int

    def do(self, work: Callable[[], None]) -> None: ...


class StubLink:
    """One rank's connection and words. Everything but ``set``, ``log`` and reads belongs to the engine's thread."""

    def __init__(self, engine: Launch, identity: RankIdentity, role: str = "rank") -> None:
        self.engine, self.identity, self.role = engine, identity, role
        self.script = Script()
        self.rec = RankRecord()
        self.state = EffectiveState(prefetch_policy="best_effort", write_policy="write_through", namespace="ns-a")
        self.new: EffectiveState | None = None
        self.old: EffectiveState | None = None
        self.quarantine = ""
        self.stuck = ""  # shown while ``close_stuck``
        self.log: list[tuple[str, int]] = []  # (phase, n) of every call taken
        self.ignored: list[str] = []  # phases of calls that were let pass (``silent``)
        self.admission: list[str] = []  # "close" and "open", in order
        self.opened: list[str | None] = []  # backends that were switched to: opened for I/O
        self.checkpoints: list[bool] = []  # of every operation that was prepared: asked to store the tree first
        self.views: list[TargetState] = []  # SetView, for a frontend
        self.holds: dict[str, float] = {}
        self.refused: list[str] = []  # reasons of refused hellos
        self.welcomes = 0
        self.session = ""
        self.epoch = engine.epoch
        self.pid = engine.pid
        self.dead = False
        self._calls: list[Call] = []  # deferred: prepare, freeze with drain
        self._target: TargetState | None = None
        self._error: HicacheError | None = None
        self._lease_at = NEVER
        self._leases = {"prepared": 30.0, "freeze": 5.0, "in_doubt": 10.0}
        self._drain = False
        self._watch_until = -1.0
        self._beat_at = 0.0
        self._beat_s = 0.2
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self._shown: bytes = b""
        self.socket: zmq.Socket[bytes] | None = None

    @property
    def rank(self) -> int:
        """Flat rank."""
        return self.identity.rank

    def set(self, **changes: Any) -> None:
        """Change the script, in the engine's thread; returns once it is in force."""
        done = threading.Event()

        def apply() -> None:
            for name, value in changes.items():
                if not hasattr(self.script, name):
                    raise AttributeError(name)
                setattr(self.script, name, value)
            self._after_change()
            if changes.keys() & {"sick", "epoch_change", "stuck"}:
                self.heartbeat()
            done.set()

        self.engine.do(apply)
        if not done.wait(WAIT_S):
            raise TimeoutError("the stub's thread does not run")

    # ---- connection

    def connect(self) -> None:
        """(Re)connect with a fresh session."""
        if self.socket is not None:
            self.socket.close(linger=0)
        self.socket = self.engine.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.IMMEDIATE, 1)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self.socket.connect(self.engine.endpoint)
        self.hello()

    def hello(self) -> None:
        self.session = secrets.token_hex(8)
        sent = self.send(
            RankHello(
                protocol=self.engine.protocol,
                engine_id=self.engine.engine_id,
                session=self.session,
                role=self.role,
                identity=self.identity,
                pid=self.pid,
                incarnation=self.engine.incarnation,
                epoch=self.epoch,
                capabilities=self.script.capabilities,
                report=self.report(),
            )
        )
        # Until the welcome: say hello again; soon, when it found no connection yet.
        self._beat_at = time.monotonic() + (1.0 if sent else 0.02)

    def send(self, message: HookMessage) -> bool:
        """True when it is under way."""
        if self.socket is None or self.script.muted or self.dead:
            return True  # nobody is to try again
        try:
            self.socket.send(encode(message), zmq.DONTWAIT)
        except zmq.ZMQError:  # not connected yet: the next hello or heartbeat tries again
            return False
        return True

    def close(self) -> None:
        """As SIGKILL does: no goodbye."""
        self.dead = True
        if self.socket is not None:
            self.socket.close(linger=0)
            self.socket = None

    # ---- what it says

    def report(self) -> RankReport:
        counters = {name: 0 for name in MANDATORY_COUNTERS if name not in self.script.omit}
        counters.update(self.script.counters)
        left = self._lease_at - time.monotonic()
        return RankReport(
            state=msgspec.structs.replace(self.state, revision=self.rec.revision),
            op_n=self.rec.n,
            op_phase=str(self.rec.phase),
            op_ended=str(self.rec.ended),
            lease_left_s=left if left < NEVER else None,
            holds=[*self.holds, *(["op"] if self._held() else [])],
            idle=IdleReport(counters=counters),
            quarantine=self.quarantine or (self.stuck if self.script.close_stuck else ""),
            layers=dict(self.script.layers),
            guard=self._guard(),
            checkpoint_pages=self.script.checkpoint_pages,
        )

    def _guard(self) -> GuardReport | None:
        backend = self.state.backend
        if backend is None:
            return None
        breaker = self.script.sick.get(backend, "closed")
        reason = "" if breaker == "closed" else "errors"
        sides = {"read": BreakerReport(state=breaker, reason=reason), "write": BreakerReport()}
        return GuardReport(
            name=backend, breaker=breaker, reason=reason, sides=sides, stuck=list(self.script.stuck),
            epoch_change=self.script.epoch_change,
        )  # fmt: skip

    def _held(self) -> bool:
        return self.rec.phase in (RankPhase.DRAINING, RankPhase.FROZEN) or (
            self.rec.phase is RankPhase.SWITCHED and not self.rec.hot
        )

    def busy(self) -> bool:
        return any(self.script.counters.values())

    def heartbeat(self) -> None:
        self._beat_at = time.monotonic() + self._beat_s
        self.send(Heartbeat(session=self.session, report=self.report()))

    def answer(
        self,
        call: Call,
        error: HicacheError | None = None,
        *,
        plan: Plan | None = None,
        data: dict[str, Any] | None = None,
        stall_us: int | None = None,
    ) -> None:
        body = None if error is None else error.body()

        def go() -> None:
            self.send(
                Answer(
                    session=call.session,
                    n=call.n,
                    phase=call.phase,
                    call=call.call,
                    ok=body is None,
                    report=self.report(),
                    error=body,
                    plan=plan,
                    data=data,
                    stall_us=stall_us,
                )
            )

        delay_s = self.script.answer_delay_s.get(call.phase, 0.0)
        if delay_s:
            self._timers.append((time.monotonic() + delay_s, go))
        else:
            go()

    def _after_change(self) -> None:
        """The script changed; ``StubRank`` looks at what that allows."""
