"""One question to many ranks, one absolute deadline, one result per rank, each handed on as it arrives.

A slow rank delays nobody: results go to ``on_result`` at once. Threads of thought per rank are trio tasks; 256 of
them cost less than one fsync.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import trio

from hicache_proto.errors import HicacheError, from_body
from hicache_proto.hooklink import Answer, CallBody
from hicache_sidecar.engine.link import SessionLost


class Caller(Protocol):
    """The link's calling side."""

    async def call(self, session: str, n: int, body: CallBody, deadline: float) -> Answer:
        """See ``HookLink.call``."""


@dataclass(frozen=True)
class RankAnswer:
    """What became of the question to one rank: exactly one of the four."""

    rank: int
    session: str
    answer: Answer | None = None
    error: HicacheError | None = None  # the rank said no; ``answer`` then has its report as well
    lost: str = ""  # why the rank is gone
    timeout: bool = False

    @property
    def ok(self) -> bool:
        """The rank answered, and did not say no."""
        return self.answer is not None and self.error is None

    @property
    def message(self) -> str:
        """One clause for joined messages: ``rank 3: no reply``."""
        if self.error is not None:
            return f"rank {self.rank}: {self.error.message}"
        if self.lost:
            return f"rank {self.rank} lost: {self.lost}"
        if self.timeout:
            return f"rank {self.rank}: no reply"
        return f"rank {self.rank}: ok"


class FanOut:
    """Asks sessions over a link."""

    def __init__(self, link: Caller) -> None:
        self._link = link

    async def ask_one(self, rank: int, session: str, n: int, body: CallBody, deadline: float) -> RankAnswer:
        """Ask one rank; never raises for what the rank does."""
        try:
            answer = await self._link.call(session, n, body, deadline)
        except trio.TooSlowError:
            return RankAnswer(rank, session, timeout=True)
        except SessionLost as exc:
            return RankAnswer(rank, session, lost=str(exc))
        error = None
        if answer.error is not None:
            error = from_body(answer.error)
        elif not answer.ok:
            error = HicacheError("refused without a reason")
        return RankAnswer(rank, session, answer=answer, error=error)

    async def ask(
        self,
        sessions: Mapping[int, str],
        n: int,
        body: CallBody,
        deadline: float,
        on_result: Callable[[RankAnswer], None] | None = None,
    ) -> dict[int, RankAnswer]:
        """Ask every rank of ``sessions`` (rank -> session id) and wait for all results.

        Args:
            deadline: absolute trio time, the same for all.
            on_result: called with each result as it arrives.

        Returns:
            One result per rank, in rank order.
        """
        results: dict[int, RankAnswer] = {}

        async def one(rank: int, session: str) -> None:
            result = await self.ask_one(rank, session, n, body, deadline)
            results[rank] = result
            if on_result is not None:
                on_result(result)

        async with trio.open_nursery() as nursery:
            for rank, session in sessions.items():
                nursery.start_soon(one, rank, session)
        return dict(sorted(results.items()))
