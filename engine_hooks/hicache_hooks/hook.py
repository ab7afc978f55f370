"""The facade: all that an engine's scheduler loop touches of the hooks.

How a scheduler uses it
=======================

::

    hook = RankHook(adapter, "ipc:///run/hicache-sidecar/hooks.sock", engine_id="e1", incarnation=launch_id)
    while serving:
        if hook.pending:                   # one attribute test per pass (under 200 ns when idle)
            hook.run_pending()
        for request in receive():          # receive must not sleep longer than hook.sleep_s() says
            if hook.gate.is_open: queue.append(request)
            else:                 held.append(request)     # a list in front of the queues: no blocker
        if held and hook.admit():          # also looks at the leases: a hold never outlives its lease
            queue.extend(held); held.clear()
        ...
        if nothing_to_do:
            hook.note_idle()
            wait_for_request_or_wake(timeout=hook.sleep_s(default))

``adapter.wake()`` must end that wait. Everything here is caught and logged; nothing raises into, or blocks, the
scheduler. An engine without a sidecar is served by the same code: the agent keeps trying to connect.
"""

import logging
import os
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hicache_hooks.adapter import EngineAdapter
from hicache_hooks.agent import LinkAgent
from hicache_hooks.builder import Builder, Built
from hicache_hooks.closer import CLOSE_S, Closed, Closer
from hicache_hooks.faults import Faults
from hicache_hooks.gate import Gate
from hicache_hooks.helpers import Helpers, Postpone, never
from hicache_hooks.idle import IdleGate
from hicache_hooks.leases import Clock, monotonic
from hicache_hooks.manual import Manual
from hicache_hooks.queries import Queries
from hicache_hooks.report import Reporter
from hicache_hooks.transaction import RankTransaction
from hicache_hooks.world import Alone, Injector, WorldCommand
from hicache_proto.errors import HicacheError, Internal
from hicache_proto.hooklink import Call, Commit, Finalize, Freeze, Prepare, RankHello, Thaw, Undo
from hicache_proto.model import RankReport
from hicache_proto.transaction import RankPhase
from hicache_proto.version import PROTOCOL_VERSION

if TYPE_CHECKING:
    import zmq

log = logging.getLogger(__name__)

BUSY_SLEEP_S = 0.02  # longest sleep while idleness is waited for: background transfers end without a request
TRANSACTION = (Prepare, Freeze, Thaw, Commit, Finalize, Undo)

Item = Call | Built | Closed


