"""Documents from what the ranks report: status, idle, ranks. Nothing here remembers; ages are given. Pure but for
the clock inside ``Registry.age_ms``."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from hicache_proto import api
from hicache_proto.model import (
    EffectiveState,
    KnobValue,
    OpUsage,
    RankReport,
    State,
    StoreUsage,
    TargetState,
)
from hicache_sidecar.core.redaction import REDACTED, redact_config, redact_text
from hicache_sidecar.engine import idle
from hicache_sidecar.engine.operation import Job, desired_document
from hicache_sidecar.engine.registry import Registry, Session
from hicache_sidecar.engine.rows import DRAIN_HOLD, Rows
from hicache_sidecar.engine.sums import Sums

NEWS_S = 600.0  # how long a store that was found emptied is a warning; the rank's guard shows it for good


def same_state(one: EffectiveState, other: EffectiveState) -> bool:
    """Whether two ranks run the same thing (not counting bypass, revision, and what differs by place)."""
    return (
        one.backend == other.backend
        and one.config_digest == other.config_digest
        and one.prefetch_policy == other.prefetch_policy
        and one.write_policy == other.write_policy
        and one.knobs == other.knobs
    )


def agree(states: Iterable[EffectiveState]) -> bool:
    """Whether all states are the same."""
    all_states = list(states)
    return all(same_state(all_states[0], other) for other in all_states[1:])


def overall(registry: Registry, running: Job | None) -> tuple[State, str]:
    """State of the engine, and why when it is not a plain one."""
    live = registry.live
    if not live:
        return State.ENGINE_DOWN, "no rank is connected"
    reports = [s.report for s in live.values()]
    if running is not None and running.phase not in ("validate", "done", "failed"):
        if running.kind == "drain" or (running.mode == "drain" and running.phase == "freeze"):
            return State.DRAINING, f"operation {running.id}"
        if running.target is not None:
            state = State.DETACHING if running.target.backend is None else State.ATTACHING
            return state, f"operation {running.id}"
    bad = {s.rank: s.report.quarantine for s in live.values() if s.report.quarantine}
    if not agree(r.state for r in reports):
        return State.SPLIT, "the ranks do not run the same: " + ", ".join(
            f"rank {s.rank}: {s.report.state.backend or 'none'}" for s in live.values()
        )
    if bad:
        return State.QUARANTINED, "; ".join(f"rank {rank}: {redact_text(why)}" for rank, why in bad.items())
    if any(DRAIN_HOLD in r.holds for r in reports):
        return State.DRAINING, "admission is closed by hand until resume"
    if reports[0].state.backend is None:
        return State.DETACHED, ""
    if any(r.state.bypass for r in reports):
        return State.BYPASSED, ""
    return State.ATTACHED, ""


def drift(registry: Registry, desired: TargetState | None, digest: str) -> list[api.Drift]:
    """Where ranks differ from the desired state; ``digest`` is its config's, "" when not known."""
    if desired is None:
        return []
    found: list[api.Drift] = []
    for session in registry.live.values():
        state = session.report.state
        pairs: list[tuple[str, Any, Any]] = [("hicache_storage_backend", desired.backend, state.backend)]
        if desired.prefetch_policy is not None:
            pairs.append(("hicache_storage_prefetch_policy", desired.prefetch_policy, state.prefetch_policy))
        if desired.write_policy is not None:
            pairs.append(("hicache_write_policy", desired.write_policy, state.write_policy))
        if desired.backend is not None and state.backend == desired.backend:
            pairs += [(k, v, state.knobs.get(k)) for k, v in desired_knobs(desired).items()]
            if digest and state.config_digest != digest:
                shown = (redact_config(desired.extra_config), redact_config(state.extra_config))
                found.append(api.Drift(session.rank, "hicache_storage_backend_extra_config", *shown))
        found += [api.Drift(session.rank, name, want, got) for name, want, got in pairs if want != got]
    return found


def desired_knobs(desired: TargetState) -> dict[str, KnobValue]:
    """The knobs that a desired state names beside its config."""
    return dict(desired.knobs)


def stuck_threads(report: RankReport) -> list[str]:
    """Threads in a call past its deadline, and threads that have finished nothing for too long (F39), by name."""
    in_calls = report.guard.stuck if report.guard is not None else []
    late = [thread.name for thread in report.threads if thread.stalled_s > 0 and not in_calls]
    return sorted({*in_calls, *late})


