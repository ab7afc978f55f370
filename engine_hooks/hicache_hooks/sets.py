"""The storage sets of the present operation: who holds which, and what became of those on their way out.

A set is opaque here (``EngineAdapter.build``). At any time it is exactly one of: parked (B before SWAP, or after
SWAP_BACK), installed (the engine's), kept (A from SWAP to the outcome), or handed to the closer; so each set is
closed once, and none under a live thread (F23, F117). After a failed swap back nobody knows which set the engine
uses: then none is closed any more (F28). Scheduler thread only.
"""

import logging

from hicache_hooks.adapter import EngineAdapter
from hicache_hooks.closer import Closed, Closer

log = logging.getLogger(__name__)


class Sets:
    """New and old set of one rank, the publication owed for an installed one, and sets that do not close."""

    def __init__(self, adapter: EngineAdapter, closer: Closer) -> None:
        self._adapter = adapter
        self._closer = closer
        # Lists of 0 or 1 item, for any object, None too, may be a set.
        self._new: list[object] = []
        self._old: list[object] = []
        self._unpublished: list[object] = []
        self._stuck: dict[int, tuple[str, ...]] = {}  # close ticket -> threads
        self._retired: int | None = None
        self.retiring = False  # A's set is being closed for the first time
        self.publish_error = ""
        self.undo_error = ""

    def park(self, built: object) -> None:
        """B is ready."""
        self._new = [built]

    @property
    def parked(self) -> object:
        """B, while it is parked."""
        return self._new[0] if self._new else None

    def swap(self) -> None:
        """Install B, keep A. Whatever the adapter raises; then nothing changed."""
        self._old = [self._adapter.swap(self._new[0])]

    def swap_back(self) -> None:
        """Install A again, park B. Whatever the adapter raises; then both sets are left alone for good."""
        try:
            self._new = [self._adapter.swap_back(self._old[0])]
            self._old = []
        except Exception as error:
            self.undo_error = f"undo_failed: {type(error).__name__}: {error}"
            raise

    def close(self, built: object) -> None:
        """Close a set that nobody took."""
        self._closer.close(built)

    def drop_new(self) -> None:
        """Close B's parked set."""
        if self._new and not self.undo_error:
            self._closer.close(self._new.pop())

    def retire_old(self) -> None:
        """Close A's set; ``retiring`` until the first attempt ended."""
        self._retired = None
        if self._old:
            self.retiring = True
            self._retired = self._closer.close(self._old.pop())

    def closed(self, closed: Closed) -> None:
        """The closer reports an attempt."""
        if closed.stuck:
            self._stuck[closed.ticket] = closed.stuck
        else:
            self._stuck.pop(closed.ticket, None)
        if closed.ticket == self._retired:
            self.retiring = False

    @property
    def retire_stuck(self) -> tuple[str, ...]:
        """Threads that keep the last operation's old set open."""
        return self._stuck.get(self._retired, ()) if self._retired is not None else ()

    @property
    def quarantine(self) -> str:
        """Why this rank takes no new operation; empty when it does."""
        stuck = sorted({name for names in self._stuck.values() for name in names})
        return self.undo_error or (f"threads_stuck: {', '.join(stuck)}" if stuck else "")

    def owe_publication(self) -> None:
        """B is final: the engine's own view must follow."""
        self._unpublished, self._new = self._new, []

    def pay_publication(self, revision: int) -> None:
        """Publish what is owed; on failure it stays owed and is told (a repeat of FINALIZE tries again)."""
        if not self._unpublished:
            return
        try:
            self._adapter.publish(self._unpublished[0], revision)
        except Exception as error:
            log.exception("publishing revision %d failed", revision)
            self.publish_error = f"{type(error).__name__}: {error}"
        else:
            self.publish_error = ""
            self._unpublished = []

    def bypass(self) -> None:
        """Quarantine: no I/O on either set."""
        try:
            self._adapter.set_bypass(True)
        except Exception:
            log.exception("bypass could not be set")
