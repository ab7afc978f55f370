"""STUB(n): a scriptable engine with n hook ranks over real ZMQ DEALERs, for the sidecar's tests.

It executes the rank's table of ``hicache_proto.transaction`` and answers as the table in ``hooklink`` says, but has
no cache and no scheduler: one thread serves all ranks, and each rank's ``script`` makes it late, silent, failing or
lying. Nothing here sleeps; a test waits on what ranks say or on ``wait_for``.

    with StubEngine(endpoint, dp=2) as stub:
        stub.ranks[1].set(counters={"grammar_queue": 3})
"""

import contextlib
import hashlib
import json
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import msgspec
import zmq

from hicache_proto.errors import (
    HicacheError,
    Internal,
    InvalidConfig,
    NotIdle,
    PrepareFailed,
    Quarantined,
    UnknownBackend,
)
from hicache_proto.hooklink import (
    Answer,
    AskReport,
    Bypass,
    Call,
    ClearNamespace,
    Commit,
    Describe,
    Finalize,
    Freeze,
    Goodbye,
    Heartbeat,
    Hold,
    HookMessage,
    Notice,
    Prepare,
    RankHello,
    Refused,
    Rehello,
    Release,
    SetView,
    Thaw,
    Undo,
    Validate,
    WatchIdle,
    Welcome,
    decode_from_sidecar,
    encode,
)
from hicache_proto.model import (
    KNOBS,
    MANDATORY_COUNTERS,
    Blocker,
    Capabilities,
    EffectiveState,
    IdleReport,
    Plan,
    RankIdentity,
    RankReport,
    TargetState,
)
from hicache_proto.transaction import Do, Ended, On, RankEvent, RankPhase, RankRecord, Said, rank_step, said
from hicache_proto.version import PROTOCOL_VERSION

BACKENDS = ("file", "mem")
KNOB_DEFAULTS: dict[str, Any] = {"prefetch_threshold": 256}
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
    busy_at_commit: bool = False  # a request slipped in between FREEZE and COMMIT
    finalize_silent: bool = False
    answer_delay_s: dict[str, float] = field(default_factory=dict)  # by phase
    silent: frozenset[str] = frozenset()  # phases that are neither taken nor answered
    muted: bool = False  # says nothing at all: a stopped process
    layers: dict[str, str] = field(default_factory=dict)
    pages: int = 0  # stored pages of its namespace
    clear_error: HicacheError | None = None
    validate_error: HicacheError | None = None


