"""What a target means to a stub rank: the state it would have, and the plan that VALIDATE answers. Pure."""

import hashlib
import json
from typing import Any

from hicache_proto.errors import InvalidConfig, UnknownBackend
from hicache_proto.model import KNOBS, EffectiveState, Plan, TargetState

BACKENDS = ("file", "mem")
KNOB_DEFAULTS: dict[str, Any] = {"prefetch_threshold": 256}


def effective(now: EffectiveState, target: TargetState) -> EffectiveState:
    """The state after moving from ``now`` to ``target``.

    Raises:
        UnknownBackend, InvalidConfig: as a real rank.
    """
    if target.backend is None:
        return EffectiveState(
            prefetch_policy=target.prefetch_policy or now.prefetch_policy,
            write_policy=target.write_policy or now.write_policy,
            namespace=now.namespace,
            bypass=now.bypass,
        )
    if target.backend not in BACKENDS:
        raise UnknownBackend(f"no backend {target.backend!r}")
    text = target.extra_config
    if text is None and target.backend == now.backend:
        text = now.extra_config
    try:
        config = json.loads(text or "{}")
    except ValueError as exc:
        raise InvalidConfig(f"not JSON at position {exc.pos}" if hasattr(exc, "pos") else "not JSON") from None
    knobs = KNOB_DEFAULTS | {k: v for k, v in config.items() if k in KNOBS} | target.knobs
    options = {k: v for k, v in config.items() if k not in KNOBS}
    return EffectiveState(
        backend=target.backend,
        extra_config=text,
        config_digest=hashlib.sha256(json.dumps([options, knobs], sort_keys=True).encode()).hexdigest()[:16],
        knobs=knobs,
        prefetch_policy=target.prefetch_policy or now.prefetch_policy,
        write_policy=target.write_policy or now.write_policy,
        namespace=now.namespace,
        bypass=now.bypass,
    )


def options(state: EffectiveState) -> dict[str, Any]:
    """The config's keys that are no knobs."""
    return {k: v for k, v in json.loads(state.extra_config or "{}").items() if k not in KNOBS}


def plan(now: EffectiveState, new: EffectiveState) -> Plan:
    """How ``new`` differs from ``now``."""
    live = [k for k in KNOBS if new.knobs.get(k) != now.knobs.get(k)] if now.backend and new.backend else []
    live += ["hicache_storage_prefetch_policy"] if new.prefetch_policy != now.prefetch_policy else []
    live += ["hicache_write_policy"] if new.write_policy != now.write_policy else []
    if new.backend is None:
        relation, keys = ("same" if now.backend is None and not live else "detach"), live
    elif now.backend is None:
        relation, keys = "attach", ["hicache_storage_backend"]
    elif now.backend != new.backend:
        relation, keys = "swap", ["hicache_storage_backend"]
    else:
        a, b = options(now), options(new)
        other = sorted(k for k in a.keys() | b.keys() if a.get(k) != b.get(k))
        relation, keys = ("swap", other) if other else ("live", live) if live else ("same", [])
    return Plan(relation=relation, changed_keys=keys, config_digest=new.config_digest)
