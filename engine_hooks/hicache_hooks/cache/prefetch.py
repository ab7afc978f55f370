"""Prefetching: L3 -> L2 for a waiting request, under one of three policies.

=============== ==========================================================================
policy          the request may run
=============== ==========================================================================
best_effort     whenever the scheduler wants it; what is there by then is used
wait_complete   when the fetch has ended (or after ``wait_complete_max_s``)
timeout         when the fetch has ended or its budget (base + per 1024 tokens) is used up
=============== ==========================================================================

A fetch owns no host page before the store said how many pages it has, at most a share of L2 together with the
others (F44), and ends in one of five outcomes (F41). One attempt per request: what failed is recomputed (F80, F81).
"""

from hicache_hooks.cache.evict import Evictor
from hicache_hooks.cache.hashing import page_key
from hicache_hooks.cache.ledger import Ended
from hicache_hooks.cache.operations import LookUp, PagedOperation, Prefetch
from hicache_hooks.cache.state import CacheState


class Prefetcher:
    """Owns the prefetches in flight, by ledger number."""

    def __init__(self, state: CacheState, evictor: Evictor) -> None:
        self._s = state
        self._evictor = evictor
        self.running: dict[int, Prefetch] = {}

    @property
    def pages(self) -> int:
        """Host pages that prefetches own together."""
        return sum(len(op.pages) for op in self.running.values())

    def start(self, rid: str, tokens: tuple[int, ...]) -> Prefetch | None:
        """Begin a prefetch of what ``tokens`` (whole pages) lack in L1 and L2; None when it does not pay."""
        s = self._s
        set_ = s.storage
        io = set_.io
        if io is None or not set_.stores:
            return None
        match = s.tree.match(tokens, split=False, use=False)
        start = match.pages
        missing = len(tokens) - start * s.page_size
        if missing == 0:
            return None
        if missing < set_.knobs.prefetch_threshold:
            s.stats["prefetch_skipped_threshold"] += 1
            set_.looked_up(below_threshold=True)
            return None
        set_.looked_up()
        if set_.refuses("exists", missing // s.page_size):
            return None
        op = Prefetch(
            s.host_ledger.begin("prefetch"), s.clock(), s.report, set_=set_, io=io,
            rid=rid, tokens=tokens, start=start,
            parent=s.tree.last_hash(match.node, match.within or None),
            namespace=s.namespace, page_size=s.page_size,
        )  # fmt: skip
        if set_.knobs.hicache_storage_pass_prefix_keys:
            above = [h for node in s.tree.path(match.node) for h in node.hashes or []]
            op.prefix_keys = [page_key(s.namespace, h) for h in above[:start]]
        if not set_.read([LookUp(op)]):
            s.host_ledger.end(op.number, Ended.CANCELLED)
            return None
        self.running[op.number] = op
        return op

    def ready(self, op: Prefetch) -> bool:
        """May the request run? When its policy gives up on the fetch, that is done here."""
        if op.number not in self.running or op.verdict is not None:
            return True
        knobs, age = op.set.knobs, self._s.clock() - op.started
        limit_s = op.set.limits.wait_complete_max_s
        if knobs.prefetch_policy == "timeout":
            limit_s = min(limit_s, knobs.prefetch_budget_s(op.wanted_tokens))
        if op.set.bypassed or knobs.prefetch_policy == "best_effort":
            self.end_now(op, Ended.CANCELLED)
        elif age >= limit_s:
            self.end_now(op, Ended.TIMED_OUT)
        else:
            return False
        return True

    def end_now(self, op: Prefetch, verdict: Ended) -> None:
        """Use what has arrived, skip what has not; the rest of the pages is freed when no thread can touch it."""
        if op.number in self.running and op.verdict is None:
            op.verdict = verdict
            op.claimed = self._claim(op, op.end_now())

    def overdue(self, op: PagedOperation) -> None:
        """The store has had its deadline: go on with what has arrived (rule 6 of the guard). A backup: nothing."""
        if isinstance(op, Prefetch):
            self.end_now(op, Ended.TIMED_OUT)

    def reported(self, op: Prefetch) -> None:
        """The look-up or the fetch is through."""
        if op.verdict is None and not op.fetching and op.error is None and not op.cancelled and self._fetch(op):
            return
        s = self._s
        del self.running[op.number]
        if op.claimed is None:
            op.claimed = self._claim(op, op.prefix) if op.fetching else 0
        if op.verdict is None:
            nothing_to_do = not op.fetching and op.error is None and not op.cancelled
            outcome = Ended.DONE if nothing_to_do else op.outcome(op.prefix, op.asked)
        elif op.claimed and op.claimed == op.asked:
            outcome = Ended.DONE
        elif op.claimed and op.verdict == Ended.CANCELLED:
            outcome = Ended.PARTIAL
        else:
            outcome = op.verdict
        s.stats["fetched_pages"] += op.claimed
        s.host_ledger.end(op.number, outcome)

    def _fetch(self, op: Prefetch) -> bool:
        """From look-up to fetch; False when there is nothing (worth) fetching."""
        s = self._s
        limits, threshold = op.set.limits, op.set.knobs.prefetch_threshold
        if op.hits == 0 or op.hits * s.page_size < threshold:
            if op.hits:
                s.stats["prefetch_skipped_threshold"] += 1
                op.set.hit_too_short()
            return False
        n = min(op.hits, int(limits.prefetch_fraction * s.host.num_pages) - self.pages)
        if n > 0:
            n = min(n, self._evictor.host_room(n))
        if n <= 0 or n * s.page_size < threshold:
            s.stats["dropped_prefetches"] += 1
            return False
        op.pages = s.host_ledger.take(op.number, n) or []
        op.keys = op.keys[:n]
        op.asked = n
        op.fetching = True
        if op.set.read(op.cut(op.set.batch_pages)):
            return True
        op.cancelled = 1
        return False

    def _claim(self, op: Prefetch, n: int) -> int:
        """Put the first ``n`` fetched pages into the tree; returns how many are of use."""
        s = self._s
        if n == 0:
            return 0
        end = op.start + n
        match = s.tree.match(op.tokens[: end * s.page_size])
        have = match.pages
        if have < op.start:  # what came before was evicted meanwhile: the rest cannot be reached
            s.stats["orphaned_pages"] += n
            return 0
        if have < end:
            skip = have - op.start
            node = s.tree.grow(match.node, op.tokens[have * s.page_size : end * s.page_size])
            node.host = op.pages[skip:n]
            node.stored_in = op.stored_in
            s.host_ledger.to_tree(op.number, node.host)
            s.tree.set_hashes(node, op.hashes[skip:n])
        return n
