"""One phase's messages: a sender per participant, all cancelled together when the phase ends.

A message may be answered late (PREPARE answers when the set is built), so repeating it, which renews the rank's
lease, does not wait for the first answer.
"""

import math
from collections.abc import Callable, Iterable

import trio

from hicache_proto.hooklink import CallBody
from hicache_sidecar.engine.fanout import FanOut, RankAnswer
from hicache_sidecar.engine.registry import Registry

MAX_OUTSTANDING = 8  # unanswered repeats per rank; more would only fill a stuck rank's queue

OnResult = Callable[[RankAnswer, CallBody], None]


class Senders:
    """Sends phases' bodies for operation ``n``. ``on_result`` gets every result, in the loop's thread."""

    def __init__(
        self, nursery: trio.Nursery, fanout: FanOut, registry: Registry, n: int, deadline: float, on_result: OnResult
    ) -> None:
        self._nursery, self._fanout, self._registry = nursery, fanout, registry
        self._n, self._deadline, self._on_result = n, deadline, on_result
        self._scopes: list[trio.CancelScope] = []
        self._outstanding: dict[int, int] = {}
        self._body: CallBody | None = None
        self._repeat_s = math.inf

    def start(self, ranks: Iterable[int], body: CallBody, repeat_s: float, deadline: float | None = None) -> None:
        """End the phase before, and send ``body`` to ``ranks`` now and every ``repeat_s`` until the next phase."""
        self.stop()
        self._body, self._repeat_s = body, repeat_s
        if deadline is not None:
            self._deadline = deadline
        for rank in ranks:
            self._spawn(rank, 0.0)

    def stop(self) -> None:
        """Cancel every sender of the phase. Answers that still come are dropped and counted by the link."""
        for scope in self._scopes:
            scope.cancel()
        self._scopes = []
        self._outstanding = {}
        self._body = None

    def again(self, rank: int, after_s: float = 0.0) -> None:
        """Send the phase's body to one rank once more: it reconnected, or asked for a retry."""
        if self._body is not None:
            self._spawn(rank, after_s, once=True)

    def side(self, rank: int, body: CallBody, deadline: float) -> None:
        """A stateless message beside the phase's own, that ends with the phase."""
        self._task(self._one, rank, body, deadline, True)

    def _spawn(self, rank: int, after_s: float, *, once: bool = False) -> None:
        if self._body is not None:
            self._task(self._repeat, rank, self._body, math.inf if once else self._repeat_s, after_s)

    def _task(self, fn: Callable[..., object], *args: object) -> None:
        scope = trio.CancelScope()
        self._scopes.append(scope)
        self._nursery.start_soon(self._scoped, scope, fn, args)

    async def _scoped(self, scope: trio.CancelScope, fn: Callable[..., object], args: tuple[object, ...]) -> None:
        with scope:
            await fn(*args)  # type: ignore[misc]

    async def _repeat(self, rank: int, body: CallBody, repeat_s: float, after_s: float) -> None:
        if after_s:
            await trio.sleep(after_s)
        async with trio.open_nursery() as nursery:
            while True:
                if self._outstanding.get(rank, 0) < MAX_OUTSTANDING:
                    nursery.start_soon(self._one, rank, body, self._deadline)
                if math.isinf(repeat_s):
                    return
                await trio.sleep(repeat_s)

    async def _one(self, rank: int, body: CallBody, deadline: float, side: bool = False) -> None:
        session = self._registry.ranks.get(rank)
        if session is None or not session.alive:
            return  # the loss is an event of its own; a new session is asked again
        self._outstanding[rank] = self._outstanding.get(rank, 0) + 1
        try:
            n = 0 if side else self._n  # messages beside the phase are stateless
            result = await self._fanout.ask_one(rank, session.id, n, body, deadline)
        finally:
            self._outstanding[rank] = self._outstanding.get(rank, 1) - 1
        if side or body is self._body:  # an answer may be on its way while the phase ends
            self._on_result(result, body)
