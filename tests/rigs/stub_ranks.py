"""A stub rank: the rank's table of ``hicache_proto.transaction``, answering as the table in ``hooklink`` says.

It has no cache and no scheduler; its script (``stub_link.Script``) makes it late, silent, failing or lying.
"""

import time

import msgspec
from tests.rigs.stub_link import NEVER, StubLink
from tests.rigs.stub_state import BACKENDS, effective, plan

from hicache_proto.errors import (
    HicacheError,
    Internal,
    NotIdle,
    PrepareFailed,
    Quarantined,
)
from hicache_proto.hooklink import (
    AskReport,
    Bypass,
    Call,
    ClearNamespace,
    Commit,
    Describe,
    Finalize,
    Freeze,
    Hold,
    Notice,
    Prepare,
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
)
from hicache_proto.model import (
    Blocker,
)
from hicache_proto.transaction import Do, On, RankEvent, RankPhase, Said, rank_step, said


class StubRank(StubLink):
    """One rank. Everything but ``set``, ``log`` and reads of attributes belongs to the engine's thread."""

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
            case Call() if message.session == self.session and message.phase in self.script.silent:
                self.ignored.append(message.phase)
            case Call() if message.session == self.session:
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

    def _validate(self, call: Call, body: Validate) -> None:
        if self.script.validate_error is not None:
            self.answer(call, self.script.validate_error)
            return
        try:
            new = effective(self.state, body.target)
        except HicacheError as exc:
            self.answer(call, exc)
            return
        self.answer(call, plan=plan(self.state, new))

    # ---- the transaction

    def _operation(self, call: Call) -> None:
        body, n = call.body, call.n
        match body:
            case Prepare():
                self._leases["prepared"] = body.prepared_s
                if n > self.rec.n and self.rec.phase is RankPhase.NONE and not self.rec.builder_n:
                    self._target, self._error = body.target, None
                    self.checkpoints.append(body.checkpoint)
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
            self.answer(call, self.script.freeze_error or self._not_idle())
        else:
            self.answer(call, Internal(f"not frozen: {what}", details={"reason": "not_frozen"}))

    def _look_idle(self) -> None:
        if self.rec.phase is RankPhase.DRAINING:
            if self.script.freeze_error is not None:
                self.feed(RankEvent(On.BUSY, self.rec.n))
            elif not self.busy():
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
            case Do.DROP_NEW | Do.RETIRE_OLD | Do.CLOSE_BUILT:
                self.stuck = "threads_stuck: prefetch_io"
            case Do.PUBLISH:
                pass
        return True

    def _built(self, n: int) -> None:
        error = self.script.build_error
        if self._target is not None and self.script.sick.get(self._target.backend or "") == "open":
            error = error or PrepareFailed("the store is down", details={"reason": "canary_write_failed"})
        if error is None and self._target is not None and self.rec.n == n:
            self.new = effective(self.state, self._target)
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
