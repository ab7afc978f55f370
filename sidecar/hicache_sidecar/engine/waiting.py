"""What an operation waits with: an idle moment, what blocks it, a time.

The strict wait finds a moment at which every participant is idle, without polling (failures.md F5, F11). Each busy
rank is asked once for a notice at its next idle moment. When the last reports of all participants are idle, one
freeze is tried; whoever got busy meanwhile refuses it, and the wait goes on with a growing pause, so that a fleet
that is never idle together is not frozen again and again.
"""

import math
from collections.abc import Callable, Iterable, Mapping

import msgspec
import trio

from hicache_proto.hooklink import WatchIdle
from hicache_proto.model import Blocker, IdleReport
from hicache_sidecar.engine import idle
from hicache_sidecar.engine.registry import Registry, Session
from hicache_sidecar.engine.senders import Senders

REFREEZE_MIN_S = 0.02  # pause after a freeze that met a busy rank; doubles
REFREEZE_MAX_S = 0.5


class IdleWatch:
    """Watches ``ranks`` while ``active``; calls ``on_idle`` when all were idle at once."""

    def __init__(
        self, nursery: trio.Nursery, registry: Registry, ranks: Iterable[int], on_idle: Callable[[], None]
    ) -> None:
        self._nursery, self._registry, self._ranks, self._on_idle = nursery, registry, tuple(ranks), on_idle
        self._senders: Senders | None = None
        self._until = math.inf
        self._asked: set[int] = set()
        self._tried_at = -math.inf
        self._pause_s = REFREEZE_MIN_S
        self._pending = False

    def begin(self, senders: Senders, until: float) -> None:
        """Ask every rank; ``until`` is absolute."""
        self._senders, self._until = senders, until
        self._asked.clear()
        for rank in self._ranks:
            self._ask(rank)
        self._check()

    def end(self) -> None:
        """The wait is over, or a freeze is being tried."""
        self._senders = None

    def saw(self, session: Session) -> None:
        """A participant's report arrived."""
        if self._senders is None:
            return
        if idle.is_idle(session.report.idle):
            self._asked.discard(session.rank)
            self._check()
        else:
            self._ask(session.rank)

    def _ask(self, rank: int) -> None:
        for_s = self._until - trio.current_time()
        if self._senders is not None and for_s > 0 and rank not in self._asked:
            self._asked.add(rank)
            self._senders.side(rank, WatchIdle(for_s=for_s))

    def _check(self) -> None:
        sessions = [self._registry.ranks.get(rank) for rank in self._ranks]
        if self._senders is None or not all(s and s.alive and idle.is_idle(s.report.idle) for s in sessions):
            return
        earliest = self._tried_at + self._pause_s
        if trio.current_time() >= earliest:
            self._tried_at = trio.current_time()
            self._pause_s = min(self._pause_s * 2, REFREEZE_MAX_S)
            self.end()
            self._on_idle()
        elif not self._pending:
            self._pending = True
            self._nursery.start_soon(self._later, earliest)

    async def _later(self, at: float) -> None:
        await trio.sleep_until(at)
        self._pending = False
        self._check()


class Stalls:
    """Tells "no progress" from "slow progress" (F4): a transfer or queue of which nothing ends stands still."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, str], tuple[Blocker, float]] = {}  # and when something of it last ended

    def judge(self, reports: Mapping[int, IdleReport], now: float) -> list[Blocker]:
        """The blockers of these reports, with ``still_s``. Call it as reports come."""
        blockers = idle.blockers(reports)
        judged = {}
        for blocker in blockers:
            key = (blocker.rank, blocker.name)
            before, since = self._seen.get(key, (blocker, now))
            older_ended = None not in (blocker.age_ms, before.age_ms) and (blocker.age_ms or 0) < (before.age_ms or 0)
            if blocker.count != before.count or older_ended:
                since = now
            judged[key] = blocker, since
        self._seen = {key: seen for key, seen in self._seen.items() if key[0] not in reports} | judged
        return [
            msgspec.structs.replace(b, still_s=round(now - since, 1)) if idle.may_stall(b) and now > since else b
            for b, since in judged.values()
        ]


class Blocking:
    """What keeps the participants from being idle, by their last reports."""

    def __init__(self, registry: Registry, ranks: Iterable[int]) -> None:
        self._registry, self._ranks = registry, tuple(ranks)
        self._seen: dict[int, list[tuple[str, int, bool]]] = {}
        self._stalls = Stalls()

    def saw(self, session: Session) -> bool:
        """A report arrived; True when it shows other blockers than the rank's last one, or one that stalled since.

        Only the rank that reported is looked at: 256 ranks report in every phase.
        """
        judged = self._stalls.judge({session.rank: session.report.idle}, trio.current_time())
        now = [(b.name, b.count, idle.stalled(b)) for b in judged]
        if now == self._seen.get(session.rank, []):
            return False
        self._seen[session.rank] = now
        return True

    def all(self) -> list[Blocker]:
        """Every blocker of every participant."""
        ranks = self._registry.ranks
        reports = {r: ranks[r].report.idle for r in self._ranks if r in ranks}
        return self._stalls.judge(reports, trio.current_time())


class Alarm:
    """Wakes a sleeper at a time that moves: one task for all of its waits, where a cancel scope per wait costs more
    than the event that ends most of them."""

    def __init__(self, nursery: trio.Nursery, sleeper: trio.lowlevel.ParkingLot) -> None:
        self._sleeper = sleeper
        self._at = math.inf
        self._moved = trio.lowlevel.ParkingLot()
        nursery.start_soon(self._run)

    def at_latest(self, at: float) -> None:
        """Ring at ``at`` (trio time), or before: the sleeper looks at its clock when it wakes."""
        if at < self._at:
            self._at = at
            self._moved.unpark_all()

    async def _run(self) -> None:
        while True:
            with trio.move_on_at(self._at) as scope:
                await self._moved.park()
            if scope.cancelled_caught:
                self._at = math.inf
                self._sleeper.unpark_all()
