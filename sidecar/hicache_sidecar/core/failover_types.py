"""What the failover machine sees, decides and remembers. Pure; no clock. ``core/failover.py`` is the machine."""

from enum import StrEnum

import msgspec

from hicache_proto.failover import ANY_BACKEND, FailoverPolicy, Policies, Spare
from hicache_proto.model import GuardReport, TargetState
from hicache_sidecar.core.redaction import redact_config

HOME, DETACHED = -1, -2  # places that are no spare; spares are 0, 1, ...
NO_POLICY = FailoverPolicy()


class Condition(StrEnum):
    """What a guard says about its store."""

    WELL = "well"
    TRYING = "trying"  # half-open: the guard probes
    SICK = "sick"
    UNKNOWN = "unknown"  # nothing attached, or an engine without a guard: nothing is ever done on this


class RankView(msgspec.Struct, frozen=True):
    """One rank's last report, as far as failover looks at it."""

    rank: int
    guard: GuardReport | None = None
    bypass: bool = False


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """The picture at one moment. ``blocked`` says why nothing may be done now: an operation runs, ranks are missing,
    recovery is not over, the ranks differ."""

    desired: TargetState | None
    ranks: tuple[RankView, ...] = ()
    can_hot: bool = False
    blocked: str = ""


class Health(msgspec.Struct, frozen=True):
    """All ranks together: the worst condition, why, and for how long a breaker has been open (seconds)."""

    condition: Condition
    why: str = ""
    open_s: float = 0.0
    all_bypassed: bool = False
    any_bypassed: bool = False


def look(view: RankView, watch: str) -> tuple[Condition, str, float]:
    """(condition, why, seconds since the breaker opened) of one rank."""
    guard = view.guard
    if guard is None:
        return Condition.UNKNOWN, "", 0.0
    sides = {name: side for name, side in guard.sides.items() if name == "read" or watch == "reads_and_writes"}
    told = [(side.state, f"{name}: {side.reason}", side.opened_for_s) for name, side in sides.items()]
    told = told or [(guard.breaker, guard.reason, guard.opened_for_s)]
    for state, condition in (("open", Condition.SICK), ("half_open", Condition.TRYING)):
        for phase, reason, open_s in told:
            if phase == state:
                numbers = f"{guard.errors} errors, {guard.timeouts} time-outs" + (
                    f", stuck: {', '.join(guard.stuck[:4])}" if guard.stuck else ""
                )
                return condition, f"rank {view.rank}: breaker {state.replace('_', '-')} ({reason}); {numbers}", open_s
    return Condition.WELL, "", 0.0


def health(ranks: tuple[RankView, ...], watch: str) -> Health:
    """The worst of all ranks: one rank without its store costs the whole world its hits."""
    seen = [look(view, watch) for view in ranks]
    worst = (Condition.UNKNOWN, "", 0.0)
    for wanted in (Condition.SICK, Condition.TRYING, Condition.UNKNOWN, Condition.WELL):
        found = [one for one in seen if one[0] is wanted]
        if found:
            worst = max(found, key=lambda one: one[2])
            break
    bypassed = [view.bypass for view in ranks]
    return Health(*worst, all_bypassed=bool(ranks) and all(bypassed), any_bypassed=any(bypassed))


# ---- decisions


class Wait(msgspec.Struct, frozen=True):
    """Nothing to do before ``until`` (clock), or before there is news."""

    until: float


class SetBypass(msgspec.Struct, frozen=True):
    """Tell every rank; answered by ``bypass_done``."""

    enabled: bool
    why: str


class Move(msgspec.Struct, frozen=True):
    """One ordinary operation; answered by ``moved``. ``step``: detach, spare, return."""

    target: TargetState
    to: int
    step: str
    mode: str
    why: str


Decision = Wait | SetBypass | Move

# ---- memory


class Moving(msgspec.Struct, frozen=True):
    """An operation that was decided; durable before it begins, so that a restart can tell whether it happened."""

    to: int
    target: TargetState


class Episode(msgspec.Struct, frozen=True, kw_only=True):
    """One failover: from the moment that ``home`` was left alone until it is well again. ``state`` is the desired
    state that this episode stands on: another one was made by somebody else. Holds secrets."""

    home: TargetState
    state: TargetState
    at: int = HOME
    bypass: bool = False
    why: str = ""
    moving: Moving | None = None

    def __repr__(self) -> str:
        return f"Episode(at={self.at}, bypass={self.bypass})"


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What outlives the sidecar, in the journal (``Journal.set("failover", ...)``). Holds secrets."""

    policies: Policies = {}
    episode: Episode | None = None
    held: str = ""
    left_alone: bool = False
    lift: bool = False  # our bypass outlived its episode: it is still to be lifted
    return_at: float | None = None  # earliest return: the machine's clock, in the journal seconds since 1970

    def __repr__(self) -> str:
        return f"Record({sorted(self.policies)})"


def policy_for(policies: Policies, backend: str | None) -> FailoverPolicy:
    """The policy of a backend: its own, else that of ``*``, else none."""
    if backend is None:
        return NO_POLICY
    return policies.get(backend) or policies.get(ANY_BACKEND) or NO_POLICY


def spare_target(spare: Spare, home: TargetState) -> TargetState:
    """A spare as a whole state."""
    return TargetState(
        backend=spare.hicache_storage_backend,
        extra_config=spare.hicache_storage_backend_extra_config_json,
        prefetch_policy=spare.hicache_storage_prefetch_policy or home.prefetch_policy,
        write_policy=spare.hicache_write_policy or home.write_policy,
    )


def shown_spare(state: TargetState) -> Spare | None:
    """A state with a backend, for showing: secrets redacted."""
    if state.backend is None:
        return None
    return Spare(
        hicache_storage_backend=state.backend,
        hicache_storage_backend_extra_config_json=redact_config(state.extra_config),
        hicache_storage_prefetch_policy=state.prefetch_policy,  # type: ignore[arg-type]  # checked when it was set
        hicache_write_policy=state.write_policy,  # type: ignore[arg-type]
    )


def shown_policies(policies: Policies) -> Policies:
    """Policies for showing: secrets of spares redacted."""
    replace = msgspec.structs.replace
    return {
        name: replace(
            policy,
            spares=[
                replace(
                    spare,
                    hicache_storage_backend_extra_config_json=redact_config(
                        spare.hicache_storage_backend_extra_config_json
                    ),
                )
                for spare in policy.spares
            ],
        )
        for name, policy in sorted(policies.items())
    }
