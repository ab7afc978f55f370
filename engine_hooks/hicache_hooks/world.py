"""A *world*: the ranks that share one control broadcast, with a leader (design.md, rule 11).

FREEZE, THAW, COMMIT, FINALIZE, UNDO and the end of a lease must act on all ranks of a world in the same scheduler
iteration, or tensor-parallel ranks enter different collectives and hang (F33, F114). So they are not applied
where they arrive: the leader injects a command into the engine's own broadcast, and every rank applies it when
the broadcast brings it. The other ranks only register their call and answer when the command ran. Only the
leader's clock counts: it looks at the lease when it injects a COMMIT and says so in the command.

PREPARE is not injected: it touches nothing that serving sees, and each rank says by itself whether its local
work succeeded, before any command makes all ranks act together.

An engine adapter implements ``Injector``; a world of one rank uses ``Alone``.
"""

import logging
from collections.abc import Callable
from typing import Protocol

import msgspec

from hicache_proto.transaction import RankPhase, RankRecord

log = logging.getLogger(__name__)


class WorldCommand(msgspec.Struct, frozen=True):
    """What the leader broadcasts. Plain data: ``encode`` and ``decode`` fit any engine's own channel."""

    kind: str  # "freeze" | "thaw" | "commit" | "finalize" | "undo" | "lease_end"
    n: int
    round: int = 0  # freeze, thaw
    lease_s: float = 0.0  # the lease that the command arms
    drain: bool = False  # freeze
    lease_alive: bool = True  # commit: the leader's clock, at injection
    reason: str = ""  # undo


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(WorldCommand)


def encode(command: WorldCommand) -> bytes:
    """For engines whose broadcast carries bytes."""
    return _encoder.encode(command)


def decode(data: bytes) -> WorldCommand:
    """Inverse of ``encode``. Raises msgspec.MsgspecError."""
    return _decoder.decode(data)


class Injector(Protocol):
    """What the hook needs of an engine's control broadcast. All methods run on the scheduler thread."""

    @property
    def leader(self) -> bool:
        """True on the rank that injects."""

    @property
    def ranks(self) -> int:
        """Ranks in this world."""

    def inject(self, command: WorldCommand) -> None:
        """Leader only: put the command into the broadcast of this iteration or the next.

        Must lead to ``RankHook.execute_injected(command)`` exactly once on every rank of the world, this one
        included, in one iteration. Must not block.
        """

    def agree(self, ok: bool) -> bool:
        """Every rank of the world calls it twice per COMMIT, in the same iteration: True when all said True.

        First whether each would switch, for a swap may enter the engine's own collectives (SGLang makes communication
        groups) and a rank that stays out would hang the others; then whether each did. The only collectives of our
        own; the adapter bounds them by the engine's own collective time-out.
        """


class Alone:
    """A world of one rank: the broadcast is a function call."""

    leader = True
    ranks = 1

    def __init__(self) -> None:
        self._execute: Callable[[WorldCommand], None] | None = None

    def bind(self, execute: Callable[[WorldCommand], None]) -> None:
        """Where commands go."""
        self._execute = execute

    def inject(self, command: WorldCommand) -> None:
        """Run the command now."""
        if self._execute is not None:
            self._execute(command)

    def agree(self, ok: bool) -> bool:
        """One voice."""
        return ok


def could_switch(record: RankRecord, command: WorldCommand) -> bool:
    """True when the table would let ``command``, a COMMIT, switch this rank, or has done so already."""
    before = RankPhase.PREPARED if record.hot else RankPhase.FROZEN
    ready = record.phase is RankPhase.SWITCHED or (record.phase is before and command.lease_alive)
    return record.n == command.n and ready


def agreed(world: Injector, mine: bool) -> bool:
    """``world.agree``; a world whose agreement fails has said no."""
    try:
        return world.agree(mine)
    except Exception:
        log.exception("the world's agreement failed")
        return False
