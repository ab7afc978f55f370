"""The communication groups of the engine's storage threads: made once, where nobody waits, and kept for good.

The engine makes two sets of them in each attach and destroys them in each detach. Making them is a collective over
all ranks of the world, in the middle of an attach that can fail on one rank alone: the others then wait for ever,
with their scheduler threads (F114). It is also most of what an attach costs at tp > 1. So ours are made when every
rank is known to be at the same point, given to each attach, and taken back at each detach and at an attach that fails.

* At the engine's start, right after the scheduler was built: nothing is served yet. The ranks first meet at the
  engine's own key-value store, which waits with a bound: one whose hooks did not load costs the others ``MEET_S``,
  and then nobody makes any.
* Otherwise (that meeting failed, or the engine's own DELETE destroyed what an attach of ours had got) at the vote
  before a COMMIT: the vote itself says that all ranks are there, none has groups, and nothing lies in between.

What is left: a rank that dies between the vote and its call. That ends the engine anyway.
"""

import datetime
import importlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

log = logging.getLogger(__name__)

GROUPS = ("prefetch_hits_sync_groups", "prefetch_completion_sync_groups")
MEET_S = 20.0  # ranks build their schedulers in step; seconds apart on a loaded machine
KEY = "hicache_hooks/groups"
GO, NO = "go", "no"


class Store(Protocol):
    """What is used of ``torch.distributed``'s store."""

    def add(self, key: str, amount: int) -> int:
        """Atomic."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Atomic; an empty ``expected`` also stands for a key that is not there. Returns what is there now."""

    def wait(self, keys: list[str], timeout: datetime.timedelta) -> None:
        """Raises RuntimeError when time is up."""


class StorageGroups:
    """The groups of one cache controller. Scheduler thread."""

    def __init__(self, controller: Any) -> None:
        self._controller = controller
        self._kept: list[Any] = []  # in the order in which an attach asks for them

    def here(self) -> bool:
        """True when the next attach makes none: a rank that made some alone would wait for the others for ever."""
        return any(self._kept) or any(getattr(self._controller, name) for name in GROUPS)

    def make(self) -> None:
        """Collective: every rank of the world calls it, at the same point of its work. None in a world of one."""
        self._kept = [self._controller._create_sync_groups() for _ in GROUPS]

    def make_at_start(self, store: Store, ranks: int, wait_s: float = MEET_S) -> bool:
        """``make``, if all ``ranks`` come here within ``wait_s``. Never raises; False: there are none."""
        try:
            if self.here():
                return True  # the engine was started with storage, on all ranks
            if not all_here(store, KEY, ranks, wait_s):
                log.warning("hicache hooks: not all ranks came to make storage groups; the first attach makes them")
                return False
            self.make()
        except Exception:
            log.exception("hicache hooks: storage groups could not be made")
        return self.here()

    @contextmanager
    def given(self) -> Iterator[None]:
        """Inside, the engine's attach gets the kept groups, and does not destroy them when it fails."""
        controller, left = self._controller, list(self._kept)
        if not left:
            yield
            return
        made = controller._create_sync_groups
        controller._create_sync_groups = lambda: left.pop(0) if left else made()
        controller._destroy_sync_groups = lambda groups: None
        try:
            yield
        finally:
            del controller._create_sync_groups  # the class's own again
            del controller._destroy_sync_groups
            if controller.enable_storage:
                self._kept = []  # the engine's, until it detaches
            else:
                self.put([[] for _ in GROUPS])

    def take(self) -> list[Any]:
        """Before a detach: what the controller has, which then finds nothing to destroy."""
        groups = [getattr(self._controller, name) for name in GROUPS]
        self.put([[] for _ in GROUPS])
        return groups

    def put(self, groups: list[Any]) -> None:
        """Give the controller ``groups``."""
        for name, group in zip(GROUPS, groups, strict=True):
            setattr(self._controller, name, group)

    def keep(self, groups: list[Any]) -> None:
        """After a detach: for the next attach. A second set, of the engine's own attach, goes the engine's way."""
        if not any(self._kept):
            self._kept = groups
            return
        for each in groups:
            self._controller._destroy_sync_groups(each)


def all_here(store: Store, key: str, ranks: int, wait_s: float) -> bool:
    """True on every rank that calls, or on none: whether all ``ranks`` called within ``wait_s`` of the first.

    The last to come, or the first to lose patience, writes the verdict; who writes first wins, and all read it.
    """
    verdict = f"{key}/verdict"
    if store.add(f"{key}/came", 1) == ranks:
        return store.compare_set(verdict, "", GO) == GO.encode()
    try:
        store.wait([verdict], datetime.timedelta(seconds=wait_s))
    except Exception:  # time is up; torch raises different classes by version
        log.info("hicache hooks: not all ranks are there after %g s", wait_s)
    return store.compare_set(verdict, "", NO) == GO.encode()


def engine_store() -> Store:
    """The key-value store by which the ranks of this engine found each other."""
    distributed: Any = importlib.import_module("torch.distributed.distributed_c10d")
    store: Store = distributed._get_default_store()
    return store
