"""Checks of the embedded engine on a GPU, in one process: ``python tests/gpu/check.py [--device cuda] [--cycles 50]``.

Self-contained: needs a checkout and torch, msgspec, pyzmq, numpy, xxhash; no sidecar, no network. It drives one rank by
hand through the real hook's transaction (PREPARE, FREEZE, COMMIT, FINALIZE) and looks at:

* equal outputs: recomputed, from L1, from L2, from L3, in every layout, and while sets are swapped under load;
* transfer threads and CUDA streams of the installed set, before, while and after a store is attached;
* pinned memory, device memory, threads, descriptors and resident memory, flat over the cycles;
* how long the scheduler stood still for COMMIT, medians and worst.

Exit codes: 0 all checks passed, 1 some failed, 3 no CUDA device. ``--device cpu`` runs the same steps without the CUDA
numbers: it checks the script, not the GPU.
"""

import argparse
import gc
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "proto"), str(ROOT / "engine_hooks")]

NO_DEVICE = 3
LEASE_S = 30.0
WAIT_S = 60.0
WARM_UP_CYCLES = 10  # allocators and the interpreter settle; slopes are taken after them


class Checks:
    """Names, verdicts and numbers, printed as they come."""

    def __init__(self) -> None:
        self.failed = 0

    def that(self, name: str, ok: bool, said: object = "") -> None:
        """One check."""
        self.failed += not ok
        print(f"{'ok  ' if ok else 'FAIL'}  {name}" + (f": {said}" if said != "" else ""), flush=True)


class Engine:
    """One rank on one device, its hook without a sidecar, and the operations that a sidecar would send."""

    def __init__(self, device: str, **changes: Any) -> None:
        from hicache_hooks.embedded.adapter import EmbeddedAdapter
        from hicache_hooks.embedded.options import EngineOptions, ModelShape
        from hicache_hooks.embedded.rank import Rank
        from hicache_hooks.hook import RankHook

        self.woken = threading.Event()
        self.answers: dict[str, Any] = {}
        small = {"model": ModelShape(layers=2, hidden=64, head_dim=16)} if device == "cpu" else {}
        changes = {**small, **changes}
        values = {"device": device, "l1_tokens": 2048, "l2_tokens": 8192, "context": 1024, **changes}
        self.rank = Rank(EngineOptions(**values), emit=self._emit, wake=self.woken.set)
        self.adapter = EmbeddedAdapter(self.rank)
        self.hook = RankHook(
            self.adapter, "ipc:///nonexistent/hooks.sock", engine_id="check", incarnation="check", start=False
        )
        self.rank.scheduler.hook = self.hook
        self.serial = 0
        self.stalls_us: list[float] = []

    def _emit(self, message: Any) -> None:
        self.answers[getattr(message, "rid", getattr(message, "call", ""))] = message

    # -- passes

    def turn(self) -> None:
        """One pass, or one sleep."""
        self.woken.clear()
        if not self.rank.scheduler.run_pass():
            self.woken.wait(min(0.05, self.rank.scheduler.sleep_s()))

    def until(self, what: str, true: Callable[[], bool]) -> None:
        """Passes until ``true()``."""
        deadline = time.monotonic() + WAIT_S
        while not true():
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {what} within {WAIT_S:g} s: {self.rank.scheduler.idle_report().counters}")
            self.turn()

    def submit(self, tokens: Sequence[int], new: int = 16) -> str:
        """Start a request."""
        from hicache_hooks.embedded.messages import Submit

        self.serial += 1
        rid = f"q{self.serial}"
        self.rank.scheduler.submit(Submit(rid, list(tokens), new))
        return rid

    def finish(self, rids: Sequence[str]) -> list[Any]:
        """Answers of these requests."""
        self.until("answers", lambda: all(rid in self.answers for rid in rids))
        return [self.answers[rid] for rid in rids]

    def generate(self, tokens: Sequence[int], new: int = 16) -> Any:
        """One request, alone."""
        return self.finish([self.submit(tokens, new)])[0]

    def idle(self) -> None:
        """Until nothing is in flight; the ledgers are checked."""
        self.until("idle moment", lambda: not any(self.rank.scheduler.idle_report().counters.values()))
        self.rank.cache.check()

    def flush(self) -> None:
        """Empty L1 and L2."""
        self.idle()
        if not self.rank.cache.flush():
            raise RuntimeError("the cache was not flushed")

    # -- operations

    def move(self, target: Any, *, hot: bool = False, arriving: Sequence[Sequence[int]] = ()) -> list[str]:
        """PREPARE, FREEZE (a drain; not when hot), COMMIT, FINALIZE of the next operation, as a sidecar sends them.

        ``arriving`` are prompts that come in while admission is closed; returns their requests.
        """
        from hicache_proto.hooklink import Commit, Finalize, Freeze, Prepare
        from hicache_proto.transaction import Ended

        self.serial += 1
        n = self.serial
        self._call(n, Prepare(target, LEASE_S, hot=hot))
        self.until("prepared set", lambda: self._phase() != "preparing")
        self._expect("prepared")
        held: list[str] = []
        if not hot:
            self._call(n, Freeze(1, LEASE_S, drain=True))
            held = [self.submit(prompt) for prompt in arriving]
            self.until("frozen rank", lambda: self._phase() != "draining")
            self._expect("frozen")
            if any(rid in self.answers for rid in held):
                raise RuntimeError("a request was admitted while admission was closed")
        began = time.perf_counter()
        self._call(n, Commit(LEASE_S))
        self.stalls_us.append((time.perf_counter() - began) * 1e6)
        self._expect("switched")
        self._call(n, Finalize())
        self.until("closed old set", lambda: not self.hook.transaction.busy and not self._closing())
        if self.hook.transaction.record.ended is not Ended.FINAL:
            raise RuntimeError(f"operation {n} ended {self.hook.transaction.record.ended}")
        return held

    def _closing(self) -> bool:
        return not all(over.is_set() for over in list(self.hook._closer._running.values()))

    def _call(self, n: int, body: Any) -> None:
        from hicache_proto.hooklink import Call, phase_of

        self.hook.deliver(Call("", n, phase_of(body), 1, body))
        self.hook.run_pending()

    def _phase(self) -> str:
        return str(self.hook.transaction.record.phase)

    def _expect(self, phase: str) -> None:
        if self._phase() != phase:
            raise RuntimeError(f"rank is {self._phase()}, not {phase}: {self.hook.transaction.view}")

    def close(self) -> list[str]:
        """Everything away; names of threads that did not end."""
        self.hook.close("done")
        return self.adapter.shutdown(5.0)