class RankHook:
    """The hook of one scheduler process."""

    __slots__ = (
        "__weakref__",
        "_adapter",
        "_clock",
        "_close_timeout_s",
        "_closed",
        "_closer",
        "_engine_id",
        "_epoch",
        "_helpers",
        "_inbox",
        "_incarnation",
        "_manual",
        "_queries",
        "_reporter",
        "agent",
        "faults",
        "gate",
        "idle",
        "pending",
        "transaction",
    )  # fmt: skip

    def __init__(
        self,
        adapter: EngineAdapter,
        endpoint: str,
        *,
        engine_id: str,
        incarnation: str,
        epoch: int = 0,
        injector: Injector | None = None,
        clock: Clock = monotonic,
        close_timeout_s: float = CLOSE_S,
        faults: Faults | None = None,
        context: "zmq.Context[zmq.Socket[bytes]] | None" = None,
        postpone: Postpone = never,
        start: bool = True,
    ) -> None:
        """Args:
        endpoint: the sidecar's ``hooks.sock`` (the environment's HICACHE_SIDECAR).
        incarnation: one engine launch; epoch: how often this rank was started in it.
        injector: the engine's control broadcast; None for a world of one rank.
        close_timeout_s: one deadline for all threads of a set that is closed.
        postpone: may keep wake-ups of this hook's other threads for a moment (``helpers.Postpone``).
        context: a ZMQ context to share; start=False: no agent thread (tests feed ``deliver`` themselves).

        Raises:
            ValueError: HICACHE_FAULTS does not parse. RuntimeError: no thread can be had.
        """
        self.pending: bool = False
        self.faults = Faults.from_env() if faults is None else faults
        self.gate = Gate(clock)
        self.idle = IdleGate(adapter)
        self._adapter = adapter
        self._clock = clock
        self._engine_id = engine_id
        self._incarnation = incarnation
        self._epoch = epoch
        self._closed = False
        self._close_timeout_s = close_timeout_s
        self._inbox: deque[Item] = deque()
        self._manual = Manual(self.gate, self.idle, clock)
        self.agent = LinkAgent(
            endpoint,
            hello=self._hello,
            report=self.report,
            on_call=self.deliver,
            deadline=self._deadline,
            on_deadline=self._nudge,
            clock=clock,
            faults=self.faults,
            context=context,
            postpone=postpone,
        )
        self._helpers = Helpers(self.agent.run_soon, postpone=postpone)
        self._closer = Closer(adapter, self._post, self.faults, close_timeout_s, self._helpers)
        world = injector or Alone()
        self.transaction = RankTransaction(
            adapter,
            gate=self.gate,
            idle=self.idle,
            world=world,
            builder=Builder(adapter, self._post, self.faults, self._helpers),
            closer=self._closer,
            outbox=self.agent,
            clock=clock,
            faults=self.faults,
        )
        if isinstance(world, Alone):
            world.bind(self.transaction.execute)
        self._reporter = Reporter(adapter, self.gate, lambda: self.transaction.view, clock)
        self._queries = Queries(adapter, self.agent, self._helpers)
        _hooks.add(self)
        if start:
            self.agent.start()

    # ------------------------------------------------------------------ scheduler thread

    def run_pending(self) -> None:
        """Do what is due. Call it whenever ``pending`` is True; it returns within the work of one step."""
        self.pending = False  # before the inbox is read: what comes now sets it again
        if self._closed:
            return
        self._guarded_tick()
        while self._inbox:
            try:
                item = self._inbox.popleft()
            except IndexError:
                break
            self._handle(item)
        if self._watch_fulfilled():
            self.agent.notice("idle")
        if self.transaction.busy or self._manual.watching:
            self.pending = True

    def admit(self) -> bool:
        """True when new requests may enter the engine's queues. Looks at the leases when it is closed."""
        if not self.gate.is_open:
            self._guarded_tick()
        return self.gate.is_open

    def note_idle(self) -> None:
        """The scheduler has nothing to do right now: the moment that a drain or a watch waits for."""
        if self.pending:
            self.run_pending()

    def sleep_s(self, default: float | None = None) -> float | None:
        """Longest time in seconds that the scheduler may sleep; ``default`` when nothing is due here."""
        if self._inbox or self.transaction.slicing:
            return 0.0
        limits = [] if default is None else [default]
        if self.transaction.record.phase is RankPhase.DRAINING or self._manual.watching or self.transaction.waits:
            limits.append(BUSY_SLEEP_S)
        deadline = self._deadline()
        if deadline is not None:
            limits.append(max(0.0, deadline - self._clock()))
        return min(limits, default=None)

    def execute_injected(self, command: WorldCommand) -> None:
        """The engine's broadcast brought ``command`` to this rank. Never raises."""
        try:
            self.transaction.execute(command)
        except Exception:
            log.exception("world command %s of operation %d failed", command.kind, command.n)
        self.pending = True

    def note_drift(self, detail: str) -> None:
        """The engine's own admin call changed storage behind our back: say so. Any thread."""
        self.agent.notice("drift", detail)

    def close(self, reason: str = "", timeout_s: float = 2.0, leave: Callable[[], Sequence[str]] = lambda: ()) -> None:
        """The process leaves: undo what is open, ``leave``, say goodbye, end the threads. Idempotent; never raises.

        Waits at most about ``timeout_s`` for the agent and for each set that is being closed. ``leave`` lets storage go
        and names threads that did not stop, which is told before the goodbye: ``unclean_detach`` (F72).
        """
        if self._closed or self not in _hooks:
            return
        try:
            self.transaction.abandon()
        except Exception:
            log.exception("undo at exit failed")
        self._closed = True  # from here on the builder's results are closed where they come in
        self.pending = False
        for item in list(self._inbox):
            self._dispose(item)
        self._leave(leave)
        self.agent.stop(reason, timeout_s)
        self._closer.stop(timeout_s)
        self._helpers.stop(timeout_s)
        _hooks.discard(self)

    # ------------------------------------------------------------------ any thread

    def report(self) -> RankReport:
        """What this rank says about itself now."""
        return self._reporter.report()

    def deliver(self, call: Call) -> None:
        """A call of the present session (agent thread, or a test): answer it, or leave it to the scheduler."""
        if not self._queries.take(call):
            self._post(call)

    # ------------------------------------------------------------------ inner

    def _leave(self, leave: Callable[[], Sequence[str]]) -> None:
        try:
            stuck = ", ".join(leave())
        except Exception as error:
            log.exception("storage could not be let go")
            stuck = type(error).__name__
        if stuck:
            self.agent.notice("unclean_detach", stuck)

    def _post(self, item: Item) -> None:
        if self._closed:
            self._dispose(item)
            return
        self._inbox.append(item)
        self._nudge()

    def _nudge(self) -> None:
        self.pending = True  # before the wake: a scheduler that wakes up sees it
        try:
            self._adapter.wake()
        except Exception:
            log.exception("the scheduler could not be woken")

    def _dispose(self, item: Item) -> None:
        """Give back what nobody will take any more (rule 9)."""
        if isinstance(item, Built) and item.error is None:
            try:
                self._adapter.close(item.result, self._close_timeout_s)
            except Exception:
                log.exception("closing a late storage set failed")

    def _handle(self, item: Item) -> None:
        try:
            if isinstance(item, Built):
                self.transaction.on_built(item)
            elif isinstance(item, Closed):
                self.transaction.on_closed(item)
            elif isinstance(item.body, TRANSACTION):
                self.transaction.on_call(item)
            else:
                self._manual_call(item)
        except Exception:
            log.exception("step failed: %s", type(item).__name__)

    def _manual_call(self, call: Call) -> None:
        try:
            data = self._manual.on_call(call)
        except HicacheError as error:
            self.agent.answer(call, ok=False, error=error)
        except Exception as error:
            self.agent.answer(call, ok=False, error=Internal(f"{type(error).__name__}: {error}"))
        else:
            self.agent.answer(call, ok=True, data=data)
            self.agent.changed()

    def _guarded_tick(self) -> None:
        try:
            self.transaction.tick()
            for name in self.gate.expire():
                log.warning("hold %s ended by its lease", name)
                self.agent.notice("lease_end", f"hold {name}")
                self.agent.changed()
        except Exception:
            log.exception("a scheduler pass failed")

    def _watch_fulfilled(self) -> bool:
        try:
            return self._manual.idle_seen()
        except Exception:
            log.exception("the idle watch failed")
            return False

    def _deadline(self) -> float | None:
        lease, hold = self.transaction.view.lease_deadline, self.gate.deadline
        if lease is None or hold is None:
            return hold if lease is None else lease
        return min(lease, hold)

    def _hello(self, session: str) -> RankHello:
        return RankHello(
            protocol=PROTOCOL_VERSION,
            engine_id=self._engine_id,
            session=session,
            role="rank",
            identity=self._adapter.identity(),
            pid=os.getpid(),
            incarnation=self._incarnation,
            epoch=self._epoch,
            capabilities=self._adapter.capabilities(),
            report=self.report(),
        )


_hooks: "weakref.WeakSet[RankHook]" = weakref.WeakSet()


def _after_fork_in_child() -> None:
    """A forked child has no agent, no builder and no socket of its own: its hooks are inert, admission open."""
    for hook in list(_hooks):
        hook.pending = False
        hook._closed = True
        hook.gate = Gate(hook._clock)
    _hooks.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
