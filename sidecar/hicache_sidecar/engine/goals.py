"""From a request to the whole state that it asks for. Pure: what is not said is filled from what is desired now."""

import math

import msgspec

from hicache_proto import api
from hicache_proto.errors import InvalidRequest
from hicache_proto.model import KNOBS, PREFETCH_POLICIES, WRITE_POLICIES, EffectiveState, Mode, TargetState

MAX_TIMEOUT_S = 86_400.0  # a day: longer is a typing error
MAX_TEXT = 1000  # characters of a reason or a request id


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    """A checked request: where to, and how. ``kind`` goes to the history, ``verb`` into refusals."""

    kind: str
    verb: str
    target: TargetState
    mode: str = "strict"
    swap: bool = False
    checkpoint: bool = False
    dry_run: bool = False
    force: bool = False
    wait_s: float = 0.0
    timeout_s: float = api.DEFAULT_TIMEOUT_S
    reason: str = ""


def check_shape(request: api.ChangeOptions) -> None:
    """Values that msgspec's types do not check.

    Raises:
        InvalidRequest: names the field.
    """
    if request.mode not in {m.value for m in Mode}:
        raise InvalidRequest(f"mode is one of {', '.join(m.value for m in Mode)}", details={"field": "mode"})
    _seconds("timeout_s", request.timeout_s, low=0.001)
    _seconds("wait_timeout_s", request.wait_timeout_s, low=0.0)
    for name in ("reason", "request_id"):
        text = getattr(request, name)
        if text is not None and len(text) > MAX_TEXT:
            raise InvalidRequest(f"{name} is longer than {MAX_TEXT} characters", details={"field": name})
    if isinstance(request, api.AttachRequest | api.PolicyRequest):
        _one_of("hicache_storage_prefetch_policy", request.hicache_storage_prefetch_policy, PREFETCH_POLICIES)
        _one_of("hicache_write_policy", request.hicache_write_policy, WRITE_POLICIES)
    if isinstance(request, api.AttachRequest) and not request.hicache_storage_backend:
        raise InvalidRequest("hicache_storage_backend is empty", details={"field": "hicache_storage_backend"})
    if isinstance(request, api.PolicyRequest):
        _policy_shape(request)
    if isinstance(request, api.AttachRequest | api.DetachRequest) and request.checkpoint:
        _checkpoint_shape(request)


def _checkpoint_shape(request: api.AttachRequest | api.DetachRequest) -> None:
    """F58: it is taken while the engine stands still, of a store that is let go."""
    field = {"field": "checkpoint"}
    if request.mode == Mode.HOT:
        raise InvalidRequest("a checkpoint needs mode strict or drain: under traffic it would never end", details=field)
    if isinstance(request, api.AttachRequest) and not request.swap:
        raise InvalidRequest("checkpoint goes with a swap or a detach", details=field)
    if isinstance(request, api.AttachRequest) and request.dry_run:
        raise InvalidRequest("a dry run writes nothing: it has no checkpoint", details=field)


def _policy_shape(request: api.PolicyRequest) -> None:
    for name, value in request.knobs.items():
        if name not in KNOBS:
            raise InvalidRequest(f"unknown knob {name[:80]!r}", details={"field": name[:80], "known": list(KNOBS)})
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidRequest(f"{name} must be a finite number", details={"field": name})
    asked = (request.hicache_storage_prefetch_policy, request.hicache_write_policy)
    if not request.knobs and asked == (None, None):
        raise InvalidRequest("nothing to change: name a policy or a knob", details={"field": "knobs"})


def _seconds(name: str, value: float, *, low: float) -> None:
    if not (math.isfinite(value) and low <= value <= MAX_TIMEOUT_S):
        raise InvalidRequest(
            f"{name} is a number of seconds from {low:g} to {MAX_TIMEOUT_S:g}", details={"field": name}
        )


def seconds(name: str, value: float) -> float:
    """A duration of a request.

    Raises:
        InvalidRequest: not finite, not above 0, or over a day.
    """
    _seconds(name, value, low=0.001)
    return value


def _one_of(name: str, value: str | None, allowed: tuple[str, ...]) -> None:
    if value is not None and value not in allowed:
        raise InvalidRequest(
            f"{name} is one of {', '.join(allowed)}", details={"field": name, "allowed": list(allowed)}
        )


def goal_of(
    request: api.AttachRequest | api.DetachRequest | api.PolicyRequest,
    desired: TargetState | None,
    now: EffectiveState,
) -> Goal:
    """The goal of a request, given the desired state (with secrets) and what the first rank runs.

    Raises:
        InvalidRequest: knobs while nothing is attached.
    """
    base = desired if desired is not None and desired.backend == now.backend else None
    wait_s = request.wait_timeout_s
    if request.mode == Mode.DRAIN and wait_s == 0:
        wait_s = api.DEFAULT_DRAIN_WAIT_S
    options = {"mode": request.mode, "wait_s": wait_s, "timeout_s": request.timeout_s, "reason": request.reason}
    match request:
        case api.AttachRequest():
            return _attach(request, base, now, options)
        case api.DetachRequest():
            target = TargetState(prefetch_policy=now.prefetch_policy, write_policy=now.write_policy)
            return Goal(kind="detach", verb="detach", target=target, checkpoint=request.checkpoint, **options)  # type: ignore[arg-type]
        case api.PolicyRequest():
            if request.knobs and now.backend is None:
                raise InvalidRequest(
                    "nothing is attached: prefetch knobs belong to an attached backend", details={"field": "knobs"}
                )
            target = TargetState(
                backend=now.backend,
                extra_config=base.extra_config if base else None,
                knobs={**(base.knobs if base else {}), **request.knobs},
                prefetch_policy=request.hicache_storage_prefetch_policy or now.prefetch_policy,
                write_policy=request.hicache_write_policy or now.write_policy,
            )
            return Goal(kind="policy", verb="policy update", target=target, **options)  # type: ignore[arg-type]


def whole(state: TargetState) -> TargetState:
    """A recorded state as a target. Without a config it had none; in a target ``None`` keeps what is attached."""
    if state.backend is None or state.extra_config is not None:
        return state
    return msgspec.structs.replace(state, extra_config="{}")


def _attach(
    request: api.AttachRequest, base: TargetState | None, now: EffectiveState, options: dict[str, object]
) -> Goal:
    config = request.hicache_storage_backend_extra_config_json
    knobs = {}
    if config is None and base is not None and base.backend == request.hicache_storage_backend:
        config, knobs = base.extra_config, base.knobs  # not said: as it is
    kind = "check" if request.dry_run else "swap" if request.swap else "attach"
    return Goal(
        kind=kind,
        verb="swap" if request.swap else "attach",
        target=TargetState(
            backend=request.hicache_storage_backend,
            extra_config=config,
            knobs=knobs,
            prefetch_policy=request.hicache_storage_prefetch_policy or now.prefetch_policy,
            write_policy=request.hicache_write_policy or now.write_policy,
        ),
        swap=request.swap,
        checkpoint=request.checkpoint,
        dry_run=request.dry_run,
        force=request.force,
        **options,  # type: ignore[arg-type]
    )
