"""Executes the rank's table (``hicache_proto.transaction.rank_step``) on one rank, with one writer.

Theory of operation
===================

Every method here runs on the scheduler thread, inside ``RankHook.run_pending`` or ``execute_injected`` (rule 8).
The agent thread posts calls and sends answers, the builder and closer threads post their results; none of them
changes anything. A *step* is one entry from outside: it feeds events to the table, applies the actions in order,
measures how long the scheduler stood still, shows a new ``View`` to the other threads, and then answers every
waiting call whose question is settled.

* PREPARE starts a builder. Its result is kept aside while what the tree lacks (hashes; with a checkpoint, pages in the
  store) is made up in slices, one per scheduler pass (``readiness``); only then BUILT is fed.
* FREEZE holds admission and tests idleness in the same step. ``drain`` tests again on every pass. FROZEN also
  means that nothing is left to make up.
* COMMIT looks at the lease and at idleness again, in the same step, and swaps one reference.
* FINALIZE opens, publishes, and hands the old set to a closing thread; publication is the last act (F14).
* A lease that ends is UNDO on this rank. ``tick`` looks at the clock itself while something is held, so that a
  dead sidecar, and a dead agent thread too, only cost the lease (F36).
* A swap back that raises leaves the rank quarantined: admission open, bypass on, neither set closed (F28).
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from hicache_hooks.adapter import EngineAdapter
from hicache_hooks.builder import Builder, Built, busy_error
from hicache_hooks.closer import Closed, Closer
from hicache_hooks.faults import Faults
from hicache_hooks.gate import Gate, operation_hold
from hicache_hooks.idle import IdleGate
from hicache_hooks.leases import Clock, Lease, checked_s
from hicache_hooks.readiness import Readiness
from hicache_hooks.sets import Sets
from hicache_hooks.verdict import Facts, View
from hicache_hooks.waiting import Outbox, Waiting
from hicache_hooks.world import Injector, WorldCommand, agreed, could_switch
from hicache_proto.errors import HicacheError, Internal, Quarantined
from hicache_proto.hooklink import Call, Commit, Finalize, Freeze, Prepare, Thaw, Undo
from hicache_proto.model import TargetState
from hicache_proto.transaction import Do, On, RankEvent, RankPhase, RankRecord, rank_step

log = logging.getLogger(__name__)

_HELD = (RankPhase.DRAINING, RankPhase.FROZEN, RankPhase.SWITCHED)


class RankTransaction:
    """The present operation of one rank."""

    def __init__(
        self,
        adapter: EngineAdapter,
        *,
        gate: Gate,
        idle: IdleGate,
        world: Injector,
        builder: Builder,
        closer: Closer,
        outbox: Outbox,
        clock: Clock,
        faults: Faults,
    ) -> None:
        self._gate = gate
        self._idle = idle
        self._world = world
        self._builder = builder
        self._out = outbox
        self._clock = clock
        self._faults = faults
        self._lease = Lease(clock)
        self.record = RankRecord()
        self.view = View()
        self._target = TargetState()
        self._ready = Readiness(adapter, idle)
        self._lease_s: dict[Do, float] = {}
        self._drain = False
        self._built: Built | None = None  # finished, being back-filled
        self._facts = Facts()
        self._waiting = Waiting(outbox)
        self._sets = Sets(adapter, closer)
        self._depth = 0

    # ------------------------------------------------------------------ entries

    def on_call(self, call: Call) -> None:
        """A transaction message. Answered now or later, exactly once."""
        with self._step(call.phase):
            self._waiting.add(call)
            try:
                self._faults.hit(call.phase, "before_apply")
                self._receive(call)
                self._faults.hit(call.phase, "after_apply")
            except Exception as error:
                self._waiting.fail(call, error)

    def on_built(self, built: Built) -> None:
        """The builder ended, or was given up. What it made after that is closed, and is no event of the table."""
        with self._step("prepare"):
            if built.late:
                self._sets.close(built.result)
            elif built.error is not None:
                self._facts.build_error[built.n] = built.error
                self._feed(On.BUILD_FAILED, built.n)
            else:
                self._built = built
                self._continue_build()

    def on_closed(self, closed: Closed) -> None:
        """An attempt to close a set ended."""
        with self._step("close"):
            self._sets.closed(closed)

    def execute(self, command: WorldCommand) -> None:
        """A command that the world's broadcast brought to this rank."""
        with self._step(command.kind):
            self._execute(command)
            self._facts.ran[command.kind] = (command.n, command.round)

    def tick(self) -> None:
        """One scheduler pass: leases, then what goes on in slices."""
        if self._lease.over:
            with self._step("lease_end"):
                self._lease_end()
        if self._built is not None:
            with self._step("prepare"):
                self._continue_build()
        if self.record.phase is RankPhase.DRAINING:
            with self._step("freeze"):
                self._test_idle()

    def abandon(self) -> None:
        """The process leaves: back to A, so that what serves until the end is what the sidecar believes."""
        with self._step("undo"):
            self._feed(On.UNDO, self.record.n)
            self._builder.cancel()

    # ------------------------------------------------------------------ for the facade

    @property
    def busy(self) -> bool:
        """True while every scheduler pass should call ``tick``: something is held or goes on in slices."""
        return self._built is not None or self.record.phase in _HELD

    @property
    def slicing(self) -> bool:
        """True while the scheduler should not sleep: the next slice can run now."""
        return (self._built is not None or self._ready.finishing) and not self._ready.waits

    @property
    def waits(self) -> bool:
        """True while a store must answer before the next slice: its completions wake the scheduler."""
        return self._ready.waits

    # ------------------------------------------------------------------ messages

    def _receive(self, call: Call) -> None:
        match call.body:
            case Prepare() as body:
                self._prepare(call, body)
            case Freeze(round=number, freeze_s=seconds, drain=drain):
                self._inject(WorldCommand("freeze", call.n, number, checked_s(seconds), drain=drain))
            case Thaw(round=number, prepared_s=seconds):
                self._inject(WorldCommand("thaw", call.n, number, checked_s(seconds)))
            case Commit(in_doubt_s=seconds):
                self._inject(WorldCommand("commit", call.n, lease_s=checked_s(seconds)))
            case Finalize():
                self._inject(WorldCommand("finalize", call.n))
            case Undo(reason=reason):
                self._inject(WorldCommand("undo", call.n, reason=reason))
            case _:
                raise Internal(f"{call.phase} is no step of the transaction")

    def _prepare(self, call: Call, body: Prepare) -> None:
        self._lease_s[Do.ARM_PREPARED] = checked_s(body.prepared_s)
        if call.n > self.record.n and self.record.phase is RankPhase.NONE:
            if self._sets.quarantine:
                raise Quarantined(self._sets.quarantine, details={"reason": "restart_required"})
            # The table's own memory counts too: a set that is built but still being back-filled has no thread any more.
            if older := self._builder.busy or self.record.builder_n:
                raise busy_error(older)
            self._ready.begin(body.target, checkpoint=body.checkpoint)
            self._target = body.target
            self._waiting.new_operation()
            self._facts = Facts()
        self._feed(On.PREPARE, call.n, hot=body.hot)

    def _inject(self, command: WorldCommand) -> None:
        """Only the leader acts on its message; the others wait for the broadcast (rule 11)."""
        if not self._world.leader or command.n < self.record.n:
            return
        if command.kind == "commit":
            command = msgspec.structs.replace(command, lease_alive=self._lease.alive)
        self._world.inject(command)

    def _execute(self, command: WorldCommand) -> None:
        n = command.n
        match command.kind:
            case "freeze":
                self._lease_s[Do.ARM_FREEZE] = command.lease_s
                self._drain = command.drain
                self._feed(On.FREEZE, n, round=command.round)
                if self.record.n == n and self.record.phase is RankPhase.DRAINING:
                    self._test_idle()
            case "thaw":
                self._lease_s[Do.ARM_PREPARED] = command.lease_s
                self._ready.thawed()
                self._feed(On.THAW, n, round=command.round)
            case "commit":
                self._commit(command)
            case "finalize":
                self._feed(On.FINALIZE, n)
                self._sets.pay_publication(self.record.revision)
            case "undo":
                if command.reason and n == self.record.n and self.record.phase is not RankPhase.NONE:
                    log.info("operation %d is undone: %s", n, command.reason)
                self._feed(On.UNDO, n)
            case "lease_end":
                self._end_by_lease(n)
            case _:
                log.error("unknown world command %r", command.kind)

    def _commit(self, command: WorldCommand) -> None:
        refusal = None if self.record.hot else self._idle.refusal()
        if self._world.ranks > 1 and not agreed(self._world, refusal is None and could_switch(self.record, command)):
            # Rule 11: a swap may enter the engine's own collectives, so nobody begins one unless all will.
            refusal = refusal or Internal(
                "another rank of this world cannot switch now", details={"reason": "world_not_ready"}
            )
        self._facts.commit_error = refusal
        self._lease_s[Do.ARM_IN_DOUBT] = command.lease_s
        before = self.record.phase
        self._feed(On.COMMIT, command.n, idle=refusal is None, lease_alive=command.lease_alive)
        if self._world.ranks == 1:
            return
        mine = self.record.n == command.n and self.record.phase is RankPhase.SWITCHED
        if not agreed(self._world, mine) and mine and before is not RankPhase.SWITCHED:
            self._feed(On.UNDO, command.n)  # rule 11: one no and all swap back in this step

    # ------------------------------------------------------------------ what goes on by itself

    def _continue_build(self) -> None:
        built = self._built
        if built is None:
            return
        if built.n == self.record.n and self.record.phase is RankPhase.PREPARING:
            reached = self._ready.reached(built.result)
            if reached is False:
                return
            if reached is not True:
                self._facts.build_error[built.n] = reached
                self._feed(On.BUILD_FAILED, built.n)
        # Fed in every case: for an operation that is over, the table answers CLOSE_BUILT (rule 9).
        self._feed(On.BUILT, built.n)
        self._built = None
        if self.record.n == built.n and self.record.phase is RankPhase.PREPARED:
            self._sets.park(built.result)

    def _test_idle(self) -> None:
        said = self._ready.refusal(self._sets.parked)
        self._facts.refusal = None if isinstance(said, bool) else said
        if said is True:
            self._feed(On.IDLE, self.record.n)
        elif said is not False and (not self._drain or said.code != "not_idle"):  # False: it goes on at the next pass
            self._ready.thawed()
            self._feed(On.BUSY, self.record.n)

    def _lease_end(self) -> None:
        n = self.record.n
        if self._world.leader and self.record.phase in _HELD:
            self._lease.disarm()  # said once; the broadcast brings it back to all ranks of the world
            self._world.inject(WorldCommand("lease_end", n))
        else:
            self._end_by_lease(n)

    def _end_by_lease(self, n: int) -> None:
        if n != self.record.n or self.record.phase in (RankPhase.NONE, RankPhase.QUARANTINED):
            return
        phase = self.record.phase
        try:
            self._faults.hit("lease_end", "before_apply")
        except Exception as error:
            log.warning("lease end: %s", error)
        log.warning("operation %d: the lease ended in phase %s; back to the old state", n, phase)
        self._feed(On.LEASE_END, n)
        self._builder.cancel()
        self._waiting.notice("lease_end", f"operation {n} in phase {phase}")

    # ------------------------------------------------------------------ the table and its actions

    def _feed(
        self, on: On, n: int, *, round: int = 0, hot: bool = False, idle: bool = False, lease_alive: bool = True
    ) -> None:
        event = RankEvent(on=on, n=n, round=round, hot=hot, idle=idle, lease_alive=lease_alive)
        self.record, actions = rank_step(self.record, event)
        for action in actions:
            if not self._apply(action):
                break
        if on is On.UNDO and self.record.n == n and self.record.phase is RankPhase.NONE:
            self._builder.cancel()

    def _apply(self, action: Do) -> bool:
        """Apply one action; False when the table was fed a failure and the rest no longer holds."""
        match action:
            case Do.BUILD:
                return self._build()
            case Do.CLOSE_BUILT:
                if self._built is not None:
                    self._sets.close(self._built.result)
            case Do.ARM_PREPARED:
                self._lease.arm(self._lease_s[action])
            case Do.ARM_FREEZE | Do.ARM_IN_DOUBT:
                self._arm_held(self._lease_s[action])
            case Do.DISARM:
                self._lease.disarm()
            case Do.HOLD:
                self._gate.hold(operation_hold(self.record.n), self._lease_s[Do.ARM_FREEZE])
            case Do.OPEN:
                self._gate.release(operation_hold(self.record.n))
            case Do.SWAP:
                return self._swap()
            case Do.SWAP_BACK:
                self._swap_back()
            case Do.DROP_NEW:
                self._sets.drop_new()
            case Do.RETIRE_OLD:
                self._sets.retire_old()
            case Do.PUBLISH:
                self._sets.owe_publication()
            case Do.BYPASS:
                self._sets.bypass()
        return True

    def _build(self) -> bool:
        try:
            self._builder.start(self.record.n, self._target)
        except HicacheError as error:
            self._facts.build_error[self.record.n] = error
            self._feed(On.BUILD_FAILED, self.record.n)
            return False
        return True

    def _arm_held(self, seconds: float) -> None:
        name = operation_hold(self.record.n)
        if self._world.leader:
            self._lease.arm(seconds)
        else:
            self._lease.disarm()  # only the leader's clock counts (rule 11)
        if name in self._gate.holds():
            self._gate.hold(name, seconds)

    def _swap(self) -> bool:
        try:
            self._sets.swap()
        except Exception as error:
            log.exception("operation %d: the swap failed", self.record.n)
            self._facts.commit_error = Internal(
                f"the swap failed: {type(error).__name__}: {error}", details={"reason": "swap_failed"}
            )
            self._feed(On.SWAP_FAILED, self.record.n)
            return False
        return True

    def _swap_back(self) -> None:
        try:
            self._sets.swap_back()
        except Exception:
            log.exception("operation %d: swapping back failed; the rank is quarantined", self.record.n)
            self._feed(On.UNDO_FAILED, self.record.n)

    # ------------------------------------------------------------------ steps and answers

    @contextmanager
    def _step(self, kind: str) -> Iterator[None]:
        if self._depth:  # an injected command of a world of one runs inside its message's step
            yield
            return
        self._depth = 1
        started = time.perf_counter_ns()
        try:
            yield
        finally:
            self._depth = 0
            if self.record.phase is RankPhase.NONE:
                self._ready.over()
            self._waiting.stood_still(kind, time.perf_counter_ns() - started)
            changed = self._show()  # before the answers: their reports are read by another thread
            if not self._waiting.settle(self.record, self._facts, self._sets) and changed:
                self._out.changed()  # an answer's report says as much as a heartbeat, which would go out beside it

    def _show(self) -> bool:
        notes = {"publish": self._sets.publish_error} if self._sets.publish_error else {}
        view = View(self.record, self._lease.deadline, self._sets.quarantine, notes)
        if changed := view != self.view:
            self.view = view
        return changed
