"""Fault points of a rank, off unless ``HICACHE_FAULTS`` names them. The grammar stands in ``hicache_proto.faults``.

A name is ``<phase>.<boundary>``: phase = the wire name of a call, or ``lease_end``, ``build``, ``close`` (these three
only ``before_apply``; ``validate`` has the agent's boundaries alone); boundary, in the order in which they are met:

* ``recv``: the agent took the message off the socket (``error`` drops it);
* ``before_apply``, ``after_apply``: the scheduler thread (``build``, ``close``: their own threads);
* ``before_send``, ``after_send``: the agent, around the answer.

``cut`` drops the agent's connection; only the agent's own boundaries can.
"""

import os
from collections.abc import Mapping

from hicache_proto.faults import LINKED, RAISING, FaultError, FaultPlan, LinkCut

__all__ = ["BOUNDARIES", "ENV", "LOCAL_PHASES", "PHASES", "POINTS", "FaultError", "Faults", "LinkCut"]

ENV = "HICACHE_FAULTS"

PHASES = (
    "validate", "prepare", "freeze", "thaw", "commit", "finalize", "undo", "lease_end", "build", "close"
)  # fmt: skip
LOCAL_PHASES = ("lease_end", "build", "close")  # no message stands behind them
BOUNDARIES = ("recv", "before_apply", "after_apply", "before_send", "after_send")
_AGENT = ("recv", "before_send", "after_send")


def _boundaries(phase: str) -> tuple[str, ...]:
    if phase in LOCAL_PHASES:
        return ("before_apply",)
    return _AGENT if phase == "validate" else BOUNDARIES


POINTS: dict[str, frozenset[str]] = {
    f"{phase}.{boundary}": LINKED if boundary in _AGENT else RAISING
    for phase in PHASES
    for boundary in _boundaries(phase)
}
"""Every fault point of a rank and what it can do, in the order in which an operation meets them."""


class Faults(FaultPlan):
    """The fault points of one process."""

    __slots__ = ()

    def __init__(self, spec: str = "") -> None:
        """Parse a specification. Raises ValueError as ``FaultPlan``."""
        super().__init__(POINTS, spec)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> "Faults":
        """The faults that the environment asks for. Raises as the constructor."""
        return cls(environ.get(ENV, ""))