class StubRank:
    """One rank. Everything but ``set``, ``log`` and reads of attributes belongs to the engine's thread."""

    def __init__(self, engine: "StubEngine", identity: RankIdentity, role: str = "rank") -> None:
        self.engine, self.identity, self.role = engine, identity, role
        self.script = Script()
        self.rec = RankRecord()
        self.state = EffectiveState(prefetch_policy="best_effort", write_policy="write_through", namespace="ns-a")
        self.new: EffectiveState | None = None
        self.old: EffectiveState | None = None
        self.quarantine = ""
        self.log: list[tuple[str, int]] = []  # (phase, n) of every call taken
        self.admission: list[str] = []  # "close" and "open", in order
        self.opened: list[str | None] = []  # backends that were switched to: opened for I/O
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
        self._beat_at = time.monotonic() + 1.0  # until the welcome: say hello again
        self.send(
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

    def send(self, message: HookMessage) -> None:
        if self.socket is None or self.script.muted or self.dead:
            return
        with contextlib.suppress(zmq.ZMQError):  # not connected yet: the next hello or heartbeat tries again
            self.socket.send(encode(message), zmq.DONTWAIT)

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
            quarantine=self.quarantine,
            layers=dict(self.script.layers),
        )

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

    # ---- what it is told

    def take(self, frame: bytes) -> None:
        message = decode_from_sidecar(frame)
        if self.script.muted:
            return
        match message:
            case Welcome():
                if message.session == self.session:
                    self.welcomes += 1
                    self._beat_s = message.heartbeat_s
                    self.heartbeat()
            case Refused():
                self.refused.append(str(message.error.details.get("reason")))
                self._timers.append((time.monotonic() + message.retry_s, self.hello))
                self._beat_at = NEVER
            case Rehello():
                self.hello()
            case Call() if message.session == self.session and message.phase not in self.script.silent:
                self.log.append((message.phase, message.n))
                self._call(message)

    def _call(self, call: Call) -> None:
        body = call.body
        match body:
            case AskReport():
                self.answer(call)
            case Validate():
                self._validate(call, body)
            case Describe():
                rows = [{"name": n, "available": True, "missing": "", "options_schema": {}} for n in BACKENDS]
                self.answer(call, data={"backends": rows})
            case WatchIdle():
                self._watch_until = time.monotonic() + body.for_s
                self.answer(call)
                self._after_change()
            case Hold():
                self.holds[body.name] = time.monotonic() + body.hold_s
                self.admission.append("close")
                self.answer(call)
            case Release():
                there = self.holds.pop(body.name, None) is not None
                if there:
                    self.admission.append("open")
                self.answer(call, data={"released": there})
            case Bypass():
                self.state = msgspec.structs.replace(self.state, bypass=body.enabled)
                self.answer(call)
            case ClearNamespace():
                self._clear(call, body)
            case SetView():
                self.views.append(body.target)
                self.answer(call)
            case _:
                self._operation(call)

    def _clear(self, call: Call, body: ClearNamespace) -> None:
        if self.script.clear_error is not None:
            self.answer(call, self.script.clear_error)
            return
        deleted = self.script.pages if body.namespace == self.state.namespace else 0
        self.script.pages -= deleted
        self.answer(call, data={"deleted": deleted})

    # ---- the state that a target means

    def _effective(self, target: TargetState) -> EffectiveState:
        now = self.state
        if target.backend is None:
            return EffectiveState(
                prefetch_policy=target.prefetch_policy or now.prefetch_policy,
                write_policy=target.write_policy or now.write_policy,
                namespace=now.namespace,
                bypass=now.bypass,
            )
        if target.backend not in BACKENDS:
            raise UnknownBackend(f"no backend {target.backend!r}")
        text = target.extra_config
        if text is None and target.backend == now.backend:
            text = now.extra_config
        try:
            config = json.loads(text or "{}")
        except ValueError as exc:
            raise InvalidConfig(f"not JSON at position {exc.pos}" if hasattr(exc, "pos") else "not JSON") from None
        knobs = KNOB_DEFAULTS | {k: v for k, v in config.items() if k in KNOBS} | target.knobs
        options = {k: v for k, v in config.items() if k not in KNOBS}
        return EffectiveState(
            backend=target.backend,
            extra_config=text,
            config_digest=hashlib.sha256(json.dumps([options, knobs], sort_keys=True).encode()).hexdigest()[:16],
            knobs=knobs,
            prefetch_policy=target.prefetch_policy or now.prefetch_policy,
            write_policy=target.write_policy or now.write_policy,
            namespace=now.namespace,
            bypass=now.bypass,
        )

    def _options(self, state: EffectiveState) -> dict[str, Any]:
        return {k: v for k, v in json.loads(state.extra_config or "{}").items() if k not in KNOBS}

    def _validate(self, call: Call, body: Validate) -> None:
        if self.script.validate_error is not None:
            self.answer(call, self.script.validate_error)
            return
        try:
            new = self._effective(body.target)
        except HicacheError as exc:
            self.answer(call, exc)
            return
        now = self.state
        live = [k for k in KNOBS if new.knobs.get(k) != now.knobs.get(k)] if now.backend and new.backend else []
        live += ["hicache_storage_prefetch_policy"] if new.prefetch_policy != now.prefetch_policy else []
        live += ["hicache_write_policy"] if new.write_policy != now.write_policy else []
        if new.backend is None:
            relation, keys = ("same" if now.backend is None and not live else "detach"), live
        elif now.backend is None:
            relation, keys = "attach", ["hicache_storage_backend"]
        elif now.backend != new.backend:
            relation, keys = "swap", ["hicache_storage_backend"]
        else:
            a, b = self._options(now), self._options(new)
            other = sorted(k for k in a.keys() | b.keys() if a.get(k) != b.get(k))
            relation, keys = ("swap", other) if other else ("live", live) if live else ("same", [])
        self.answer(call, plan=Plan(relation=relation, changed_keys=keys, config_digest=new.config_digest))

    # ---- the transaction

    def _operation(self, call: Call) -> None:
        body, n = call.body, call.n
        match body:
            case Prepare():
                self._leases["prepared"] = body.prepared_s
                if n > self.rec.n and self.rec.phase is RankPhase.NONE and not self.rec.builder_n:
                    self._target, self._error = body.target, None
                self.feed(RankEvent(On.PREPARE, n, hot=body.hot))
                self._prepared_or_later(call)
            case Freeze():
                self._leases["freeze"], self._drain = body.freeze_s, body.drain
                self.feed(RankEvent(On.FREEZE, n, round=body.round))
                self._look_idle()
                self._frozen_or_later(call)
            case Thaw():
                self._leases["prepared"] = body.prepared_s
                self.feed(RankEvent(On.THAW, n, round=body.round))
                self._reply(call, Said.PREPARED)
            case Commit():
                self._leases["in_doubt"] = body.in_doubt_s
                idle = not (self.busy() or self.script.busy_at_commit)
                alive = time.monotonic() < self._lease_at
                self.feed(RankEvent(On.COMMIT, n, idle=idle, lease_alive=alive))
                self._reply(call, Said.SWITCHED, stall_us=120)
            case Finalize():
                if self.script.finalize_silent:
                    return
                self.feed(RankEvent(On.FINALIZE, n))
                self._reply(call, Said.FINAL)
            case Undo():
                self.feed(RankEvent(On.UNDO, n))
                self._reply(call, Said.UNDONE)

    def what(self, n: int) -> Said:
        return said(str(self.rec.n) and self.rec.n, str(self.rec.phase), str(self.rec.ended), n, self.rec.revision)

    def _reply(self, call: Call, wanted: Said, stall_us: int | None = None) -> None:
        what = self.what(call.n)
        error: HicacheError | None = None
        if what is not wanted:
            if what is Said.QUARANTINED:
                error = Quarantined(self.quarantine, details={"reason": "undo_failed"})
            elif what is Said.EXPIRED and call.phase != "undo":
                error = HicacheError(f"n={call.n} has ended here", details={"reason": "expired"})
            elif what is Said.FROZEN and self.script.swap_error:
                error = Internal("the swap raised", details={"reason": "swap_failed"})
            elif what is Said.FROZEN:
                error = self._not_idle()
            elif call.phase != "undo":
                error = Internal(f"not {wanted}", details={"reason": f"not_{wanted}"})
        self.answer(call, error, stall_us=stall_us)

    def _not_idle(self) -> NotIdle:
        rows = [Blocker(self.rank, k, v) for k, v in self.script.counters.items() if v]
        return NotIdle("busy", details={"blocked_by": [msgspec.to_builtins(b) for b in rows]})

    def _prepared_or_later(self, call: Call) -> None:
        what = self.what(call.n)
        if what is Said.PREPARING:
            self._calls.append(call)
        elif what is Said.PREPARED:
            self.answer(call)
        elif what is Said.UNKNOWN:
            self.answer(call, PrepareFailed("an older builder runs", details={"reason": "builder_busy"}))
        else:
            self.answer(call, self._error or PrepareFailed(f"n={call.n} ended here: {what}"))

    def _frozen_or_later(self, call: Call) -> None:
        what = self.what(call.n)
        if what is Said.DRAINING:
            self._calls.append(call)
        elif what is Said.FROZEN:
            self.answer(call, stall_us=40)
        elif what is Said.PREPARED:
            self.answer(call, self._not_idle())
        else:
            self.answer(call, Internal(f"not frozen: {what}", details={"reason": "not_frozen"}))

    def _look_idle(self) -> None:
        if self.rec.phase is RankPhase.DRAINING:
            if not self.busy():
                self.feed(RankEvent(On.IDLE, self.rec.n))
            elif not self._drain:
                self.feed(RankEvent(On.BUSY, self.rec.n))

    def feed(self, event: RankEvent) -> None:
        """One event through the table, its actions in order."""
        before = self.rec
        self.rec, actions = rank_step(self.rec, event)
        for action in actions:
            if not self._act(action, event.n):
                break
        if self.rec.phase is not before.phase or self.rec.ended is not before.ended:
            self._settle()
            self.heartbeat()

    def _settle(self) -> None:
        calls, self._calls = self._calls, []
        for call in calls:
            if call.phase == "prepare":
                self._prepared_or_later(call)
            else:
                self._frozen_or_later(call)

    def _act(self, action: Do, n: int) -> bool:
        now = time.monotonic()
        match action:
            case Do.BUILD:
                if self.script.build_delay_s == NEVER:
                    return True
                self._timers.append((now + self.script.build_delay_s, lambda: self._built(n)))
            case Do.ARM_PREPARED:
                self._lease_at = now + self._leases["prepared"]
            case Do.ARM_FREEZE:
                self._lease_at = now + self._leases["freeze"]
            case Do.ARM_IN_DOUBT:
                self._lease_at = now + self._leases["in_doubt"]
            case Do.DISARM:
                self._lease_at = NEVER
            case Do.HOLD:
                self.admission.append("close")
            case Do.OPEN:
                self.admission.append("open")
            case Do.SWAP:
                if self.script.swap_error:
                    self.feed(RankEvent(On.SWAP_FAILED, n))
                    return False
                self.old, self.state = self.state, self.new or self.state
                self.opened.append(self.state.backend)
            case Do.SWAP_BACK:
                if self.script.undo_fails:
                    self.quarantine = "swapping back raised"
                    self.feed(RankEvent(On.UNDO_FAILED, n))
                    return False
                self.state = self.old or self.state
                self.opened.append(self.state.backend)
            case Do.BYPASS:
                self.state = msgspec.structs.replace(self.state, bypass=True)
            case Do.DROP_NEW | Do.RETIRE_OLD | Do.CLOSE_BUILT | Do.PUBLISH:
                pass
        return True

    def _built(self, n: int) -> None:
        error = self.script.build_error
        if error is None and self._target is not None and self.rec.n == n:
            self.new = self._effective(self._target)
        self._error = error
        self.feed(RankEvent(On.BUILD_FAILED if error is not None else On.BUILT, n))

    # ---- time

    def tick(self) -> float:
        """Do what is due; returns the next time."""
        now = time.monotonic()
        due = [go for at, go in self._timers if at <= now]
        self._timers = [(at, go) for at, go in self._timers if at > now]
        for go in due:
            go()
        if now >= self._lease_at:
            self._lease_at = NEVER
            self.feed(RankEvent(On.LEASE_END, self.rec.n))
            self.send(Notice(session=self.session, kind="lease_end", report=self.report()))
        for name in [name for name, until in self.holds.items() if until <= now]:
            del self.holds[name]
            self.admission.append("open")
        if now >= self._beat_at:
            if self.welcomes:
                self.heartbeat()
            else:
                self.hello()
        return min([self._beat_at, self._lease_at, *self.holds.values(), *(at for at, _ in self._timers)])

    def _after_change(self) -> None:
        self._look_idle()
        if not self.busy() and time.monotonic() < self._watch_until:
            self._watch_until = -1.0
            self.send(Notice(session=self.session, kind="idle", report=self.report()))


