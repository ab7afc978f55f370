"""Metric families of the failover: where it stands, what it did. Names and label values are of fixed tables (F92)."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from hicache_proto.failover import FAILOVER_STATES
from hicache_sidecar.engine.failover_api import document

if TYPE_CHECKING:
    from hicache_sidecar.engine.coordinator import Coordinator

Labels = tuple[str, ...]
Rows = Iterable[tuple[Labels, float]]


def families(coordinator: "Coordinator") -> Iterator[tuple[str, str, str, Labels, Rows]]:
    """(kind, name, help, labels, samples), as ``obs/metrics.py`` renders them."""
    now = document(coordinator.failover)
    states = ", ".join(FAILOVER_STATES)
    yield "gauge", "hicache_failover_state", f"0..8: {states}", (), [((), FAILOVER_STATES.index(now.state))]
    yield "gauge", "hicache_failover_hold", "1 while held after flapping", (), [((), now.state == "held")]
    yield "gauge", "hicache_failover_attempts", "Returns tried since home was last well", (), [((), now.attempts)]
    yield "gauge", "hicache_failover_policies", "Backends that have a policy", (), [((), len(now.policies))]
    if now.next_try_in_s is not None:
        yield "gauge", "hicache_failover_next_try_seconds", "Until the next try", (), [((), now.next_try_in_s)]
    steps = sorted(coordinator.counters.failover_steps.items())
    yield "counter", "hicache_failover_steps", "Steps, by kind", ("step",), [((step,), n) for step, n in steps]