def store_warnings(sessions: Iterable[Session], used: Mapping[str, StoreUsage]) -> list[str]:
    """What an operator should know about the stores: breakers, threads that hang, and use without effect (F39, F57)."""
    said = []
    for session in sessions:
        guard = session.report.guard
        if guard is not None and guard.breaker != "closed":
            said.append(
                f"rank {session.rank}: the breaker of {guard.name} is {guard.breaker} for {guard.opened_for_s:.0f} s "
                f"({guard.reason}); what it holds back is recomputed"
            )
        if guard is not None and guard.epoch_change is not None and guard.epoch_change.ago_s < NEWS_S:
            change = guard.epoch_change
            said.append(
                f"store_epoch_changed: rank {session.rank}: {guard.name} lost what it held {change.ago_s:.0f} s ago "
                f"(epoch {change.old} -> {change.new}, {change.how}); pages are written again at their next use"
            )
        if guard is not None and guard.no_room:
            said.append(
                f"rank {session.rank}: {guard.name} has no room and takes no new pages; what it holds is still read"
            )
        stuck = stuck_threads(session.report)
        if stuck:
            said.append(f"rank {session.rank}: stuck inside the store: {', '.join(stuck)}")
    for name, store in used.items():
        if store.write_only:
            written = store.ops.get("put", OpUsage()).bytes
            below = store.skipped.get("threshold", 0)
            hint = f", {below} of them below prefetch_threshold" if below else ""
            if store.gaps:
                hint += f", {store.gaps} found pages behind one that is not stored"
            ever = store.ops.get("get", OpUsage()).hit == 0
            seen = f"{store.lookups} look-ups" if ever else f"its last {store.recent.lookups} look-ups"
            said.append(f"write_only: {name} was given {written} bytes and read nothing in {seen}{hint}")
    return said


def status_document(
    registry: Registry,
    sums: Sums,
    rows: Rows,
    desired: tuple[TargetState, int] | None,
    digest: str,
    running: Job | None,
    warnings: list[str],
    quarantined: str = "",
) -> api.StatusDocument:
    """GET /hicache/storage-backend. ``quarantined`` says why the desired config must not be tried again (F19)."""
    state, reason = overall(registry, running)
    if quarantined and state is State.DETACHED:
        state, reason = State.QUARANTINED, quarantined
    live = registry.live
    first = next(iter(live.values())).report.state if live else EffectiveState()
    problems = [f"rank {s.rank}: {p}" for s in live.values() for p in s.hello.capabilities.problems]
    layers = [
        f"rank {s.rank}: the layers disagree: {json.dumps(s.report.layers, sort_keys=True)}"
        for s in live.values()
        if s.report.layers
    ]
    goal = running.target if running is not None else None
    by_rank = rows.of(registry, to_store=goal is not None and goal.backend is not None)
    used, by_store = sums.of([s.report for s in live.values()])
    differing = drift(registry, desired[0] if desired else None, digest)
    return api.StatusDocument(
        hicache_storage_backend=first.backend,
        hicache_storage_backend_extra_config=next(
            (row.hicache_storage_backend_extra_config for row in by_rank if row.connected), None
        ),
        hicache_storage_prefetch_policy=first.prefetch_policy,
        hicache_write_policy=first.write_policy,
        revision=desired[1] if desired else 0,
        state=state,
        desired=desired_document(*desired) if desired else None,
        drift=[] if running is not None else differing,
        usage=used,
        ranks=by_rank,
        missing_ranks=registry.missing_ranks,
        operation=None if running is None else {"id": running.id, "kind": running.kind, "phase": running.phase},
        engine_id=registry.engine_id,
        reason=reason,
        warnings=[*warnings, *problems, *layers, *store_warnings(live.values(), by_store)],
        usage_by_backend=by_store,
        agreed=registry.complete and not differing and agree(s.report.state for s in live.values()),
    )


def idle_document(registry: Registry) -> api.IdleDocument:
    """GET /hicache/idle, from the last reports."""
    live = registry.live
    reports = {rank: s.report.idle for rank, s in live.items()}
    return api.IdleDocument(
        idle=registry.complete and all(idle.is_idle(r) for r in reports.values()),
        blocked_by=idle.blockers(reports),
        ranks=[
            api.RankIdle(
                rank=rank,
                idle=idle.is_idle(s.report.idle),
                counters=dict(sorted(s.report.idle.counters.items())),
                report_age_ms=registry.age_ms(s),
                missing_counters=idle.missing_counters(s.report.idle),
                stuck=stuck_threads(s.report),
                held=s.report.idle.held,
            )
            for rank, s in live.items()
        ],
        missing_ranks=registry.missing_ranks,
    )


def ranks_document(registry: Registry) -> api.RanksDocument:
    """GET /hicache/ranks."""
    rows = []
    for rank, s in sorted(registry.ranks.items()):
        who = s.hello.identity
        rows.append(
            api.RankInfo(
                rank=rank,
                dp_rank=who.dp_rank,
                tp_rank=who.tp_rank,
                pp_rank=who.pp_rank,
                pid=s.hello.pid,
                epoch=s.hello.epoch,
                connected=s.alive,
                report_age_ms=registry.age_ms(s),
                capabilities=s.hello.capabilities,
                op_n=s.report.op_n,
                op_phase=s.report.op_phase,
                holds=list(s.report.holds),
            )
        )
    return api.RanksDocument(
        engine_id=registry.engine_id, expected=registry.expected, ranks=rows, missing_ranks=registry.missing_ranks
    )


def as_target(state: EffectiveState) -> TargetState:
    """What a rank runs, as a state to go to. A redacted secret stays redacted: such a state cannot be rebuilt."""
    return TargetState(
        backend=state.backend,
        extra_config=state.extra_config,
        prefetch_policy=state.prefetch_policy,
        write_policy=state.write_policy,
    )


def rebuildable(state: TargetState) -> bool:
    """False when the config lacks its secrets, because it was learnt from a rank."""
    return state.extra_config is None or REDACTED not in state.extra_config
