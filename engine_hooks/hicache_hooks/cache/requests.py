"""What the cache holds for one request, and the load-back of its L2 pages."""

from dataclasses import dataclass, field, replace

from hicache_hooks.cache.ledger import Ended
from hicache_hooks.cache.operations import Copy, Prefetch
from hicache_hooks.cache.radix import Match, Node
from hicache_hooks.cache.state import CacheState


@dataclass(frozen=True, slots=True)
class Admission:
    """What a request starts with. ``pages`` are device pages in prefix order; they are locked until finish/abort.

    The tokens of the prefix = ``len(pages) * page_size``; they split into the three counts (in tokens).
    ``loading``: L2 pages are still on their way; wait until ``loaded(rid)`` and use what that returns.
    """

    pages: list[int]
    device_tokens: int
    host_tokens: int
    storage_tokens: int
    loading: bool


@dataclass(slots=True)
class Request:
    """Scheduler thread only."""

    tokens: tuple[int, ...]
    node: Node  # end of the locked device prefix
    prefetch: Prefetch | None = None
    number: int = 0  # of the device ledger; 0 until admitted
    pages: list[int] = field(default_factory=list)  # page table from the prompt's start
    committed: int = 0  # pages of it that are the tree's
    admission: Admission | None = None
    load: Copy | None = None
    ended: Ended | None = None  # finished or aborted while the load was under way

    def admitted(self, match: Match, page_size: int) -> None:
        """Count the prefix by the tier that it came from."""
        fetched, op = 0, self.prefetch
        if op is not None and op.claimed:
            fetched = max(0, min(op.start + op.claimed, match.pages) - max(op.start, len(match.device)))
        self.admission = Admission(
            pages=list(self.pages),
            device_tokens=len(match.device) * page_size,
            host_tokens=(len(match.host) - fetched) * page_size,
            storage_tokens=fetched * page_size,
            loading=bool(match.host),
        )


class Loader:
    """Owns the load-backs in flight, by the device ledger's number."""

    def __init__(self, state: CacheState) -> None:
        self._s = state
        self.running: dict[int, tuple[Copy, Request]] = {}

    def start(self, request: Request, match: Match, pages: list[int]) -> None:
        """Copy ``match.host`` to ``pages``, which the request owns; the match's host lock passes to the copy."""
        s = self._s
        copy = Copy(
            request.number, s.clock(), s.report, copier=s.storage.to_device, node=match.node,
            device_pages=pages, host_pages=match.host, to_host=False,
        )  # fmt: skip
        request.load = copy
        self.running[copy.number] = (copy, request)
        if not s.storage.copy_in(copy):
            copy.acknowledge(cancelled=True)

    def back(self, copy: Copy) -> None:
        """A load-back ended: the pages enter the tree, or are recomputed when it failed (F80)."""
        s = self._s
        _, request = self.running.pop(copy.number)
        request.load = None
        s.tree.lock_host(copy.node, -1)
        admission = request.admission
        if copy.succeeded:
            self._adopt(request, copy)
            if admission is not None:
                request.admission = replace(admission, pages=list(request.pages), loading=False)
        else:
            s.stats["failed_loads"] += 1
            s.device_ledger.release(request.number, copy.device_pages)
            del request.pages[request.committed :]
            if admission is not None:
                pages = list(request.pages)
                request.admission = replace(admission, pages=pages, host_tokens=0, storage_tokens=0, loading=False)
        if request.ended is not None:
            self.release(request, request.ended)

    def _adopt(self, request: Request, copy: Copy) -> None:
        s = self._s
        for node, first in s.tree.segments(copy.node, len(copy.device_pages)):
            part = copy.device_pages[first : first + s.tree.length(node)]
            if node.device is None:
                s.device_ledger.to_tree(request.number, part)
                node.device = part
                s.stats["loaded_pages"] += len(part)
            # Else somebody computed it meanwhile; the request keeps its own copy, which its page table names.
        s.tree.lock_device(copy.node)
        s.tree.lock_device(request.node, -1)
        request.node = copy.node
        request.committed += len(copy.device_pages)

    def release(self, request: Request, outcome: Ended) -> None:
        """Give back everything that an admitted request holds; while a load writes to its pages, afterwards (F27)."""
        if request.load is not None:
            request.ended = outcome
        elif request.number:
            self._s.tree.lock_device(request.node, -1)
            self._s.device_ledger.end(request.number, outcome)
            request.number = 0
