"""Fault points of the sidecar, off unless the setting ``faults`` names them. Grammar: ``hicache_proto.faults``.

A name is ``<phase>.<boundary>``. For the phases of the wire, in the order in which the boundaries are met:

* ``before_send``, ``after_send``: around handing the message for one rank to ZMQ. The first time is the first rank's:
  then some ranks have the message and others not;
* ``recv``: a rank's answer was taken off the socket and nobody acted on it yet;
* ``before_apply``, ``after_apply``: the table leaves the phase: all answers are known, then the next phase is entered
  and nothing of it is sent. A strict wait for idle is the phase ``thaw``.

For the records of the journal (``begin``, ``outcome_b``, ``outcome_a``): ``before_write``; ``before_fsync``, the record
is in the file and not synced; ``after_fsync``, it is durable and nobody knows. ``answer.before_send``: the operation is
settled and its client not yet told.

The sidecar can be killed, stopped, or made to stand still at each; an error of the disk or a rank is tested where it
comes from.
"""

from hicache_proto.faults import PLAIN, FaultPlan

WIRE = ("validate", "prepare", "freeze", "thaw", "commit", "finalize", "undo")
_SEND = ("before_send", "after_send", "recv")
_APPLY = ("before_apply", "after_apply")
_RECORD = ("before_write", "before_fsync", "after_fsync")

POINTS: dict[str, frozenset[str]] = {
    f"{phase}.{boundary}": PLAIN
    for phase, boundaries in (
        ("validate", _SEND),
        ("begin", _RECORD),
        *((phase, _SEND + _APPLY) for phase in WIRE[1:5]),
        ("outcome_b", _RECORD),
        ("finalize", _SEND + _APPLY),
        ("undo", _SEND + _APPLY),
        ("outcome_a", _RECORD),
        ("answer", ("before_send",)),
    )
    for boundary in boundaries
}
"""Every fault point of the sidecar and what it can do, in the order in which an operation meets them."""


class Faults(FaultPlan):
    """The fault points of one sidecar."""

    __slots__ = ()

    def __init__(self, spec: str = "") -> None:
        """Parse a specification. Raises ValueError as ``FaultPlan``."""
        super().__init__(POINTS, spec)


OFF = Faults()
