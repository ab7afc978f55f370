"""The scheduler of one rank: continuous batching with chunked prefill over the cache controller.

A request's way::

    submit -> held (gate closed) -> waiting (L3 prefetch) -> loading (L2 to L1) -> running (prefill, decode) -> done

Everything here runs on the scheduler thread; other threads may read lengths (``counters``). One ``run_pass`` does
what can be done now and says whether it did anything; sleeping is the loop's business (``loop``), so that tests
drive passes by hand. Nothing of the hook may raise into this code; an idle hook costs one attribute test.

Room: a request is admitted only if the pages that it and all running ones may need at most fit the device pool
together, so that a running request always gets its pages once eviction has caught up, and no two wait for each other.
"""

import time
from collections.abc import Callable
from typing import Protocol

from hicache_hooks.cache.controller import CacheController
from hicache_hooks.cache.pools import DevicePool
from hicache_hooks.cache.requests import Admission
from hicache_hooks.embedded.batch import ROWS, Span
from hicache_hooks.embedded.messages import Done, Failed, Flush, Flushed, Submit
from hicache_hooks.embedded.model import Model
from hicache_hooks.embedded.request import Request, oldest_ms, pages_for
from hicache_proto.errors import HicacheError, InvalidRequest, NoEngine
from hicache_proto.model import MANDATORY_COUNTERS, IdleReport

Emit = Callable[[Done | Failed | Flushed], None]

# best_effort never waits for a store. But a fetch that began a moment ago, in an engine with nothing else to do, would
# then always be thrown away; so it may take as long as computing the same tokens would (0.25 s per 1024 measured).
BEST_EFFORT_S_PER_TOKEN = 0.25 / 1024
BUSY_POLL_S = 0.02  # a waiting request's prefetch budget may end without any event
IDLE_POLL_S = 1.0  # heals a wake-up that was lost (F104); costs 0.01 % of a core


class Hook(Protocol):
    """What the scheduler needs of ``hook.RankHook``."""

    pending: bool

    def run_pending(self) -> None: ...
    def admit(self) -> bool: ...
    def note_idle(self) -> None: ...
    def sleep_s(self, default: float | None = None) -> float | None: ...


class NoHook:
    """An engine without a sidecar: nothing is ever pending, admission is always open."""

    pending = False

    def run_pending(self) -> None:
        """Nothing to do."""

    def admit(self) -> bool:
        """Always open."""
        return True

    def note_idle(self) -> None:
        """Nobody waits for it."""

    def sleep_s(self, default: float | None = None) -> float | None:
        """No reason to sleep shorter."""
        return default


