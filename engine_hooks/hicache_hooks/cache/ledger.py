"""Ownership ledger of pages: no page is lost or freed twice (F41, F42).

Rules

1. Every page is free, owned by the tree, or owned by exactly one open operation: free + tree + operations = total.
2. A move names the owner it moves from; a page that has another owner raises, and nothing is moved.
3. Every operation ends once, in one of five outcomes; what it still owns is free then. Started = ended + open.

One ledger per tier. Only the scheduler thread writes (rule 8 of design.md), so there is no lock: a worker reports
by the inbox and never frees a page itself.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from enum import StrEnum

FREE = 0
TREE = 1
_FIRST_OPERATION = 2


class Ended(StrEnum):
    """Outcome of an operation."""

    DONE = "done"
    PARTIAL = "partial"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed_out"


class LedgerError(Exception):
    """Double free, foreign page, operation ended twice: a defect of ours, never a consequence of a store."""


class PageLedger:
    """Owners of ``total`` pages; pages are numbered from 0."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._owner = [FREE] * total
        self._free = list(range(total - 1, -1, -1))  # a stack: the page used last is the one still in the CPU's cache
        self._tree = 0
        self._operations: dict[int, tuple[str, set[int]]] = {}
        self._next = _FIRST_OPERATION
        self.started: Counter[str] = Counter()  # by kind
        self.ended: Counter[tuple[str, Ended]] = Counter()

    @property
    def free(self) -> int:
        """Pages that nobody owns."""
        return len(self._free)

    @property
    def in_tree(self) -> int:
        """Pages of the tree."""
        return self._tree

    @property
    def reserved(self) -> int:
        """Pages of open operations."""
        return sum(len(pages) for _, pages in self._operations.values())

    @property
    def open(self) -> int:
        """Operations that have not ended."""
        return len(self._operations)

    @property
    def balanced(self) -> bool:
        """Rule 1 by the counts alone: cheap enough for every idle moment; ``check`` looks at each page."""
        return self.free + self._tree + self.reserved == self.total

    def begin(self, kind: str) -> int:
        """Open an operation that owns nothing yet; returns its number."""
        number = self._next
        self._next += 1
        self._operations[number] = (kind, set())
        self.started[kind] += 1
        return number

    def take(self, operation: int, n: int) -> list[int] | None:
        """``n`` free pages for an operation; None, and nothing taken, when there are not enough.

        Raises:
            LedgerError: no such operation.
        """
        owned = self._owned(operation)
        if n > len(self._free):
            return None
        split = len(self._free) - n
        pages = self._free[split:]
        del self._free[split:]
        pages.reverse()
        for page in pages:
            self._owner[page] = operation
        owned.update(pages)
        return pages

    def to_tree(self, operation: int, pages: Sequence[int]) -> None:
        """Move pages from an operation to the tree.

        Raises:
            LedgerError: a page that the operation does not own.
        """
        self._leave(operation, pages)
        for page in pages:
            self._owner[page] = TREE
        self._tree += len(pages)

    def from_tree(self, operation: int, pages: Sequence[int]) -> None:
        """Move pages from the tree to an operation.

        Raises:
            LedgerError: no such operation, or a page that the tree does not own.
        """
        owned = self._owned(operation)
        if len(set(pages)) != len(pages) or any(self._owner[page] != TREE for page in pages):
            raise LedgerError(f"taken from the tree without its owning all of them: {list(pages)}")
        for page in pages:
            self._owner[page] = operation
        self._tree -= len(pages)
        owned.update(pages)

    def release(self, operation: int, pages: Sequence[int]) -> None:
        """Free pages of an operation.

        Raises:
            LedgerError: a page that the operation does not own.
        """
        self._leave(operation, pages)
        self._put_back(pages)

    def free_tree(self, pages: Sequence[int]) -> None:
        """Free pages of the tree.

        Raises:
            LedgerError: a page that the tree does not own: a double free.
        """
        if len(set(pages)) != len(pages) or any(self._owner[page] != TREE for page in pages):
            raise LedgerError(f"freed by the tree without owning all of them: {list(pages)}")
        self._tree -= len(pages)
        self._put_back(pages)

    def end(self, operation: int, outcome: Ended) -> None:
        """Close an operation and free what it still owns.

        Raises:
            LedgerError: no such operation, or it ended already.
        """
        owned = self._owned(operation)
        kind = self._operations.pop(operation)[0]
        self._put_back(sorted(owned))
        self.ended[kind, outcome] += 1

    def check(self) -> None:
        """Recompute everything from the owners.

        Raises:
            LedgerError: an invariant does not hold.
        """
        owners = Counter(self._owner)
        facts = {
            "free list is what is free": sorted(self._free) == [p for p, o in enumerate(self._owner) if o == FREE],
            "tree count": owners[TREE] == self._tree,
            "operations own what they list": all(
                all(self._owner[page] == number for page in pages) and owners[number] == len(pages)
                for number, (_, pages) in self._operations.items()
            ),
            "free + tree + operations = total": self.free + self.in_tree + self.reserved == self.total,
            "started = ended + open": sum(self.started.values()) == sum(self.ended.values()) + self.open,
        }
        broken = [name for name, holds in facts.items() if not holds]
        if broken:
            raise LedgerError("; ".join(broken))

    def check_tree(self, pages: Iterable[int]) -> None:
        """Compare with the pages that the tree really holds.

        Raises:
            LedgerError: one is missing, doubled or not the tree's.
        """
        held = sorted(pages)
        if held != [page for page, owner in enumerate(self._owner) if owner == TREE]:
            raise LedgerError("the tree does not hold the pages that are its own")

    def _owned(self, operation: int) -> set[int]:
        try:
            return self._operations[operation][1]
        except KeyError:
            raise LedgerError(f"operation {operation} is not open") from None

    def _leave(self, operation: int, pages: Sequence[int]) -> None:
        owned = self._owned(operation)
        leaving = set(pages)
        if len(leaving) != len(pages) or not leaving <= owned:
            raise LedgerError(f"operation {operation} does not own all of {list(pages)}")
        owned -= leaving

    def _put_back(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._owner[page] = FREE
        self._free.extend(pages)
