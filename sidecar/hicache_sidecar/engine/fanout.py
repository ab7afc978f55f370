"""One question to many ranks, one absolute deadline, one result per rank, each handed on as it arrives.

A slow rank delays nobody: results go to ``on_result`` at once. There is no task per rank: a call's end is a
callback, so that 256 ranks cost their messages and little else.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import trio

from hicache_proto.errors import HicacheError, from_body
from hicache_proto.hooklink import Answer, CallBody
from hicache_sidecar.engine.link import OnEnd, SessionLost


class Caller(Protocol):
    """The link's calling side; see ``HookLink``."""

    def post(self, session: str, n: int, body: CallBody, ended: OnEnd) -> int: ...

    def drop(self, call: int) -> None: ...

    def burst(self) -> AbstractContextManager[None]: ...


@dataclass(frozen=True, slots=True)
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


OnResult = Callable[[RankAnswer], None]


class FanOut:
    """Asks sessions over a link."""

    def __init__(self, link: Caller) -> None:
        self._link = link

    def post(self, sessions: Mapping[int, str], n: int, body: CallBody, on_result: OnResult) -> list[int]:
        """Ask every rank of ``sessions`` (rank -> session id) and return at once, with the calls for ``drop``.

        ``on_result`` is called once per rank, in the loop's thread, unless the call is dropped first; at once for a
        rank that cannot be reached. It must not raise.
        """
        calls: list[int] = []
        with self._link.burst():
            for rank, session in sessions.items():
                try:
                    calls.append(self._link.post(session, n, body, partial(_ended, rank, session, on_result)))
                except SessionLost as exc:
                    on_result(RankAnswer(rank, session, lost=str(exc)))
        return calls

    def drop(self, calls: Iterable[int]) -> None:
        """Nobody waits for these any more."""
        for call in calls:
            self._link.drop(call)

    async def ask_one(self, rank: int, session: str, n: int, body: CallBody, deadline: float) -> RankAnswer:
        """Ask one rank; never raises for what the rank does."""
        return (await self.ask({rank: session}, n, body, deadline))[rank]

    async def ask(
        self,
        sessions: Mapping[int, str],
        n: int,
        body: CallBody,
        deadline: float,
        on_result: OnResult | None = None,
    ) -> dict[int, RankAnswer]:
        """Ask every rank of ``sessions`` and wait for all results.

        Args:
            deadline: absolute trio time, the same for all.
            on_result: called with each result as it arrives.

        Returns:
            One result per rank, in rank order.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        results: dict[int, RankAnswer] = {}
        done = trio.Event()

        def take(result: RankAnswer) -> None:
            results[result.rank] = result
            if on_result is not None:
                on_result(result)
            if len(results) == len(sessions):
                done.set()

        calls = self.post(sessions, n, body, take)
        try:
            with trio.move_on_at(deadline):
                if sessions:
                    await done.wait()
        finally:
            self.drop(calls)
        for rank, session in sessions.items():
            if rank not in results:
                take(RankAnswer(rank, session, timeout=True))
        return dict(sorted(results.items()))


def _ended(rank: int, session: str, on_result: OnResult, answer: Answer | None, why: str) -> None:
    if answer is None:
        on_result(RankAnswer(rank, session, lost=why))
        return
    error = None
    if answer.error is not None:
        error = from_body(answer.error)
    elif not answer.ok:
        error = HicacheError("refused without a reason")
    on_result(RankAnswer(rank, session, answer=answer, error=error))
