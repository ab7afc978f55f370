"""The cells of the crash matrix: every fault point x six faults x three operations, and which of them mean nothing.

The points are read from the two programs, so that a new one is in the matrix by itself. A fault happens *at* a point:
either the process that reaches it does it to itself, or it is held there while the other process is struck.

Rules for cells that mean nothing (``ruled_out``):

1. "rank error" needs a rank's own code at the point, to raise: there is none at a point of the sidecar.
2. "sidecar SIGSTOP" at ``lease_end`` is what leads there (below): one stop of 12 s, not two.
"""

from dataclasses import dataclass
from enum import StrEnum

from hicache_hooks import faults as hook_faults
from hicache_sidecar.core import faults as sidecar_faults

AWAY_S = 12.0  # longer than every lease of a frozen or switched rank (5 and 10 s) and than the liveness limit (3.5 s)
HOLD_S = 60.0  # let go by the test; longer than it ever needs
VICTIM = 1  # the rank that is struck; the primer's error is on another one


class Fault(StrEnum):
    """What strikes."""

    SIDECAR_KILL = "sidecar SIGKILL"
    SIDECAR_STOP = "sidecar SIGSTOP"
    RANK_KILL = "rank SIGKILL"
    RANK_ERROR = "rank error"
    RANK_HANG = "rank hang"
    LINK_CUT = "link cut"


class Op(StrEnum):
    """The operation under way."""

    ATTACH = "attach"
    DETACH = "detach"
    SWAP = "swap"


class Script(StrEnum):
    """What leads an operation to a point that a plain one does not meet."""

    PLAIN = "plain"
    WAIT = "wait"  # a rank is busy, the request waits for idle: FREEZE, THAW, FREEZE
    UNDO = "undo"  # another rank fails its COMMIT
    LEASE = "lease"  # the sidecar stops when the first rank has switched, until the leases are over


class Act(StrEnum):
    """What the test does from outside once the point holds its process."""

    NONE = ""
    KILL_SIDECAR = "kill sidecar"
    STOP_SIDECAR = "stop sidecar"
    KILL_RANK = "kill rank"
    STOP_RANK = "stop rank"
    CUT_LINK = "cut link"


@dataclass(frozen=True)
class Point:
    """A fault point. ``side`` is "sidecar" or "rank"."""

    side: str
    name: str

    @property
    def label(self) -> str:
        return f"{self.side} {self.name}"

    @property
    def phase(self) -> str:
        return self.name.partition(".")[0]

    @property
    def actions(self) -> frozenset[str]:
        """What the program can do to itself here."""
        return (sidecar_faults.POINTS if self.side == "sidecar" else hook_faults.POINTS)[self.name]

    @property
    def script(self) -> Script:
        match self.phase:
            case "thaw":
                return Script.WAIT
            case "undo" | "outcome_a":
                return Script.UNDO
            case "lease_end":
                return Script.LEASE
            case _:
                return Script.PLAIN

    @property
    def leaves_wait(self) -> bool:
        """It is met only after the busy rank became idle."""
        return self.side == "sidecar" and self.name in ("thaw.before_apply", "thaw.after_apply")


@dataclass(frozen=True)
class Cell:
    """One run."""

    point: Point
    fault: Fault
    op: Op

    @property
    def label(self) -> str:
        return f"{self.point.label} x {self.fault} x {self.op}"


def points() -> list[Point]:
    """All of both programs."""
    return [Point("sidecar", name) for name in sidecar_faults.POINTS] + [Point("rank", n) for n in hook_faults.POINTS]


def ruled_out(point: Point, fault: Fault) -> int:
    """The number of the rule (module docstring) by which the cell means nothing; 0 when it counts."""
    if fault is Fault.RANK_ERROR and point.side == "sidecar":
        return 1
    if fault is Fault.SIDECAR_STOP and point.script is Script.LEASE:
        return 2
    return 0


def plan(point: Point, fault: Fault) -> tuple[str, Act]:
    """The fault point's own action, and what is done from outside while it holds there."""
    if point.side == "sidecar":
        direct = {Fault.SIDECAR_KILL: "kill", Fault.SIDECAR_STOP: "stop"}
    else:
        direct = {Fault.RANK_KILL: "kill", Fault.RANK_ERROR: "error", Fault.RANK_HANG: f"hang:{AWAY_S:g}"}
        if "cut" in point.actions:
            direct[Fault.LINK_CUT] = "cut"
    if fault in direct:
        return direct[fault], Act.NONE
    outside = {
        Fault.SIDECAR_KILL: Act.KILL_SIDECAR, Fault.SIDECAR_STOP: Act.STOP_SIDECAR, Fault.RANK_KILL: Act.KILL_RANK,
        Fault.RANK_HANG: Act.STOP_RANK, Fault.LINK_CUT: Act.CUT_LINK,
    }  # fmt: skip
    return f"hold:{HOLD_S:g}", outside[fault]


def cells(point: Point) -> list[Cell]:
    """Those of one point that count."""
    return [Cell(point, fault, op) for fault in Fault if not ruled_out(point, fault) for op in Op]