class StubEngine:
    """All ranks of one engine launch, on one thread. ``restart`` makes the next launch."""

    def __init__(
        self,
        endpoint: str,
        *,
        dp: int = 1,
        pp: int = 1,
        tp: int = 1,
        engine_id: str = "stub",
        epoch: int = 1,
        frontends: int = 0,
        absent: tuple[int, ...] = (),
        protocol: int = PROTOCOL_VERSION,
        before: Callable[["StubEngine"], None] | None = None,
    ) -> None:
        self.endpoint, self.engine_id, self.epoch, self.protocol = endpoint, engine_id, epoch, protocol
        self.incarnation = secrets.token_hex(4)
        self.pid = os.getpid()
        self.context = zmq.Context()
        identities = [
            RankIdentity(d, p, t, dp, pp, tp) for d in range(dp) for p in range(pp) for t in range(tp)
        ]  # fmt: skip
        self.ranks = {i.rank: StubRank(self, i) for i in identities if i.rank not in absent}
        self.frontends = [StubRank(self, RankIdentity(), "frontend") for _ in range(frontends)]
        self._todo: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._news = threading.Condition()
        self._stop = False
        self._failed: BaseException | None = None
        self._wake_address = f"inproc://{secrets.token_hex(4)}"
        self._wake_in = self.context.socket(zmq.PAIR)
        self._wake_in.bind(self._wake_address)
        self._wake_lock = threading.Lock()
        self._wake_out = self.context.socket(zmq.PAIR)
        self._wake_out.connect(self._wake_address)
        if before is not None:
            before(self)
        self._thread = threading.Thread(target=self._run, name="stub-engine")

    def __enter__(self) -> "StubEngine":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def do(self, work: Callable[[], None]) -> None:
        """Run ``work`` in the stub's thread."""
        self._todo.put(work)
        with self._wake_lock:
            self._wake_out.send(b"")

    def stop(self) -> None:
        """End the thread and free the sockets; raises what broke the thread."""
        if self._stop:
            return
        self._stop = True
        self.do(lambda: None)
        self._thread.join(WAIT_S)
        self._wake_out.close(linger=0)
        self.context.destroy(linger=0)
        if self._failed is not None:
            raise self._failed

    def kill(self, rank: int) -> None:
        """As SIGKILL of one rank's process."""
        done = threading.Event()
        self.do(lambda: (self.ranks[rank].close(), done.set())[1])
        done.wait(WAIT_S)

    def leave(self, rank: int, reason: str = "stopping") -> None:
        """One rank says goodbye and goes."""
        stub = self.ranks[rank]

        def go() -> None:
            stub.send(Goodbye(session=stub.session, reason=reason))
            stub.muted = True  # type: ignore[attr-defined]
            stub.script.muted = True

        self.do(go)

    def replace(self, rank: int) -> StubRank:
        """A new process for one rank of this launch: fresh, epoch + 1."""
        old = self.ranks[rank]
        new = StubRank(self, old.identity)
        new.epoch = old.epoch + 1
        new.pid = old.pid + 1
        new.script.counters = dict(old.script.counters)

        def go() -> None:
            old.close()
            self.ranks[rank] = new
            new.connect()

        self.do(go)
        return new

    def wait_for(self, what: Callable[[], bool], within_s: float = WAIT_S) -> bool:
        """Block the calling thread until ``what()`` holds; looked at after everything that the stub does."""
        with self._news:
            return self._news.wait_for(what, within_s)

    @property
    def backends(self) -> dict[int, str | None]:
        """What each rank runs."""
        return {rank: stub.state.backend for rank, stub in self.ranks.items()}

    def settled(self) -> bool:
        """No rank is inside an operation."""
        return all(s.rec.phase in (RankPhase.NONE, RankPhase.QUARANTINED) for s in self.ranks.values())

    def ended(self, rank: int) -> Ended:
        """How the last operation ended on a rank."""
        return self.ranks[rank].rec.ended

    def _run(self) -> None:
        try:
            everyone = [*self.ranks.values(), *self.frontends]
            for stub in everyone:
                stub.connect()
            while not self._stop:
                self._turn()
        except BaseException as exc:
            self._failed = exc
        finally:
            for stub in [*self.ranks.values(), *self.frontends]:
                stub.close()
            self._wake_in.close(linger=0)

    def _turn(self) -> None:
        everyone = [s for s in [*self.ranks.values(), *self.frontends] if s.socket is not None]
        until = min((stub.tick() for stub in everyone), default=time.monotonic() + 1.0)
        poller = zmq.Poller()
        poller.register(self._wake_in, zmq.POLLIN)
        for stub in everyone:
            if stub.socket is not None:
                poller.register(stub.socket, zmq.POLLIN)
        wait_s = min(max(0.0, until - time.monotonic()), 1.0)
        ready = dict(poller.poll(int(wait_s * 1000) + 1))
        if self._wake_in in ready:
            self._wake_in.recv()
            while not self._todo.empty():
                self._todo.get()()
        for stub in everyone:
            if stub.socket is not None and stub.socket in ready:
                while True:
                    try:
                        frame = stub.socket.recv(zmq.DONTWAIT)
                    except zmq.ZMQError:
                        break
                    stub.take(frame)
                    if stub.socket is None:
                        break
        with self._news:
            self._news.notify_all()