def is_helper(thread: threading.Thread) -> bool:
    """A helper of the hook, at work or waiting for the next job: it ends by itself (``helpers``)."""
    return thread.name.startswith(("hicache-helper", "hicache-build", "hicache-close"))


def transfer_threads() -> list[str]:
    """Worker threads of storage sets."""
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("hicache-") and not is_helper(t))


def streams(engine: Engine) -> list[int]:
    """CUDA stream ids of the installed set's two copiers; empty on CPU."""
    storage = engine.rank.cache.storage
    found = [getattr(copier, "_stream", None) for copier in (storage.to_host, storage.to_device)]
    return [stream.cuda_stream for stream in found if stream is not None]


def text(seed: int, n: int) -> list[int]:
    """A prompt of ``n`` tokens."""
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(n)]


def file_target(path: Path) -> Any:
    """The file backend below ``path``; a fetch is waited for."""
    from hicache_proto.model import TargetState

    config = json.dumps({"file_storage_path": str(path), "prefetch_threshold": 16})
    return TargetState(backend="file", extra_config=config, prefetch_policy="wait_complete")


def measures(device: str) -> dict[str, int]:
    """What must not grow: bytes, threads, descriptors."""
    import torch

    gc.collect()
    status = Path("/proc/self/status").read_text()
    resident = int(status.split("VmRSS:")[1].split()[0]) * 1024
    found = {
        "threads": sum(not is_helper(thread) for thread in threading.enumerate()),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "resident": resident,
    }
    if device == "cuda":
        torch.cuda.synchronize()
        host = torch.cuda.host_memory_stats()
        found["pinned"] = int(host["allocated_bytes.current"])
        found["device memory"] = torch.cuda.memory_allocated()
    return found


# ------------------------------------------------------------------------------------------------ the checks


def check_tiers(checks: Checks, device: str, root: Path, layout: str) -> None:
    """Recompute, L1, L2 and L3 give the same tokens."""
    engine = Engine(device, layout=layout, l1_tokens=1024)
    prompts = [text(i, 300 + 60 * i) for i in range(6)]
    expected = []
    for prompt in prompts:
        engine.flush()
        expected.append(engine.generate(prompt).output)
    engine.flush()
    rids = [engine.submit(prompt) for prompt in prompts]
    checks.that(f"{layout}: together as alone", [d.output for d in engine.finish(rids)] == expected)
    again = [engine.generate(prompt) for prompt in prompts]
    engine.idle()
    hits = (sum(d.device for d in again), sum(d.host for d in again))
    checks.that(f"{layout}: from L1 and L2 as computed", [d.output for d in again] == expected and hits[1] > 0, hits)
    engine.move(file_target(root / layout))
    engine.flush()
    for prompt in prompts:
        engine.generate(prompt)
    engine.flush()
    fetched = [engine.generate(prompt) for prompt in prompts]
    stored = sum(d.storage for d in fetched)
    checks.that(f"{layout}: from L3 as computed", [d.output for d in fetched] == expected and stored > 1000, stored)
    errors = engine.rank.cache.stats().get("internal_errors", 0)
    checks.that(f"{layout}: no internal error, nothing left running", errors == 0 and engine.close() == [])


