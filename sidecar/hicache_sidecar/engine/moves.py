"""What one transaction is asked to do, how it ended, and who takes part. No I/O."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from hicache_proto.errors import HicacheError
from hicache_proto.model import TargetState
from hicache_proto.transaction import CoordPhase, RankPhase, Said, said
from hicache_sidecar.engine.registry import Registry, Session

Process = tuple[int, int, str]  # pid, epoch, incarnation: another one is another process


_POINTS = {CoordPhase.WAIT: "thaw", CoordPhase.CONVERGING: "finalize"}


def point_of(phase: CoordPhase) -> str:
    """The coordinator's phase among the fault points, which are named as on the wire."""
    return _POINTS.get(phase, phase.value)


@dataclass(frozen=True, kw_only=True)
class Move:
    """What is to be done: all ``participants`` from ``a`` to ``b``. ``deadline`` is absolute; ``wait_s`` counts from
    the moment that all are prepared."""

    n: int
    a: TargetState
    b: TargetState
    participants: tuple[int, ...]
    deadline: float
    mode: str = "strict"
    wait_s: float = 0.0
    dry_run: bool = False
    checkpoint: bool = False


@dataclass
class Outcome:
    """How it ended. ``cause`` is None when B was decided (or a dry run passed)."""

    decided_b: bool = False
    prepared: bool = False
    converging: frozenset[int] = frozenset()  # B decided; these did not get there
    cause: HicacheError | None = None
    prepare_ms: float = 0.0
    freeze_ms: float = 0.0
    commit_ms: float = 0.0
    warnings: list[str] = field(default_factory=list)
    saved: dict[int, int] = field(default_factory=dict)  # pages that checkpoints wrote, by rank

    def took(self, phase: CoordPhase, ms: float) -> None:
        """One stay in ``phase`` ended; a phase may be entered again."""
        if phase is CoordPhase.PREPARE:
            self.prepare_ms += ms
        elif phase is CoordPhase.FREEZE:
            self.freeze_ms += ms
        elif phase in (CoordPhase.COMMIT, CoordPhase.OUTCOME):
            self.commit_ms += ms


def stalled_in(ranks: Mapping[int, Session], silent: Iterable[int]) -> dict[int, str]:
    """How far ranks were last seen that other ranks of their world wait for (F114). Ranks that stand alone: nothing."""
    far: dict[int, str] = {}
    for rank in silent:
        session = ranks.get(rank)
        if session is not None and session.hello.identity.tp_size * session.hello.identity.pp_size > 1:
            phase = session.report.op_phase
            far[rank] = "back on the old state" if phase in ("", RankPhase.NONE) else f"last seen {phase}"
    return far


def process_of(session: Session) -> Process:
    """Who a session's process is."""
    return session.hello.pid, session.hello.epoch, session.hello.incarnation


@dataclass(frozen=True)
class News:
    """What became of a participant's session. ``lost`` is the reason code when it is gone, else ask it again."""

    rank: int
    lost: str = ""
    detail: str = ""


class Participants:
    """Follows the participants' sessions: the same process that still holds n goes on, anything else is lost."""

    def __init__(self, registry: Registry, ranks: tuple[int, ...]) -> None:
        self._registry = registry
        self._ranks = frozenset(ranks)
        here = {rank: registry.ranks[rank] for rank in ranks if rank in registry.ranks}
        self._process = {rank: process_of(session) for rank, session in here.items()}
        self._session = {rank: session.id for rank, session in here.items()}
        self._suspects: set[int] = set(self._ranks - set(here))
        self._lost: set[int] = set()

    def note(self, session: Session) -> bool:
        """A session began or ended; True when a participant may be concerned."""
        if session.hello.role != "rank":
            return False
        # Another rank's hello can be the engine's restart, which concerns all.
        self._suspects |= {session.rank} & self._ranks or self._ranks
        return True

    def look(self, n: int, *, must_hold: bool) -> list[News]:
        """What is new since the last look. ``must_hold``: a session that does not know ``n`` counts as lost."""
        suspects, self._suspects = self._suspects, set()
        found: list[News] = []
        for rank in sorted(suspects):
            now = self._registry.ranks.get(rank)
            if now is None or process_of(now) != self._process.get(rank):
                found.append(News(rank, "engine_restarted", f"rank {rank} lost: the engine was restarted"))
            elif not now.alive:
                found.append(News(rank, "rank_lost", f"rank {rank} lost: {now.why_lost}"))
            elif now.id != self._session.get(rank):
                self._session[rank] = now.id
                held = said(now.report.op_n, now.report.op_phase, now.report.op_ended, n)
                if held is Said.UNKNOWN and must_hold:
                    found.append(News(rank, "rank_lost", f"rank {rank} lost: it no longer knows the operation"))
                else:
                    found.append(News(rank))
        self._lost |= {news.rank for news in found if news.lost}
        return found

    def lost_processes(self) -> dict[int, Process]:
        """Participants that were lost during the operation, and who they were."""
        return {rank: self._process[rank] for rank in self._lost if rank in self._process}
