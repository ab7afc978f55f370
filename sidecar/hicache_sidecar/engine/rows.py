"""Rows of status, one for each rank, kept until its report is new: redacting them was most of what a status cost."""

import msgspec

from hicache_proto import api
from hicache_proto.model import RankReport, State
from hicache_proto.transaction import RankPhase
from hicache_sidecar.core.redaction import redact_config, redact_text
from hicache_sidecar.engine.registry import Registry, Session

DRAIN_HOLD = "drain"  # the name of the manual hold
_PHASES = (RankPhase.PREPARING, RankPhase.PREPARED, RankPhase.DRAINING, RankPhase.FROZEN, RankPhase.SWITCHED)


class Rows:
    """The rows that were asked for last. What it gives out is not to be changed."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Session, RankReport, api.RankStatus]] = {}

    def of(self, registry: Registry, *, to_store: bool = False) -> list[api.RankStatus]:
        """One row for each known rank, in rank order, with the report's age now.

        ``to_store``: an operation is at work that ends with a store.
        """
        sessions = [session for _, session in sorted(registry.ranks.items())]
        self._kept = {session.rank: self._entry(session) for session in sessions}
        return [
            msgspec.structs.replace(
                row,
                report_age_ms=registry.age_ms(session),
                state=rank_state(session, to_store),
                connected=session.alive,
            )
            for session, _, row in self._kept.values()
        ]

    def _entry(self, session: Session) -> tuple[Session, RankReport, api.RankStatus]:
        kept = self._kept.get(session.rank)
        if kept is not None and kept[0] is session and kept[1] is session.report:
            return kept
        return session, session.report, _row(session)


def rank_state(session: Session, to_store: bool = False) -> State:
    """State of one rank, from its own report; where an operation is going, a report does not say."""
    report = session.report
    if not session.alive:
        return State.ENGINE_DOWN
    if report.quarantine:
        return State.QUARANTINED
    if report.op_phase == RankPhase.DRAINING or DRAIN_HOLD in report.holds:
        return State.DRAINING
    if report.op_phase in _PHASES:
        return State.ATTACHING if to_store or report.state.backend is None else State.DETACHING
    if report.state.backend is None:
        return State.DETACHED
    return State.BYPASSED if report.state.bypass else State.ATTACHED


def _row(session: Session) -> api.RankStatus:
    """All but what changes without a report."""
    who, state = session.hello.identity, session.report.state
    return api.RankStatus(
        rank=session.rank,
        dp_rank=who.dp_rank,
        tp_rank=who.tp_rank,
        pp_rank=who.pp_rank,
        pid=session.hello.pid,
        epoch=session.hello.epoch,
        state="",
        hicache_storage_backend=state.backend,
        hicache_storage_backend_extra_config=redact_config(state.extra_config),
        hicache_storage_prefetch_policy=state.prefetch_policy,
        hicache_write_policy=state.write_policy,
        revision=state.revision,
        bypass=state.bypass,
        report_age_ms=0,
        threads=session.report.threads,
        namespace=state.namespace,
        prefetch_knobs=state.knobs,
        quarantine=redact_text(session.report.quarantine),
        guard=session.report.guard,
        inner=redact_text(state.inner),
        store={key: redact_text(fact) if isinstance(fact, str) else fact for key, fact in state.store.items()},
    )
