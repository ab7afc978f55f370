"""What to do after a start, and whenever hellos change the picture. Pure: no journal file, link or clock.

Theory of operation
===================

The coordinator makes one ``Recovery`` from what the journal says, tells it every hello (and fresh report), and asks
``next`` after each; it executes the decision, tells the result, asks again, until the decision is ``Ready``.

Order of the decisions, and the rules of design.md ("The transaction") that make them:

1. A BEGIN without outcome is settled first (rule 1): B if every participant says SWITCHED under n and is vouched
   for, A as soon as one does not, A when the wait of one in-doubt lease is over.
2. A rank that still holds the operation which made the desired state is sent FINALIZE (rule 1), as soon as it is
   seen and as often as it is seen so: repeats are harmless.
3. Nothing more before all expected ranks said hello: a silent one might prove more than the others (rule 6).
4. A rank whose revision is above the journal's proves that the journal was lost or is older: that state is adopted
   (rule 6). Ranks that hold the same top revision and differ make a ``Split``; nothing is touched.
   Without any desired state, what the ranks agree on is adopted; if they disagree: ``Split``.
5. A rank that still holds an operation which the journal does not know: finalised if another rank proves that it
   was decided (its revision is that n), undone otherwise (presumed abort).
6. A rank that differs, and that is fresh or missed an outcome, is to be converged (rules 13, 14); ``leave`` counts
   only if all ranks are fresh. One that differs although it has the desired revision is drift: shown, not touched.

*Vouched for* (rule 4 after a restart, when COMMIT's send time is lost): the rank was asked after the restart, and
send time of the question + the ``lease_left_s`` that it reported - DECIDE_MARGIN_S has not passed. A hello alone
vouches for nothing: it may have waited in a queue.
"""

import msgspec

from hicache_proto import transaction
from hicache_proto.model import RankReport
from hicache_proto.transaction import DECIDE_MARGIN_S, RankPhase, Recovered, Said

FIRST_CONTACT = "first contact"


class RankView(msgspec.Struct, frozen=True):
    """One rank as its last report shows it.

    ``identity_of_state`` compares ranks with each other (the config digest and policies); ``differs``: the state is
    not the desired one. ``vouched_until_s`` is on the coordinator's monotonic clock, None when never asked.
    """

    rank: int
    op_n: int = 0
    op_phase: str = ""
    op_ended: str = ""
    revision: int = 0
    identity_of_state: str = ""
    differs: bool = False
    vouched_until_s: float | None = None

    @property
    def fresh(self) -> bool:
        """A process that never saw an operation."""
        return self.op_n == 0 and self.revision == 0

    @property
    def holds(self) -> bool:
        """Something of ``op_n`` is still open here."""
        return self.op_phase not in ("", RankPhase.NONE, RankPhase.QUARANTINED)


def view_of(
    rank: int,
    report: RankReport,
    *,
    differs: bool = False,
    asked_at_s: float | None = None,
    identity: str | None = None,
) -> RankView:
    """The view of a report.

    Args:
        asked_at_s: when the question was sent that this report answers; None for a hello or heartbeat.
        identity: what makes two ranks' states equal; by default backend, config digest and policies.
    """
    state = report.state
    if identity is None:
        identity = repr((state.backend, state.config_digest, state.prefetch_policy, state.write_policy))
    vouched = None
    if asked_at_s is not None and report.lease_left_s is not None:
        vouched = asked_at_s + report.lease_left_s - DECIDE_MARGIN_S
    return RankView(
        rank=rank,
        op_n=report.op_n,
        op_phase=report.op_phase,
        op_ended=report.op_ended,
        revision=state.revision,
        identity_of_state=identity,
        differs=differs,
        vouched_until_s=vouched,
    )


# ---- decisions


class Wait(msgspec.Struct, frozen=True):
    """Ask again after the next hello. ``missing`` ranks have not said hello."""

    why: str
    missing: frozenset[int] = frozenset()


class Ask(msgspec.Struct, frozen=True):
    """Ask these ranks for a report now, and tell the answers with ``asked_at_s`` (vouching)."""

    ranks: frozenset[int]


class CommitB(msgspec.Struct, frozen=True):
    """Make OUTCOME B of ``n`` durable, then finalise: ``transaction.coord_resume(n, participants, COMMIT_B)``."""

    n: int
    participants: frozenset[int]


class AbortA(msgspec.Struct, frozen=True):
    """``n`` ends on A: record it if it is pending (``recorded`` False), send UNDO."""

    n: int
    participants: frozenset[int]
    why: str
    recorded: bool = False


class Finalize(msgspec.Struct, frozen=True):
    """B of ``n`` is decided: send FINALIZE."""

    n: int
    participants: frozenset[int]


class Adopt(msgspec.Struct, frozen=True):
    """Make ``rank``'s state the desired one at ``revision``, durably; ``n`` is the highest number that was shown."""

    rank: int
    revision: int
    n: int
    why: str


class Split(msgspec.Struct, frozen=True):
    """The ranks disagree and nothing proves one side: state ``split``, an operator resolves. Nothing is touched."""

    why: str


class Ready(msgspec.Struct, frozen=True):
    """Recovery ended. ``converge``: ranks to bring to the desired state; ``drift``: ranks that only show it.

    ``left``: all ranks are fresh, and the policy ``leave`` says that they stay as they are.
    """

    converge: frozenset[int] = frozenset()
    drift: frozenset[int] = frozenset()
    left: bool = False


Decision = Wait | Ask | CommitB | AbortA | Finalize | Adopt | Split | Ready