class Scheduler:
    """Queues, running batch and passes of one rank."""

    def __init__(
        self,
        *,
        model: Model,
        pool: DevicePool,
        cache: CacheController,
        emit: Emit,
        chunk_tokens: int = 256,
        max_running: int = 32,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``emit`` takes the answers; ``chunk_tokens`` bounds the prompt tokens of one pass."""
        self.model = model
        self.pool = pool
        self.cache = cache
        self.hook: Hook = NoHook()
        self.held: list[Request] = []  # lists: other threads copy them, which a deque refuses while it changes
        self.waiting: list[Request] = []
        self.loading: list[Request] = []
        self.running: list[Request] = []
        self.closed: str | None = None  # why new requests are refused
        self.passes = 0
        self._emit = emit
        self._page_size = pool.geometry.page_size
        self._chunk_tokens = max(ROWS, chunk_tokens - chunk_tokens % ROWS)
        self._max_running = max_running
        self._reserved = 0  # pages that loading and running requests may need at most
        self._flushes: list[tuple[float, Flush]] = []
        self._clock = clock

    # ------------------------------------------------------------------ what the front asks

    def submit(self, message: Submit) -> None:
        """A new request. It is answered by one ``Done`` or ``Failed``, unless it is cancelled."""
        refusal = self._refusal(message)
        if refusal is not None:
            self._emit(Failed(message.rid, refusal.body()))
            return
        request = Request.of(message)
        if self.hook.admit():
            self._enqueue(request)
        else:
            self.held.append(request)

    def cancel(self, rid: str) -> None:
        """Release everything that request ``rid`` holds, wherever it is; unknown: nothing."""
        for queue in (self.held, self.waiting, self.loading, self.running):
            for request in queue:
                if request.rid == rid:
                    queue.remove(request)
                    self._drop(request, queue is not self.held, queue in (self.loading, self.running))
                    return

    def flush(self, message: Flush) -> None:
        """Empty L1 and L2 at the next idle moment; answered by ``Flushed``."""
        self._flushes.append((self._clock() + message.timeout_s, message))

    def close(self, reason: str) -> None:
        """Refuse new requests and those that are held; the others go on."""
        self.closed = reason
        while self.held:
            self._fail(self.held.pop(0))

    def fail_all(self) -> None:
        """End every request now, as refused."""
        for queue in (self.held, self.waiting, self.loading, self.running):
            for request in list(queue):
                self.cancel(request.rid)
                self._fail(request)

    @property
    def busy(self) -> bool:
        """A request is somewhere in the engine's queues (held ones are not, rule 12)."""
        return bool(self.waiting or self.loading or self.running)

    # ------------------------------------------------------------------ what the hook asks

    def idle_report(self) -> IdleReport:
        """Every counter that can block (F1, F2); what this engine cannot have is 0, not missing."""
        running = [*self.loading, *self.running]
        counters = dict.fromkeys(MANDATORY_COUNTERS, 0)
        counters["waiting_queue"] = len(self.waiting)
        counters["running_batch"] = len(running)
        counters["chunked_prefill"] = sum(r.half_prefilled for r in running)
        counters.update(self.cache.counters())
        ages = self.cache.ages_ms()
        now = self._clock()
        for name, requests in (("waiting_queue", list(self.waiting)), ("running_batch", running)):
            if requests:
                ages[name] = oldest_ms(requests, now)
        return IdleReport(counters=counters, ages_ms=ages, held=len(self.held))

    # ------------------------------------------------------------------ passes

    def run_pass(self) -> bool:
        """Do what can be done now. False: nothing could; sleep until something happens."""
        self.passes += 1
        if self.hook.pending:
            self.hook.run_pending()
        moved = bool(self.cache.pump())  # also when there is nothing to run, or idle is never reached (F1)
        if self.held and self.hook.admit():
            while self.held:
                self._enqueue(self.held.pop(0))
            moved = True
        moved |= self._admit()
        moved |= self._loaded()
        moved |= self._compute()
        if self._flushes:
            moved |= self._try_flushes()
        if not moved:
            self.hook.note_idle()
        return moved

    def sleep_s(self) -> float:
        """How long the loop may sleep when a pass did nothing and nobody wakes it."""
        longest = BUSY_POLL_S if self.busy or self._flushes else IDLE_POLL_S
        hooked = self.hook.sleep_s(longest)
        return longest if hooked is None else min(longest, hooked)

    def _enqueue(self, request: Request) -> None:
        request.begun = self._clock()
        self.cache.begin(request.rid, request.tokens)
        self.waiting.append(request)

    def _admit(self) -> bool:
        """First come first served among those whose prefetch is over; no overtaking for want of room."""
        admitted = False
        for request in list(self.waiting):
            if len(self.running) + len(self.loading) >= self._max_running:
                break
            if self._fetch_pays(request) or not self.cache.ready(request.rid):
                continue
            need = pages_for(request.most_tokens, self._page_size)
            if self._reserved + need > self.pool.num_pages:
                break
            admission = self.cache.admit(request.rid)
            if admission is None:
                break
            self.waiting.remove(request)
            self._reserved += need
            (self.loading if admission.loading else self.running).append(request)
            self._start_from(request, admission)
            admitted = True
        return admitted

    def _fetch_pays(self, request: Request) -> bool:
        """best_effort: a fetch under way is still cheaper than computing."""
        storage = self.cache.storage
        if storage.bypassed or storage.knobs.prefetch_policy != "best_effort" or not self.cache.fetching(request.rid):
            return False
        return self._clock() - request.begun < request.prompt_tokens * BEST_EFFORT_S_PER_TOKEN

    def _start_from(self, request: Request, admission: Admission) -> None:
        request.pages = list(admission.pages)
        request.computed = len(admission.pages) * self._page_size
        request.device_tokens = admission.device_tokens
        request.host_tokens = admission.host_tokens
        request.storage_tokens = admission.storage_tokens

    def _loaded(self) -> bool:
        """A load-back that failed leaves fewer pages: the rest of the prompt is recomputed (F80)."""
        moved = False
        for request in list(self.loading):
            admission = self.cache.loaded(request.rid)
            if admission is not None:
                self.loading.remove(request)
                self._start_from(request, admission)
                self.running.append(request)
                moved = True
        return moved

    def _compute(self) -> bool:
        """One forward pass: a token of every decoding request, and up to ``chunk_tokens`` prompt tokens."""
        batch: list[Request] = []
        spans: list[Span] = []
        budget = self._chunk_tokens
        for request in self.running:
            count = request.left
            if request.prefilling:
                if budget <= 0:
                    continue
                if count > budget:  # cut at a row boundary: a block that is half filled costs as much as a full one
                    count = budget - (request.computed + budget) % ROWS
                if count <= 0:
                    continue
            missing = pages_for(request.computed + count, self._page_size) - len(request.pages)
            if missing > 0:
                pages = self.cache.alloc(request.rid, missing)
                if pages is None:
                    continue  # eviction is under way
                request.pages.extend(pages)
            if request.prefilling:
                budget -= count
            batch.append(request)
            spans.append(request.span(count))
        if not batch:
            return False
        chosen = self.model.forward(spans, self.pool)
        for request, span, token in zip(batch, spans, chosen, strict=True):
            self._computed(request, span, token)
        return True

    def _computed(self, request: Request, span: Span, token: int | None) -> None:
        was_prefilling = request.prefilling
        request.computed = span.end
        if token is not None:
            request.tokens.append(token)
        reason = request.finish_reason
        if reason is not None:
            self.running.remove(request)
            self._reserved -= pages_for(request.most_tokens, self._page_size)
            self.cache.finish(request.rid, request.tokens[: request.computed])
            self._emit(request.done(reason))
        elif was_prefilling:
            request.pages = list(self.cache.commit(request.rid, request.tokens[: request.computed]))

    # ------------------------------------------------------------------ endings

    def _drop(self, request: Request, known_to_cache: bool, reserved: bool) -> None:
        if reserved:
            self._reserved -= pages_for(request.most_tokens, self._page_size)
        if known_to_cache:
            self.cache.abort(request.rid)

    def _fail(self, request: Request) -> None:
        self._emit(Failed(request.rid, NoEngine(self.closed or "the engine is stopping").body()))

    def _refusal(self, message: Submit) -> HicacheError | None:
        if self.closed is not None:
            return NoEngine(self.closed)
        if not message.tokens or message.max_new_tokens < 1:
            return InvalidRequest("a request needs at least one prompt token and one new token")
        total = len(message.tokens) + message.max_new_tokens
        most = min(self.model.context, self.pool.num_pages * self._page_size)
        if total > most:
            return InvalidRequest(f"{total} tokens with the answer: this engine has room for {most}")
        return None

    def _try_flushes(self) -> bool:
        now = self._clock()
        done = not self.busy and self.cache.flush()
        left: list[tuple[float, Flush]] = []
        for deadline, message in self._flushes:
            if done:
                self._emit(Flushed(message.call, True))
            elif now >= deadline:
                blocked = {name: n for name, n in self.idle_report().counters.items() if n}
                self._emit(Flushed(message.call, False, blocked))
            else:
                left.append((deadline, message))
        ended = len(left) < len(self._flushes)
        self._flushes = left
        return ended
