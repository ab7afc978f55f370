"""One phase's messages: to every participant, repeated while the phase lasts, all forgotten when it ends.

A message may be answered late (PREPARE answers when the set is built), so repeating it, which renews the rank's
lease, does not wait for the first answer. Results are handed over as they come; whoever takes them asks ``current``,
since one may be on its way while the phase ends.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial

import trio

from hicache_proto.hooklink import CallBody
from hicache_sidecar.engine.fanout import FanOut, RankAnswer
from hicache_sidecar.engine.registry import Registry

MAX_OUTSTANDING = 8  # unanswered repeats per rank; more would only fill a stuck rank's queue

OnResult = Callable[[RankAnswer, CallBody], None]


class Senders:
    """Sends phases' bodies for operation ``n``. ``on_result`` gets every result, in the loop's thread; it only takes
    note, for it runs inside the link's pump."""

    def __init__(self, nursery: trio.Nursery, fanout: FanOut, registry: Registry, n: int, on_result: OnResult) -> None:
        self._nursery, self._fanout, self._registry = nursery, fanout, registry
        self._n, self._on_result = n, on_result
        self._timers: list[trio.CancelScope] = []
        self._calls: list[int] = []
        self._outstanding: Counter[int] = Counter()
        self._body: CallBody | None = None

    def start(self, ranks: Iterable[int], body: CallBody, repeat_s: float, deadline: float = math.inf) -> None:
        """End the phase before, and send ``body`` to ``ranks`` now and every ``repeat_s`` until ``deadline`` (trio
        time) or the next phase."""
        self.stop()
        self._body = body
        ranks = tuple(ranks)
        self._send(ranks, body)
        if not math.isinf(repeat_s):
            self._nursery.start_soon(self._repeat, self._timer(), ranks, body, repeat_s, deadline)

    def stop(self) -> None:
        """End the phase. Answers that still come are dropped and counted by the link."""
        for timer in self._timers:
            timer.cancel()
        self._timers = []
        self._fanout.drop(self._calls)
        self._calls = []
        self._outstanding.clear()
        self._body = None

    def current(self, body: CallBody) -> bool:
        """Whether ``body`` is the present phase's."""
        return body is self._body

    def again(self, rank: int, after_s: float = 0.0) -> None:
        """Send the phase's body to one rank once more: it reconnected, or asked for a retry."""
        if self._body is None:
            return
        if after_s:
            self._nursery.start_soon(self._later, self._timer(), rank, self._body, after_s)
        else:
            self._send((rank,), self._body)

    def side(self, rank: int, body: CallBody) -> None:
        """A stateless message beside the phase's own, forgotten with the phase. Its answer is of no interest."""
        self._post({rank: self._session(rank)}, 0, body, lambda _result: None)

    # ---- inner

    def _timer(self) -> trio.CancelScope:
        scope = trio.CancelScope()
        self._timers.append(scope)
        return scope

    def _send(self, ranks: Iterable[int], body: CallBody) -> None:
        free = {rank: self._session(rank) for rank in ranks if self._outstanding[rank] < MAX_OUTSTANDING}
        self._outstanding.update(rank for rank, session in free.items() if session)
        self._post(free, self._n, body, partial(self._ended, body))

    def _post(self, sessions: dict[int, str], n: int, body: CallBody, ended: Callable[[RankAnswer], None]) -> None:
        # A rank that is not there is a loss, an event of its own; a new session is asked again.
        here = {rank: session for rank, session in sessions.items() if session}
        self._calls += self._fanout.post(here, n, body, ended)

    def _session(self, rank: int) -> str:
        session = self._registry.ranks.get(rank)
        return session.id if session is not None and session.alive else ""

    def _ended(self, body: CallBody, result: RankAnswer) -> None:
        if body is self._body:
            self._outstanding[result.rank] -= 1
            self._on_result(result, body)

    async def _repeat(
        self, scope: trio.CancelScope, ranks: tuple[int, ...], body: CallBody, repeat_s: float, deadline: float
    ) -> None:
        with scope:
            while trio.current_time() + repeat_s < deadline:
                await trio.sleep(repeat_s)
                self._send(ranks, body)

    async def _later(self, scope: trio.CancelScope, rank: int, body: CallBody, after_s: float) -> None:
        with scope:
            await trio.sleep(after_s)
            self._send((rank,), body)
