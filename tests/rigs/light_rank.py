"""Light ranks: the real agent, gate and transaction over a small adapter without a model.

In a test: ``LightRank(endpoint)`` has its own scheduler thread; ``LightLoop`` hosts many ranks on one thread (scale
tests). As a process: ``python -m tests.rigs.light_rank --endpoint ipc://...``; it reads one JSON command a line
on stdin and answers each with one JSON line, so that a test never has to sleep:

    {"counters": {"waiting_queue": 2}}     set idle counters (0 removes the load)
    {"report": true}                       the rank's report, ledger, held requests, threads
    {"request": 3}                         three requests arrive: admitted, or held while the gate is closed
    {"cut": true}                          the agent drops its connection
    {"quit": true}

What the extra config can script stands in ``light_adapter``.
"""

import argparse
import json
import os
import secrets
import sys
import threading
import time
from collections import deque
from typing import Any

import msgspec
import zmq
from tests.rigs.light_adapter import LightAdapter

from hicache_hooks.faults import Faults, LinkCut
from hicache_hooks.hook import RankHook
from hicache_hooks.leases import Clock, monotonic
from hicache_proto.model import RankIdentity


class LightLoop:
    """One scheduler thread for any number of ranks; a pass costs what is due, not what is there."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._stopping = False
        self._ready: deque[LightRank] = deque()
        self._due: dict[LightRank, float] = {}  # when a rank wants its next turn, monotonic
        self._thread = threading.Thread(target=self._run, name="light-scheduler", daemon=True)

    def add(self, rank: "LightRank") -> None:
        """Before ``start``, or from any thread later."""
        self._due = {**self._due, rank: 0.0}
        self.wake(rank)

    def remove(self, rank: "LightRank") -> None:
        """Give it no more turns."""
        self._due = {other: at for other, at in self._due.items() if other is not rank}

    def start(self) -> None:
        """Run."""
        self._thread.start()

    def wake(self, rank: "LightRank") -> None:
        """End the present sleep for ``rank``."""
        self._ready.append(rank)
        self._event.set()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Stop; the ranks are closed by their owner."""
        self._stopping = True
        self._event.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        scan_at = 0.0  # no rank is due before; a wake-up of one of 256 must not look at all of them
        while not self._stopping:
            self._event.clear()
            now = time.monotonic()
            turns = set()
            if now >= scan_at:
                turns = {rank for rank, at in self._due.items() if at <= now}
                scan_at = min((at for at in self._due.values() if at > now), default=now + 1.0)
            while self._ready:
                turns.add(self._ready.popleft())
            for rank in turns:
                if rank in self._due:
                    self._due[rank] = due = now + rank.turn()
                    scan_at = min(scan_at, due)
            sleep_s = scan_at - time.monotonic()
            if sleep_s > 0:
                self._event.wait(sleep_s)


