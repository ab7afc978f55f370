"""Keeps the processes that answer the engine's own HTTP API in step with what its ranks run.

They hold no state of ours. What they should show follows from the ranks' reports alone: whenever all expected ranks
agree and no operation runs, a frontend that has not acknowledged that view is told it. So it does not matter who
changed the ranks, or who was restarted: an operation, the engine's own admin call on some of the ranks, the sidecar,
the engine, or the frontend.
"""

import math

import trio

from hicache_proto.hooklink import SetView
from hicache_proto.model import TargetState
from hicache_sidecar.core.redaction import redact_config
from hicache_sidecar.engine.context import Context

RETRY_S = 2.0  # after a frontend that did not take its view


class Frontends:
    """One daemon's frontends. ``run`` is a task."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._told: dict[str, TargetState] = {}  # by session: what it acknowledged
        self._not_before: dict[str, float] = {}  # by session that did not take its view: when to ask again

    async def run(self) -> None:
        """Until cancelled."""
        registry = self._ctx.registry
        while True:
            while await self._tell():  # reports may have changed meanwhile
                pass
            if (job := self._ctx.running) is not None:
                await job.done.wait()  # an operation's many reports are no news until it ended
                continue
            with trio.move_on_at(min(self._not_before.values(), default=math.inf)):
                await registry.changed.park()

    def view(self) -> TargetState | None:
        """What the ranks agree on; None while they do not, some are missing, or an operation moves them."""
        registry = self._ctx.registry
        if self._ctx.running is not None or not registry.complete:
            return None
        views = {
            (s.report.state.backend, s.report.state.extra_config, s.report.state.prefetch_policy,
             s.report.state.write_policy)
            for s in registry.live.values()
        }  # fmt: skip
        if len(views) != 1:
            return None
        backend, config, prefetch, write = views.pop()
        return TargetState(
            backend=backend, extra_config=redact_config(config), prefetch_policy=prefetch, write_policy=write
        )

    async def _tell(self) -> bool:
        """Tell those that are behind; False when there was nobody to tell."""
        view, now = self.view(), trio.current_time()
        frontends = self._ctx.registry.frontends
        self._told = {session: told for session, told in self._told.items() if session in frontends}
        self._not_before = {s: at for s, at in self._not_before.items() if s in frontends and at > now}
        behind = [
            s.id for s in frontends.values()
            if s.alive and self._told.get(s.id) != view and s.id not in self._not_before
        ]  # fmt: skip
        if view is None or not behind:
            return False
        deadline = now + self._ctx.settings.call_s
        results = await self._ctx.fanout.ask(dict(enumerate(behind)), 0, SetView(target=view), deadline)
        for result in results.values():
            if result.ok:
                self._told[result.session] = view
            else:
                self._not_before[result.session] = trio.current_time() + RETRY_S
        return True
