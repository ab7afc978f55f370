"""A stateless question that outlives a cut link: a rank that is back within its grace is asked again.

A transaction's own phases do this in ``senders``; here there is nothing to resume, so the question is just repeated.
Only the same process is asked again: what another one would answer belongs to another state.
"""

from collections.abc import Mapping

import trio

from hicache_proto.hooklink import CallBody
from hicache_sidecar.engine.context import Context
from hicache_sidecar.engine.fanout import RankAnswer
from hicache_sidecar.engine.registry import Session


async def ask_within_grace(
    ctx: Context, sessions: Mapping[int, str], body: CallBody, deadline: float
) -> dict[int, RankAnswer]:
    """Ask every rank of ``sessions``; ``deadline`` is trio's clock. A rank whose link was cut has ``reconnect_grace_s``
    to be back, as everywhere, and not longer than the registry knows it.

    Returns:
        One result per rank, in rank order.
    """
    registry = ctx.registry
    asked = {rank: _process(registry.ranks[rank]) for rank in sessions if rank in registry.ranks}
    answers = await ctx.fanout.ask(sessions, 0, body, deadline)

    def here() -> dict[int, str]:
        """Ranks whose link was cut, and which are connected as the same process: rank -> session."""
        cut = {rank: registry.live.get(rank) for rank, told in answers.items() if told.lost}
        return {rank: s.id for rank, s in cut.items() if s is not None and _process(s) == asked.get(rank)}

    give_up = min(deadline, trio.current_time() + ctx.settings.reconnect_grace_s)
    while (again := here()) and trio.current_time() < give_up:
        if all(answers[rank].session == session for rank, session in again.items()):
            with trio.move_on_at(give_up):  # not back yet: its hello, its heartbeat or its loss is news
                await registry.changed.park()
        answers |= await ctx.fanout.ask(here(), 0, body, deadline)
    return answers


def _process(session: Session) -> tuple[int, int, str]:
    return session.hello.pid, session.hello.epoch, session.hello.incarnation