class LightRank:
    """A rank: hook, adapter, and the held requests in front of a queue that is never served."""

    def __init__(
        self,
        endpoint: str,
        identity: RankIdentity | None = None,
        *,
        engine_id: str = "light",
        incarnation: str | None = None,
        epoch: int = 0,
        loop: LightLoop | None = None,
        clock: Clock = monotonic,
        faults: Faults | None = None,
        **hook_options: Any,
    ) -> None:
        self._own_loop = loop is None
        self.loop = loop or LightLoop()
        self.adapter = LightAdapter(identity, self._wake)
        self.held = 0
        self.admitted = 0
        self._arrived = 0
        self.hook = RankHook(
            self.adapter,
            endpoint,
            engine_id=engine_id,
            incarnation=incarnation or secrets.token_hex(4),
            epoch=epoch,
            clock=clock,
            faults=faults,
            **hook_options,
        )
        self.loop.add(self)
        if self._own_loop:
            self.loop.start()

    def _wake(self) -> None:
        self.loop.wake(self)

    def turn(self) -> float:
        """One scheduler pass; how long the thread may sleep after it, in seconds."""
        hook = self.hook
        if hook.pending:
            hook.run_pending()
        arrived, self._arrived = self._arrived, 0
        if hook.gate.is_open:
            self.admitted += arrived
        else:
            self.held += arrived
        if self.held and hook.admit():
            self.admitted += self.held
            self.held = 0
        hook.note_idle()
        return hook.sleep_s(1.0) or 0.0

    def request(self, count: int = 1) -> None:
        """``count`` requests arrive."""
        self._arrived += count
        self._wake()

    def cut(self) -> None:
        """Drop the connection to the sidecar; the agent connects again by itself."""

        def job() -> None:
            raise LinkCut("by the test")

        self.hook.agent.run_soon(job)

    def set_counters(self, **counters: int) -> None:
        """Load or unload the fake engine."""
        self.adapter.counters.update(counters)
        self._wake()

    def facts(self) -> dict[str, Any]:
        """What a test looks at after the dust has settled."""
        return {
            "report": msgspec.to_builtins(self.hook.report()),
            "pages": self.adapter.ledger.owners(),
            "held": self.held,
            "admitted": self.admitted,
            "open": self.hook.gate.is_open,
            "threads": sorted(t.name for t in threading.enumerate()),
            "fds": len(os.listdir("/proc/self/fd")),
            "tasks": len(os.listdir("/proc/self/task")),
            "link": dict(self.hook.agent.counts),
            "connected": self.hook.agent.connected,
            "published": self.adapter.published,
        }

    def close(self) -> None:
        """Leave in good order."""
        if self._own_loop:
            self.loop.stop()
        else:
            self.loop.remove(self)
        self.hook.close("test ends")


def main(argv: list[str] | None = None) -> int:
    """One or more ranks as a process; see the module docstring."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--engine-id", default="light")
    parser.add_argument("--incarnation", default=None)
    parser.add_argument("--epoch", type=int, default=0)
    parser.add_argument("--dp-rank", type=int, default=0)
    parser.add_argument("--dp-size", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=1, help="host this many replicas, from --dp-rank on")
    parser.add_argument("--one-core", action="store_true", help="for many ranks: keep this process on one core")
    parser.add_argument("--busy", action="append", default=[], metavar="COUNTER=N")
    parser.add_argument("--close-timeout", type=float, default=3.0)
    parser.add_argument("--no-attach", action="store_true", help="capability attach=false")
    args = parser.parse_args(argv)
    if args.one_core:
        # One interpreter runs on one core at a time. Over two its threads wake each other across them, which doubles
        # its time; and none should push another off the core before that one sleeps by itself.
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    if args.ranks > 1:
        # Each of some 500 threads that wait for the interpreter wakes up every switch interval (5 ms) to ask for it: a
        # third of this process's time. All of them let go of it by themselves within a millisecond.
        sys.setswitchinterval(1.0)
    loop = LightLoop()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()  # one for all: a context has threads of its own
    incarnation = args.incarnation or secrets.token_hex(4)
    ranks = [
        LightRank(
            args.endpoint,
            RankIdentity(dp_rank=dp, dp_size=args.dp_size),
            engine_id=args.engine_id,
            incarnation=incarnation,
            epoch=args.epoch,
            loop=loop,
            close_timeout_s=args.close_timeout,
            context=context,
        )
        for dp in range(args.dp_rank, args.dp_rank + args.ranks)
    ]
    for rank in ranks:
        rank.adapter.caps = msgspec.structs.replace(rank.adapter.caps, attach=not args.no_attach)
        rank.set_counters(**{name: int(count) for name, _, count in (item.partition("=") for item in args.busy)})
    loop.start()
    print(json.dumps({"ready": os.getpid()}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        for rank in ranks:
            rank.set_counters(**command.get("counters", {}))
            rank.request(int(command.get("request", 0)))
            if command.get("cut"):
                rank.cut()
        print(json.dumps([rank.facts() for rank in ranks]), flush=True)
        if command.get("quit"):
            break
    loop.stop()
    for rank in ranks:
        rank.close()
    context.term()
    return 0


if __name__ == "__main__":
    sys.exit(main())
