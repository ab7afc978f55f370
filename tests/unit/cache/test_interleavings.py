"""F42: random interleavings of requests, transfers, aborts, attach and detach; nothing is lost or freed twice.

The sets are never started: the test takes items off their queues and runs, fails or delays them itself, so that
every interleaving is reproducible from its seed.
"""

import functools
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from tests.unit.cache.support import PAGE, MemoryStore, Rig, prompt

from hicache_hooks.cache.storage_set import SetLimits, StorageSet

# Prompts that share prefixes, so that nodes split while transfers hold them.
_A, _B = prompt(6), prompt(5, start=2)
PROMPTS = [_A, _A[: 4 * PAGE] + _B, _B, _A[: 2 * PAGE] + prompt(3, start=3), _B[: 3 * PAGE + 1], prompt(2, start=4)]


@functools.cache
def _stored() -> dict[str, bytes]:
    """Half of the prompts as a store holds them after an earlier run."""
    store = MemoryStore()
    rig = Rig(store=store)
    for tokens in PROMPTS[:3]:
        rig.serve(tokens)
    rig.close()
    return store.data


class _Play:
    """One interleaving; ``pick(n)`` chooses a number below n."""

    def __init__(self, pick: Callable[[int], int]) -> None:
        self.pick = pick
        write = ("write_through", "write_back", "write_through_selective")[pick(3)]
        fetch = ("best_effort", "wait_complete", "timeout")[pick(3)]
        self.store = MemoryStore()
        self.store.data.update(_stored())
        self.now = 0.0
        self.rig = Rig(
            manual=True,
            store=self.store if pick(4) else None,
            device_pages=16,
            host_pages=12,
            clock=lambda: self.now,
            limits=SetLimits(threads_per_direction=1, batch_pages=2),
            write_policy=write,
            prefetch_policy=fetch,
        )
        self.ctl = self.rig.ctl
        self.live: dict[str, dict[str, Any]] = {}
        self.old: list[StorageSet] = []

    def step(self) -> None:
        actions = (
            *(self.begin, self.advance, self.advance, self.advance, self.advance),
            *(self.work, self.work, self.work, self.work, self.work, self.work),
            *(self.abort, self.swap, self.stop),
        )
        actions[self.pick(len(actions))]()
        if self.pick(3):
            self.ctl.pump()
        self.now += 0.3 * self.pick(2)
        self.rig.check()

    def begin(self) -> None:
        if len(self.live) < 4:
            tokens = PROMPTS[self.pick(len(PROMPTS))]
            self.live[self.rig.start(tokens)] = {"tokens": tokens, "pages": None}

    def advance(self) -> None:
        """The next step of a request's life."""
        if not self.live:
            return
        rid = list(self.live)[self.pick(len(self.live))]
        request = self.live[rid]
        tokens = request["tokens"]
        if request["pages"] is None:
            if self.ctl.ready(rid) and self.ctl.admit(rid) is not None:
                request["pages"] = []
        elif not request["pages"]:
            admission = self.ctl.loaded(rid)
            if admission is None:
                return
            self.verify(tokens, admission.pages)
            fresh = self.ctl.alloc(rid, -(-len(tokens) // PAGE) - len(admission.pages))
            if fresh is not None:
                request["pages"] = [*admission.pages, *fresh]
                for i in range(len(admission.pages), len(tokens) // PAGE):
                    self.rig.device.page(request["pages"][i]).copy_(self.rig.content(tokens, i))
        elif self.pick(2):
            request["pages"] = self.ctl.commit(rid, tokens[: PAGE * self.pick(len(tokens) // PAGE + 1)])
            self.verify(tokens, request["pages"][: len(tokens) // PAGE])
        else:
            self.ctl.finish(rid, tokens)
            del self.live[rid]

    def verify(self, tokens: list[int], pages: list[int]) -> None:
        for i, page in enumerate(pages):
            assert torch.equal(self.rig.device.page(page), self.rig.content(tokens, i))

    def queues(self) -> list[Any]:
        sets = [*self.old, self.ctl.storage]
        return [w._queue for s in sets for w in s._all if len(w._queue)]

    def work(self) -> None:
        """A worker runs (or fails) one item."""
        queues = self.queues()
        if queues:
            item = queues[self.pick(len(queues))]._items.popleft()
            if self.pick(8):
                item.run()
            else:
                item.failed(OSError("injected"))

    def abort(self) -> None:
        if self.live:
            rid = list(self.live)[self.pick(len(self.live))]
            self.ctl.abort(rid)
            self.ctl.abort(rid)  # a second one changes nothing
            del self.live[rid]

    def swap(self) -> None:
        """Attach, detach or swap; the old set keeps its work."""
        store = self.store if self.pick(2) else None
        self.ctl.backfill_slice(1.0)
        self.old.append(self.ctl.install(self.rig.make_set(store)))

    def stop(self) -> None:
        """An old set is closed by force: what is queued ends as cancelled (F119)."""
        if self.old:
            # Copies between the tiers are let through by a live set; here nobody would run them.
            gone = self.old.pop(self.pick(len(self.old)))
            for workers in gone._all:
                workers.signal_stop()

    def end(self) -> None:
        """Everything ends: then nothing is held, and the tree can be emptied."""
        for rid in list(self.live):
            self.ctl.abort(rid)
        while True:
            for queue in self.queues():
                queue._items.popleft().run()
            if not self.ctl.pump() and not self.queues():
                break
        self.rig.check()
        ctl = self.ctl
        assert not any(ctl.counters().values())
        assert ctl.tree.locks() == 0
        for ledger in (ctl.host_ledger, ctl.device_ledger):
            assert (ledger.reserved, ledger.open) == (0, 0)
            assert sum(ledger.started.values()) == sum(ledger.ended.values())
        assert ctl.flush()
        assert (ctl.device_ledger.free, ctl.host_ledger.free) == (16, 12)


@pytest.mark.parametrize("block", range(8))
def test_no_page_is_lost_or_freed_twice(block: int) -> None:
    """F42, F22, F119: 2000 interleavings by seed, the invariants after each step, contents compared.

    Plain seeds: hypothesis prefers simple bytes, which met the rare races (an orphaned fetch, a load-back raced by
    a computation) ten times less often.
    """
    for seed in range(block * 250, block * 250 + 250):
        random = Random(seed)
        play = _Play(lambda n, random=random: random.randrange(n))  # type: ignore[misc]
        try:
            for _ in range(45):
                play.step()
            play.end()
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