class Recovery:
    """What is known since the start. One per sidecar process; also used when an engine comes back.

    Args:
        pending: (n, participants) of a BEGIN without outcome.
        revision: the journal's desired revision, None when there is none.
        leave: the policy ``on_engine_restart = leave``.
    """

    def __init__(
        self,
        *,
        pending: tuple[int, frozenset[int]] | None = None,
        revision: int | None = None,
        leave: bool = False,
    ) -> None:
        self.pending, self.revision, self.leave = pending, revision, leave
        self.lease_over = False
        self._views: dict[int, RankView] = {}

    # ---- what happened

    def tell(self, view: RankView) -> None:
        """A hello or a report. One that is not asked for keeps an earlier vouching if it says the same of n."""
        before = self._views.get(view.rank)
        if (
            before is not None
            and view.vouched_until_s is None
            and (before.op_n, before.op_phase) == (view.op_n, view.op_phase)
        ):
            view = msgspec.structs.replace(view, vouched_until_s=before.vouched_until_s)
        self._views[view.rank] = view

    def gone(self, rank: int) -> None:
        """The rank is another incarnation now, or lost: what it said counts no more (rule 13)."""
        self._views.pop(rank, None)

    def waited(self) -> None:
        """One whole in-doubt lease has passed since the start."""
        self.lease_over = True

    def settled(self, n: int, *, b: bool) -> None:
        """The outcome of pending ``n`` is durable."""
        if self.pending is not None and self.pending[0] == n:
            self.pending = None
            if b:
                self.revision = n

    def adopted(self, revision: int) -> None:
        """The adoption is durable."""
        self.revision = revision

    # ---- what to do

    def seen_n(self) -> int:
        """The highest operation number or revision that any rank showed (rule 6)."""
        return max((max(view.op_n, view.revision) for view in self._views.values()), default=0)

    def next(self, expected: frozenset[int] | None, now_s: float) -> Decision:
        """The next thing to do.

        Args:
            expected: all ranks of the engine's topology, None before the first hello.
            now_s: the coordinator's monotonic clock.
        """
        if self.pending is not None:
            return self._settle(*self.pending, now_s)
        decided = frozenset(v.rank for v in self._views.values() if v.holds and v.op_n == self.revision)
        if decided and self.revision is not None:
            return Finalize(self.revision, decided)
        if expected is None:
            return Wait("no rank said hello yet")
        missing = expected - self._views.keys()
        if missing:
            return Wait("ranks are missing", missing)
        return self._adoption(expected) or self._stray(expected) or self._ready(expected)

    def _settle(self, n: int, participants: frozenset[int], now_s: float) -> Decision:
        answers = {rank: said_by(self._views[rank], n) for rank in participants & self._views.keys()}
        verdict = transaction.recover(participants, answers, "", self.lease_over)
        if verdict is Recovered.WAIT:
            return Wait(f"operation {n} has no outcome", participants - answers.keys())
        if verdict is Recovered.COMMIT_B:
            if any(said is Said.FINAL for said in answers.values()):
                return CommitB(n, participants)  # decided before: nothing to vouch for
            until = {rank: self._views[rank].vouched_until_s for rank in participants}
            unasked = frozenset(rank for rank, limit in until.items() if limit is None)
            if unasked:
                return Ask(unasked)
            if all(limit is not None and now_s < limit for limit in until.values()):
                return CommitB(n, participants)
            return AbortA(n, participants, "not every participant's lease is surely alive")
        noes = sorted(f"rank {rank} says {said}" for rank, said in answers.items() if said is not Said.SWITCHED)
        silent = sorted(participants - answers.keys())
        why = ", ".join([*noes, *(f"rank {rank} is silent" for rank in silent)]) or "the wait is over"
        return AbortA(n, participants, why)

    def _adoption(self, expected: frozenset[int]) -> Decision | None:
        views = [self._views[rank] for rank in sorted(expected)]
        top = max((view.revision for view in views), default=0)
        if self.revision is not None and top <= self.revision:
            return None
        best = [view for view in views if view.revision == top]
        if len({view.identity_of_state for view in best}) > 1:
            return Split(f"ranks {[view.rank for view in best]} disagree at revision {top}")
        if self.revision is None and top == 0 and any(view.holds for view in views):
            return self._stray(expected)  # what is in doubt must end before anything is taken as agreed
        why = FIRST_CONTACT if top == 0 else f"rank {best[0].rank} proves revision {top}"
        # First contact is revision 1 (interface.md); a proven revision keeps its number.
        return Adopt(best[0].rank, max(top, 1), self.seen_n(), why)

    def _stray(self, expected: frozenset[int]) -> Decision | None:
        views = [self._views[rank] for rank in sorted(expected)]
        holding = {view.op_n for view in views if view.holds}
        if not holding:
            return None
        n = max(holding)
        ranks = frozenset(view.rank for view in views if view.holds and view.op_n == n)
        if any(view.revision == n for view in views):
            return Finalize(n, ranks)
        return AbortA(n, ranks, "no journal entry and no rank proves that it was decided", recorded=True)

    def _ready(self, expected: frozenset[int]) -> Decision:
        views = [self._views[rank] for rank in sorted(expected)]
        if self.leave and all(view.fresh for view in views):
            return Ready(left=True)
        revision = self.revision or 0
        behind = frozenset(v.rank for v in views if v.differs and (v.fresh or v.revision < revision))
        drift = frozenset(v.rank for v in views if v.differs) - behind
        return Ready(converge=behind, drift=drift)


def said_by(view: RankView, n: int) -> Said:
    """What the view says about operation ``n``."""
    return transaction.said(view.op_n, view.op_phase, view.op_ended, n, view.revision)
