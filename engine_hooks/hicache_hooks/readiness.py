"""What must be true of the tree before PREPARED, and again before FROZEN: every page hashed (F13), and with a
checkpoint every page stored where it can be read afterwards (F58).

Both go on in slices, one per scheduler pass. In PREPARE traffic flows meanwhile, so that is the long run, which leaves
little to do; in FREEZE admission is held, nothing can come any more, and the end is the end. While a checkpoint
finishes there idleness is not tested again, for what moves then are its own transfers; it is tested when they are over.
Scheduler thread only.
"""

import logging

from hicache_hooks.adapter import Checkpoints, EngineAdapter
from hicache_hooks.idle import IdleGate
from hicache_proto.errors import HicacheError, PrepareFailed, UnsupportedByEngine
from hicache_proto.model import TargetState

log = logging.getLogger(__name__)

SLICE_S = 0.0005  # per scheduler pass: a decode step takes tens of milliseconds


class Readiness:
    """Of one rank's present operation."""

    def __init__(self, adapter: EngineAdapter, idle: IdleGate) -> None:
        self._adapter = adapter
        self._idle = idle
        self._saver = adapter if isinstance(adapter, Checkpoints) else None
        self._hashes = self._saves = False
        self.waits = False  # only the store can bring it forward: the scheduler may sleep
        self.finishing = False  # admission is held for the rest of a checkpoint

    def begin(self, target: TargetState, *, checkpoint: bool) -> None:
        """A new operation.

        Raises:
            UnsupportedByEngine: reason ``checkpoint``: this engine has none. Its capabilities say so too.
        """
        if checkpoint and self._saver is None:
            raise UnsupportedByEngine("this engine cannot write a checkpoint", details={"reason": "checkpoint"})
        self._hashes, self._saves = target.backend is not None, checkpoint
        self.thawed()

    def thawed(self) -> None:
        """Admission is open: traffic goes on beside what is left to do."""
        self.waits = self.finishing = False

    def over(self) -> None:
        """The operation is over: nothing more of it is begun."""
        self.thawed()
        if self._saves and self._saver is not None:
            self._saves = False
            self._saver.end_checkpoint()

    def reached(self, built: object) -> bool | HicacheError:
        """PREPARE: True when all is there, False while it goes on, an error when it cannot be. Never raises."""
        self.waits = False
        try:
            if self._hashes and not self._adapter.backfill_slice(SLICE_S):
                return False
            if self._saves and self._saver is not None and not self._saver.checkpoint_slice(built, SLICE_S):
                self.waits = self._saver.checkpoint_waits()
                return False
        except HicacheError as error:
            return error
        except Exception as error:
            log.exception("the tree could not be made ready")
            return PrepareFailed(f"back-filling page hashes failed: {error}", details={"reason": "backfill"})
        return True

    def refusal(self, built: object) -> bool | HicacheError:
        """FREEZE: True when the rank is idle and all is there, False while it goes on, else why not. Never raises."""
        if not self.finishing and (refusal := self._idle.refusal()) is not None:
            return refusal
        reached = self.reached(built)
        self.finishing = reached is False and self._saves
        if reached is not True:
            return reached
        # Hashing runs in this step and moves nothing; a checkpoint's transfers may have ended in between.
        return (self._idle.refusal() if self._saves else None) or True