def check_threads(checks: Checks, device: str, root: Path) -> None:
    """Threads and streams follow the installed set."""
    from hicache_proto.model import TargetState

    engine = Engine(device)
    before, first = transfer_threads(), streams(engine)
    checks.that("detached: transfer threads only", len(before) == 2, before)
    engine.move(file_target(root / "threads-a"))
    attached, second = transfer_threads(), streams(engine)
    gone = not set(before) & set(attached)
    checks.that("attached: the set's own threads, the old ones gone", gone and len(attached) > 2, attached)
    engine.move(file_target(root / "threads-b"))
    swapped = transfer_threads()
    checks.that("swapped: as many, none of the old", len(swapped) == len(attached) and not set(swapped) & set(attached))
    engine.move(TargetState())
    after, last = transfer_threads(), streams(engine)
    checks.that("detached again: as at the start", len(after) == len(before), after)
    if device == "cuda":
        counts = [len(set(ids)) for ids in (first, second, last)]
        default = 0  # the default stream's handle
        checks.that(
            "a stream per direction, none the default", counts == [2, 2, 2] and default not in (*first, *second, *last)
        )
    checks.that("all threads ended", engine.close() == [] and transfer_threads() == [], transfer_threads())


def check_swaps(checks: Checks, device: str, root: Path, swaps: int, mode: str) -> None:
    """Sets change while requests run (hot), or run out while new ones wait (drain): equal outputs, no failure."""
    engine = Engine(device, l1_tokens=1024, l2_tokens=2048)
    prompts = [text(100 + i, 100 + 70 * i) for i in range(8)]
    expected = [engine.generate(prompt).output for prompt in prompts]
    late = 0 if mode == "hot" else 2  # of them arrive when admission is closed already
    wrong = 0
    engine.move(file_target(root / f"{mode}-b"))
    for turn in range(swaps):
        rids = [engine.submit(prompt) for prompt in prompts[late:]]
        for _ in range(turn % 4):
            engine.turn()
        target = file_target(root / f"{mode}-{'ab'[turn % 2]}")
        held = engine.move(target, hot=mode == "hot", arriving=prompts[:late])
        wrong += [d.output for d in engine.finish([*held, *rids])] != expected
        engine.flush()  # so that the next round reads what this one stored
    hits = engine.adapter.usage()["get"].hit
    checks.that(f"{swaps} {mode} swaps under load: outputs equal", wrong == 0 and hits > 0, f"{hits} pages read")
    checks.that(f"{mode}: nothing left running", engine.close() == [])


def check_cycles(checks: Checks, device: str, root: Path, cycles: int) -> None:
    """Attach and detach again and again: nothing grows; COMMIT's stall."""
    from hicache_proto.model import TargetState

    engine = Engine(device)
    prompt = text(200, 400)
    expected = engine.generate(prompt).output
    wrong = 0
    warm = min(WARM_UP_CYCLES, cycles // 2)
    start: dict[str, int] = {}
    for cycle in range(warm + cycles):
        if cycle == warm:
            start = measures(device)
        engine.move(file_target(root / "cycles"))
        engine.flush()
        wrong += engine.generate(prompt).output != expected
        engine.idle()
        engine.move(TargetState())
    end = measures(device)
    checks.that(f"{warm + cycles} attach/detach cycles: outputs equal", wrong == 0)
    for name in start:
        grown = end[name] - start[name]
        limit = 16 << 20 if name == "resident" else 0
        checks.that(f"flat over {cycles} cycles: {name}", grown <= limit, f"{start[name]} -> {end[name]}")
    stalls = engine.stalls_us
    said = f"median {statistics.median(stalls):.0f} us, worst {max(stalls):.0f} us of {len(stalls)}"
    checks.that("COMMIT stalls the scheduler under 2 ms at the median", statistics.median(stalls) < 2000, said)
    checks.that("cycles: nothing left running", engine.close() == [])


def main(argv: Sequence[str] | None = None) -> int:
    """Run all checks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--cycles", type=int, default=50, help="measured attach/detach cycles, after the warm-up")
    parser.add_argument("--swaps", type=int, default=20)
    options = parser.parse_args(argv)
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: nothing was checked (torch.cuda.is_available() is false)", file=sys.stderr)
        return NO_DEVICE
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU (a run of the script, not of a GPU)"
    print(f"torch {torch.__version__} on {name}")
    checks = Checks()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hicache-gpu-") as folder:
        root = Path(folder)
        for layout in ("layer_first", "page_first", "page_first_direct", "page_head"):
            check_tiers(checks, options.device, root, layout)
        check_threads(checks, options.device, root)
        for mode in ("hot", "drain"):
            check_swaps(checks, options.device, root, options.swaps, mode)
        check_cycles(checks, options.device, root, options.cycles)
    print(f"{'all passed' if not checks.failed else f'{checks.failed} failed'} in {time.monotonic() - began:.1f} s")
    return 1 if checks.failed else 0


if __name__ == "__main__":
    sys.exit(main())
