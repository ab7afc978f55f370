"""Puts one scheduler's hook together, right after SGLang has built the scheduler and before its loop runs."""

import atexit
import logging
from typing import Any

from hicache_hooks.hook import RankHook
from hicache_hooks.sglang import drift, topology, versions
from hicache_hooks.sglang.adapter import SglangAdapter
from hicache_hooks.sglang.groups import engine_store
from hicache_hooks.sglang.held import Held
from hicache_hooks.sglang.pull import Pull
from hicache_hooks.sglang.quiet import Quiet
from hicache_hooks.sglang.refusing import RefusingAdapter
from hicache_hooks.sglang.wake import AFTERGLOW_S, Pulse, Waker
from hicache_hooks.sglang.world import BroadcastWorld
from hicache_hooks.world import WorldCommand
from hicache_proto.transaction import RankPhase

log = logging.getLogger(__name__)

SPLIT = "storage groups exist on some ranks only, an attach would hang the engine; restart the engine"


class SchedulerRank:
    """The hook of one scheduler process, with what ties it to the engine's loop."""

    def __init__(self, scheduler: Any, endpoint: str, *, engine_id: str, incarnation: str) -> None:
        """
        Raises:
            Exception: whatever this engine lacks; the caller logs it and the engine serves without hooks.
        """
        from hicache_hooks.sglang.requests import SchedulerRequests

        problems = [f"hook did not take: {target}" for target in versions.not_hooked()]
        problems += topology.refusals(scheduler)
        place = topology.identity()
        quiet = Quiet()
        self._waker = Waker(getattr(scheduler, "idle_sleeper", None), quiet.end)
        group = topology.parallel().tp_group.cpu_group if place.tp_size > 1 else None
        self.world = BroadcastWorld(leader=place.leader, ranks=place.tp_size * place.pp_size, group=group)
        controller = getattr(scheduler.tree_cache, "cache_controller", None)
        kind = RefusingAdapter if controller is None else SglangAdapter
        self.adapter = kind(scheduler, problems, self._wake)
        self.hook = RankHook(
            self.adapter,
            endpoint,
            engine_id=engine_id,
            incarnation=incarnation,
            injector=self.world,
            postpone=quiet.postpone,
            start=False,
        )
        held = Held(SchedulerRequests(scheduler))
        self.pull = Pull(
            self.hook,
            self.world,
            held,
            self._waker,
            self.adapter.storage_threads.repair,
            quiet,
        )
        self.adapter.on_dead_threads = self.pull.ask_repair
        self.adapter.held = held.__len__
        if isinstance(self.adapter, SglangAdapter):
            quarantine = self.adapter.quarantine
            groups = self.adapter.groups
            self.world.has_groups, self.world.make_groups = groups.here, groups.make
            self.world.on_split = lambda: quarantine(SPLIT)
            if self.world.ranks > 1 and not problems:
                groups.make_at_start(engine_store(), self.world.ranks)
        self.world.bind(scheduler, self._execute)
        problems += drift.install(scheduler, self.hook)
        afterglow_s = AFTERGLOW_S if self.world.ranks > 1 else 0.0
        self._pulse = Pulse(self._waker, self._wanted, afterglow_s, self._patient)
        self._pulse.start()
        self.hook.agent.start()
        atexit.register(self._close)
        log.info("hicache hooks: rank %d talks to %s", place.rank, endpoint)
        for problem in problems:
            log.error("hicache hooks: nothing can be attached: %s", problem)

    def _close(self) -> None:
        self.pull.quiet.end()  # there may be no sleep any more, and the end waits for other threads
        self.hook.close("the engine stops")

    def _wake(self) -> None:
        self._waker.wake()
        self._pulse.kick()

    def _wanted(self) -> bool:
        """True while passes must go on although the engine has nothing to do."""
        if self.world.ranks > 1 and self.hook.transaction.view.record.phase is not RankPhase.NONE:
            return True
        return self.hook.pending

    def _patient(self) -> bool:
        """True while backends are built and nothing is to be done here."""
        phase = self.hook.transaction.view.record.phase
        return phase in (RankPhase.PREPARING, RankPhase.PREPARED) and not self.hook.pending

    def _execute(self, command: WorldCommand) -> None:
        self.hook.execute_injected(command)
        self.pull.executed()
