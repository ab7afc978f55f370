"""What runs at the engine's pull: once per loop iteration of every rank, before the broadcast.

The only place where the hooks' scheduler-thread work happens by itself. A spinning scheduler comes here some
thousand times a second, so ``on_pull`` first tests three attributes: nothing pending, nothing closed or held, no
wake-up to forget (one that stays readable in the engine's poller makes a sleeping scheduler spin). It runs while the
engine is paused too, where its idle hook does not.
"""

import logging
from collections.abc import Callable
from typing import Any

from hicache_hooks.hook import RankHook
from hicache_hooks.sglang.held import Held
from hicache_hooks.sglang.switch_interval import SwitchInterval
from hicache_hooks.sglang.wake import Waker
from hicache_hooks.sglang.world import BroadcastWorld
from hicache_proto.transaction import RankPhase

log = logging.getLogger(__name__)


class Pull:
    """One rank's part of the loop. Scheduler thread, but ``ask_repair``."""

    __slots__ = ("_held", "_interval", "_leader", "_repair", "_repair_asked", "_world", "closed", "hook", "waker")

    def __init__(
        self, hook: RankHook, world: BroadcastWorld, held: Held, waker: Waker, repair: Callable[[], object]
    ) -> None:
        """``repair`` brings dead storage threads back."""
        self.hook = hook
        self.closed = False  # admission is closed, or something is held; follows at each pull that did something
        self._world = world
        self._held = held
        self.waker = waker
        self._repair = repair
        self._repair_asked = False
        self._leader = world.leader
        self._interval = SwitchInterval()

    def ask_repair(self) -> None:
        """*any thread*: run ``repair`` at the next pull."""
        self._repair_asked = True
        self.hook.pending = True
        self.waker.wake()

    def __call__(self, requests: list[Any] | None) -> list[Any] | None:
        """``requests`` as pulled (None on ranks that do not pull); returns what the engine goes on with.

        None keeps what was pulled.
        """
        try:
            return self._work(requests)
        except Exception:
            log.exception("the hooks failed at the pull; the engine goes on with what it pulled")
            return None

    def _work(self, requests: list[Any] | None) -> list[Any] | None:
        hook = self.hook
        self.waker.clear()
        if hook.pending:
            hook.run_pending()
        self._interval.follow(hook.transaction.record.phase is RankPhase.PREPARING)
        if self._repair_asked:
            self._repair_asked = False
            self._repair()
        if not self._leader or requests is None:
            return None
        if hook.admit():
            if self._held:
                requests = [*self._held.release(), *requests]
        else:
            requests = self._held.hold(requests)
        self.closed = not hook.gate.is_open or bool(self._held)
        if self._world.waiting:
            requests = [*requests, *self._world.take()]
        if hook.transaction.slicing:
            self.waker.wake()  # the next slice belongs to the next pass: no sleep in between
        return requests

    def executed(self) -> None:
        """A command of the world ran: the next pull must come soon (answers, and requests that are free now)."""
        self.waker.wake()


_pull: Pull | None = None  # of this process's scheduler


def install(pull: Pull | None) -> None:
    """From now on ``on_pull`` is ``pull``."""
    global _pull
    _pull = pull


def on_pull(requests: list[Any] | None, *_args: Any) -> list[Any] | None:
    """AFTER hook of the engine's pull. None keeps what was pulled."""
    if _pull is None or not (_pull.hook.pending or _pull.closed or _pull.waker.signalled):
        return None
    return _pull(requests)
