"""Scheduler processes: start, restart when one dies, stop with a deadline, leave nothing behind.

Processes are spawned, never forked (a ZMQ context does not survive a fork), stay in the parent's process group, and
get a signal from the kernel when the parent dies. A rank that died is started again with the next epoch; one that
dies young again and again is started with growing pauses, so that a broken install does not eat the machine.
"""

import asyncio
import contextlib
import logging
import os
import sys
import time
import uuid

import msgspec

from hicache_hooks.embedded.options import EngineOptions
from hicache_hooks.embedded.router import Router

log = logging.getLogger(__name__)

YOUNG_S = 10.0  # a process that lived shorter than this counts as a failed start
FIRST_PAUSE_S = 0.25
MAX_PAUSE_S = 10.0
KILL_MARGIN_S = 1.0  # of the stop budget: kept for killing and reaping


class RankSpec(msgspec.Struct, frozen=True):
    """What a scheduler process is started with, as JSON on its standard input."""

    options: EngineOptions
    rank: int
    epoch: int
    incarnation: str  # one launch of the engine
    front: str  # ZMQ endpoint
    parent_pid: int


class Supervisor:
    """The scheduler processes of one engine."""

    def __init__(self, options: EngineOptions, router: Router, endpoint: str) -> None:
        self.incarnation = uuid.uuid4().hex
        self._options = options
        self._router = router
        self._endpoint = endpoint
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._stopping = asyncio.Event()
        self._unstartable = False

    def start(self) -> None:
        """Start a process per rank and keep it alive."""
        self._keepers = [asyncio.create_task(self._keep(rank)) for rank in range(self._options.dp)]

    async def ready(self) -> bool:
        """True once every rank serves; False when one ended before it ever did: then the options are to blame."""
        while not (self._router.all_up or self._unstartable):
            self._router.changed.clear()
            await self._router.changed.wait()
        return not self._unstartable

    async def stop(self, timeout_s: float) -> bool:
        """End all processes within ``timeout_s``; True when every one left in good order (F72)."""
        self._stopping.set()
        by = time.monotonic() + timeout_s
        for replica in self._router.replicas:
            process = self._processes.get(replica.rank)
            asked = self._router.stop(replica, max(0.1, timeout_s - KILL_MARGIN_S))
            if not asked and process is not None and process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()
        _, late = await asyncio.wait(self._keepers, timeout=max(0.1, by - KILL_MARGIN_S - time.monotonic()))
        for process in self._processes.values():
            if process.returncode is None:
                log.error("scheduler process %d did not stop in time: killed", process.pid)
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
        if late:
            _, stuck = await asyncio.wait(late, timeout=KILL_MARGIN_S)
            for task in stuck:
                task.cancel()
        return not late and all(process.returncode == 0 for process in self._processes.values())

    async def _keep(self, rank: int) -> None:
        epoch = 0
        pause_s = FIRST_PAUSE_S
        while not self._stopping.is_set():
            epoch += 1
            started = time.monotonic()
            self._router.expect(rank, epoch)
            process = await self._spawn(rank, epoch)
            code = await process.wait()
            self._unstartable |= epoch == 1 and not self._router.replicas[rank].up
            self._router.lost(rank, f"the scheduler process of dp_rank {rank} ended")
            if self._stopping.is_set() or self._unstartable:
                return
            log.error("scheduler process %d of dp_rank %d ended (%s); starting it again", process.pid, rank, _why(code))
            pause_s = FIRST_PAUSE_S if time.monotonic() - started > YOUNG_S else min(MAX_PAUSE_S, pause_s * 2)
            await self._pause(pause_s)

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()

    async def _spawn(self, rank: int, epoch: int) -> asyncio.subprocess.Process:
        spec = RankSpec(self._options, rank, epoch, self.incarnation, self._endpoint, os.getpid())
        environment = dict(os.environ)
        if self._options.device == "cpu":
            environment["OMP_NUM_THREADS"] = "1"  # one rank, one core; and sums keep one order
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "hicache_hooks.embedded.scheduler_main"),
            stdin=asyncio.subprocess.PIPE,
            env=environment,
        )
        self._processes[rank] = process
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it died at once: wait() says so
                process.stdin.write(msgspec.json.encode(spec))
                await process.stdin.drain()
            process.stdin.close()
        return process


def _why(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
