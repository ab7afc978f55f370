"""Checks that must run in one piece inside the process that holds the backend: threads, fork, GIL gaps, leaks."""

import gc
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from tests.rigs.stores.host_main import Opened

TICK_S = 0.002
CHILD_S = 15.0


def hammer(opened: "Opened", threads: int, rounds: int, batch: int) -> dict[str, int]:
    """Threads that write and read overlapping keys through one backend, each with buffers of its own."""
    counts = {"hits": 0, "wrong": 0, "refused": 0}
    raised: list[str] = []
    lock = threading.Lock()

    def work(seed: int) -> None:
        try:
            for turn in range(rounds):
                numbers = [5000 + (turn * batch + i + seed * 3) % (threads * batch) for i in range(batch)]
                stored = opened.put(numbers, 1, seed * batch)
                got = opened.get(numbers, seed * batch)
                with lock:
                    counts["refused"] += stored.count(False)
                    counts["hits"] += got.count("hit")
                    counts["wrong"] += got.count("wrong")
        except Exception as exc:
            raised.append(f"{type(exc).__name__}: {exc}"[:300])

    running = [threading.Thread(target=work, args=(seed,)) for seed in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    if raised:
        raise RuntimeError("; ".join(raised))
    return counts


class GapClock:
    """While inside: the longest time that this process's other threads did not run, in seconds."""

    def __init__(self) -> None:
        self.gap_s = self.took_s = 0.0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        last = time.monotonic()
        while not self._done.is_set():
            time.sleep(TICK_S)  # the pace of the clock that is looked at
            now = time.monotonic()
            self.gap_s = max(self.gap_s, now - last)
            last = now

    def __enter__(self) -> Self:
        self._thread.start()
        self._began = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        self.took_s = time.monotonic() - self._began
        self._done.set()
        self._thread.join()


def gil_gap(opened: "Opened", numbers: list[int], rounds: int) -> dict[str, float]:
    """Longest time that another thread did not run while pages were written and read, in seconds."""
    with GapClock() as clock:
        for _ in range(rounds):
            try:
                opened.put(numbers, 1)
                opened.get(numbers)
            except Exception:  # a dead server is looked at too: only the gap counts here
                pass
    return {"gap_s": clock.gap_s, "took_s": clock.took_s}


def close_gap(opened: "Opened") -> dict[str, float]:
    """As ``gil_gap``, for the close."""
    with GapClock() as clock:
        opened.close()
    return {"gap_s": clock.gap_s, "took_s": clock.took_s}


def strangers(opened: "Opened", number: int) -> dict[str, str]:
    """Put and get with memory that was never registered: what they say."""
    page = memoryview(bytearray(opened.page_bytes))
    said = {}
    for name, call in (("put", opened.backend.batch_put), ("get", opened.backend.batch_get)):
        try:
            said[name] = repr(call([opened.key(number)], [page]))
        except Exception as exc:
            said[name] = f"raised {type(exc).__name__}"
    return said


def fork(opened: "Opened", number: int) -> dict[str, Any]:
    """One call of each kind in a forked child: what it answered, or the exception's name; ``hung`` after a while."""
    answers: dict[str, Any] = {}
    calls: dict[str, Callable[[], Any]] = {
        "get": lambda: opened.get([number])[0],
        "exists": lambda: bool(opened.front.batch_exists([opened.key(number)])[0]),
        "put": lambda: opened.put([number + 1], 1)[0],
    }
    for name, call in calls.items():
        answers[name] = _in_child(call)
    return answers


def _in_child(call: Callable[[], Any]) -> str:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            said = repr(call())
        except BaseException as exc:
            said = f"raised {type(exc).__name__}"
        os.write(write, said.encode()[:200])
        os._exit(0)
    os.close(write)
    try:
        if not select.select([read], [], [], CHILD_S)[0]:
            os.kill(pid, signal.SIGKILL)
            return "hung"
        return os.read(read, 200).decode() or "died"
    finally:
        os.waitpid(pid, 0)
        os.close(read)


def cycles(make: "Callable[[], Opened]", count: int, warm: int) -> dict[str, list[int]]:
    """Descriptors, threads and resident bytes after ``warm`` open/use/close cycles, and after ``count``."""
    found: dict[str, list[int]] = {"fds": [], "threads": [], "rss": []}
    for i in range(count):
        opened = make()
        try:
            if i in (0, count - 1):
                opened.put([1], 1)
                if opened.get([1]) != ["hit"]:
                    raise RuntimeError("a fresh backend does not work")
        finally:
            opened.close()
            opened.memory = memoryview(b"")
        if i + 1 in (warm, count):
            gc.collect()
            found["fds"].append(len(os.listdir("/proc/self/fd")))
            found["threads"].append(len(os.listdir("/proc/self/task")))
            with open("/proc/self/statm") as statm:
                found["rss"].append(int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    return found


def layout(opened: "Opened", layout: str) -> dict[str, Any]:
    """Write pages of a real host pool through seal, guard and backend, lose them, read them back, compare all bits."""
    import torch

    from hicache_hooks.cache.layouts import KvGeometry
    from hicache_hooks.cache.page_io import PageIo
    from hicache_hooks.cache.pages import PageFormat
    from hicache_hooks.cache.pools import HostPool
    from hicache_hooks.guard import Guard
    from hicache_proto.model import LAYOUTS

    torch.set_num_threads(1)
    # 2 * 2 layers * 2 heads * 31 * 4 bytes = 992 a token, 65472 a page: the payload of host_main.py
    geometry = KvGeometry(layers=2, kv_heads=2, head_dim=31, page_size=66, layout=layout)
    host = HostPool(geometry, 16)
    if host.page_bytes != opened.page_bytes:
        raise RuntimeError(f"pages of {host.page_bytes} bytes, the backend has {opened.page_bytes}")
    opened.register(host.memory())
    guard = opened.guard or Guard(opened.backend, name="direct")
    io = PageIo(guard, host, PageFormat(geometry.payload_bytes, opened.namespace))
    generator = torch.Generator().manual_seed(7)
    host.pages.copy_(
        torch.randint(-(2**31), 2**31 - 1, host.pages.shape, generator=generator).to(torch.int32).view(torch.float32)
    )  # every bit pattern, NaNs too
    # Keys of its own: in an engine the layout is part of the namespace, and a page that exists may be kept.
    keys = [opened.key(9000 + 100 * LAYOUTS.index(layout) + i) for i in range(16)]
    before = host.pages.clone().view(torch.int32)
    stored = io.write(keys, list(range(16)))
    host.pages.zero_()
    order = list(reversed(range(16)))  # other places than they came from
    read = io.read(keys, order)
    after = host.pages.view(torch.int32) if host.pages.is_contiguous() else host.pages.clone().view(torch.int32)
    equal = bool(torch.equal(after[order], before))
    return {"stored": stored.count(True), "read": read.count(True), "equal": equal}
