"""What runs at the engine's pull: once per loop iteration of every rank, before the broadcast.

The only place where the hooks' scheduler-thread work happens by itself. A spinning scheduler comes here some
thousand times a second, so ``on_pull`` first tests a few attributes: nothing pending, nothing closed or held, no
wake-up to forget (one that stays readable in the engine's poller makes a sleeping scheduler spin), no sleep before,
nothing kept (``quiet``). It runs while the engine is paused too, where its idle hook does not.
"""

import logging
from collections.abc import Callable
from typing import Any

from hicache_hooks.hook import RankHook
from hicache_hooks.sglang.held import Held
from hicache_hooks.sglang.quiet import Quiet
from hicache_hooks.sglang.switch_interval import SwitchInterval
from hicache_hooks.sglang.wake import Waker
from hicache_hooks.sglang.world import BroadcastWorld
from hicache_proto.transaction import RankPhase

log = logging.getLogger(__name__)


class Pull:
    """One rank's part of the loop. Scheduler thread, but ``ask_repair``."""

    __slots__ = (
        "_held",
        "_interval",
        "_leader",
        "_repair",
        "_repair_asked",
        "_world",
        "closed",
        "hook",
        "quiet",
        "waker",
    )  # fmt: skip

    def __init__(
        self,
        hook: RankHook,
        world: BroadcastWorld,
        held: Held,
        waker: Waker,
        repair: Callable[[], object],
        quiet: Quiet | None = None,
    ) -> None:
        """``repair`` brings dead storage threads back. ``quiet``: the hook's ``postpone``, and ended by ``waker``."""
        self.hook = hook
        self.quiet = quiet or Quiet()
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
        self.quiet.end()
        if self.waker.slept and not requests:
            self.quiet.begin()
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
                self.quiet.end()  # this pass has work
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
        """A command of the world ran: the next pull must come soon where another rank waits for it, or requests that
        are free now. Alone, this rank has answered already; what goes on by itself (a drain) has the pulse."""
        if self._world.ranks > 1 or self._held:
            self.waker.wake()


_pull: Pull | None = None  # of this process's scheduler


def install(pull: Pull | None) -> None:
    """From now on ``on_pull`` is ``pull``."""
    global _pull
    _pull = pull


def on_pull(requests: list[Any] | None, *_args: Any) -> list[Any] | None:
    """AFTER hook of the engine's pull. None keeps what was pulled."""
    pull = _pull
    if pull is None:
        return None
    waker = pull.waker
    if not (pull.hook.pending or pull.closed or waker.signalled or waker.slept or pull.quiet.on):
        return None
    return pull(requests)
