"""The hooks inside the real scheduler: admission, aborts, health, wake-ups, threads that died, a paused engine."""

import os
import statistics
import subprocess
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.rigs.procs import http_json
from tests.rigs.sglang_server import (
    CALL_S,
    ENGINE_KEY,
    HIT,
    ROOT,
    Stack,
    from_storage,
    ids_of,
    prompt,
    rig_python,
    until,
)

HOLD_S = 60.0
REST = 0.1  # of a processor; a scheduler that sleeps uses a few hundredths, one that spins all it can get
REST_OVER_S = 1.5
ROUNDS = 15
LEASES = 4
# Names in the engine's is_fully_idle that are no predicates of their own.
NO_PREDICATES = {"is_empty", "DisaggregationMode", "PREFILL", "DECODE", "get_memory", "hicache_host_memory_mode"}
GONE_S = 3.0  # a client waits for so long and leaves


def engine(stack: Stack, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    """One of the engine's own admin calls."""
    return http_json(method, stack.server.url + path, body, CALL_S, ENGINE_KEY)


def drained(stack: Stack) -> None:
    """Admission is closed and the engine is idle."""
    code, answer = stack.admin("POST", "/hicache/drain", {"timeout_s": 30, "hold_s": HOLD_S})
    assert code == 200, answer


def resume(stack: Stack) -> None:
    code, answer = stack.admin("POST", "/hicache/resume", {})
    assert code == 200, answer


def blocked_by(stack: Stack) -> set[str]:
    code, document = stack.admin("GET", "/hicache/idle")
    return {row["name"] for row in document["blocked_by"]} if code == 200 else {"no answer"}


def test_the_lists_that_are_copied_from_the_engine() -> None:
    """Which backends are zero-copy is decided inside the engine's attach; our copy must not fall behind."""
    script = (
        "from hicache_hooks.sglang import versions\n"
        "from sglang.srt.managers.cache_controller import HiCacheController as C\n"
        "names = [n for n in C.attach_storage_backend.__code__.co_consts if isinstance(n, tuple) and 'mooncake' in n]\n"
        "assert frozenset(max(names, key=len)) == versions.ZERO_COPY, names\n"
        "from hicache_hooks.sglang.adapter import PACKAGES\n"
        "from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory as F\n"
        "assert set(F._registry) ^ set(PACKAGES) == {'file', 'shm', 'sim'}, F._registry\n"
        "assert versions.missing_names() == [], versions.missing_names()\n"
        "assert versions.too_old(versions.engine_version()) == ''\n"
        "import inspect\n"
        "from sglang.srt.managers.scheduler import Scheduler\n"
        "from hicache_hooks.sglang import idle\n"
        "named = inspect.getsource(idle)\n"
        "asked = [n for n in Scheduler.is_fully_idle.__code__.co_names if n not in named]\n"
        f"assert set(asked) <= {NO_PREDICATES!r}, asked\n"
        "with versions.file_directory('/tmp/x'):\n"
        "    from sglang.srt.environ import envs\n"
        "    assert envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.get() == '/tmp/x'\n"
        "assert envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.get() == '/tmp/env'\n"
    )
    paths = f"{ROOT}/engine_hooks:{ROOT}/proto:{ROOT}/tests/rigs/sglang/stubs"
    environ = {"PYTHONPATH": paths, "SGLANG_USE_CPU_ENGINE": "1", "PATH": "/usr/bin:/bin", "HOME": "/tmp",
               "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": "/tmp/env"}  # fmt: skip
    done = subprocess.run(
        [str(rig_python()), "-c", script], env=environ, capture_output=True, text=True, timeout=CALL_S, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("topology", ["tp1", "tp2", "dp2"])
def test_held_requests_wait_and_an_abort_ends_them(stack: Stack) -> None:
    """Aborts reach held requests: by id, a client that went, all; health is answered; what is left runs in the end."""
    ids = prompt(128)
    expected = ids_of(stack.server.generate(ids))
    drained(stack)
    with ThreadPoolExecutor(8) as pool:
        kept = [pool.submit(stack.server.generate, ids) for _ in range(2)]
        named = pool.submit(stack.server.generate, ids, 8, CALL_S, rid="rig-one")
        until(lambda: held(stack) == (3, True), "three held requests, which block nobody")
        gone = pool.submit(_impatient, stack, [ids, ids])
        until(lambda: held(stack)[0] == 5, "a batch that is held as well")
        assert gone.result(CALL_S) == "timed out"
        until(lambda: held(stack)[0] == 3, "the end of the requests whose client is gone")
        started = time.monotonic()
        assert engine(stack, "GET", "/health_generate")[0] == 200
        assert time.monotonic() - started < 10.0
        assert engine(stack, "POST", "/abort_request", {"rid": "rig-one"})[0] == 200
        assert _finish(named) == "abort"
        batch = pool.submit(engine, stack, "POST", "/generate", _batch(ids, "rig-a", "rig-b", "rig-c"))
        until(lambda: held(stack)[0] == 5, "a batch beside the two")
        assert engine(stack, "POST", "/abort_request", {"rid": "rig-b"})[0] == 200
        until(lambda: held(stack)[0] == 4, "a batch without one")
        assert not any(future.done() for future in kept)
        resume(stack)
        assert [ids_of(future.result(CALL_S)) for future in kept] == [expected] * 2
        code, answers = batch.result(CALL_S)
        assert (code, [answer["output_ids"] for answer in answers]) == (200, [expected, [], expected])
        drained(stack)
        doomed = [pool.submit(stack.server.generate, ids) for _ in range(3)]
        until(lambda: _abort_until_done(stack, doomed), "the end of all requests")
        assert [_finish(future) for future in doomed] == ["abort"] * 3
        resume(stack)
    assert ids_of(stack.server.generate(ids)) == expected
    assert held(stack)[0] == 0


def _batch(ids: list[int], *rids: str) -> dict[str, Any]:
    sampling = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
    return {"input_ids": [ids for _ in rids], "rid": list(rids), "sampling_params": sampling}


def held(stack: Stack) -> tuple[int, bool]:
    """Requests in front of closed gates, over all ranks, and whether the engine counts as idle."""
    code, document = stack.admin("GET", "/hicache/idle")
    return (sum(rank["held"] for rank in document["ranks"]), document["idle"]) if code == 200 else (-1, False)


def _impatient(stack: Stack, ids: list[list[int]]) -> str:
    """A client of a batch that leaves without its answer."""
    try:
        http_json("POST", f"{stack.server.url}/generate", {"input_ids": ids}, timeout_s=GONE_S)
    except TimeoutError:
        return "timed out"
    except OSError as error:
        return "timed out" if "timed out" in str(error) else repr(error)
    return "answered"


def _finish(future: "Future[dict[str, Any]]") -> str:
    return str(future.result(CALL_S)["meta_info"]["finish_reason"]["type"])


def _abort_until_done(stack: Stack, futures: "list[Future[dict[str, Any]]]") -> bool:
    """Whether all are done, after one more abort of all: a request may reach the engine after the first."""
    assert engine(stack, "POST", "/abort_request", {"abort_all": True})[0] == 200
    return all(future.done() for future in futures)


@pytest.mark.parametrize("topology", ["tp1", "tp2"])
def test_a_sleeping_scheduler_wakes_within_milliseconds(stack: Stack) -> None:
    """A hold and its release, each answered by the scheduler thread: without our descriptor it sleeps up to 1 s."""
    drained(stack)
    took = []
    for _ in range(ROUNDS):
        started = time.monotonic()
        code, answer = stack.admin("POST", "/hicache/drain", {"timeout_s": 30, "hold_s": HOLD_S})
        took.append(time.monotonic() - started)
        assert code == 200, answer
    resume(stack)
    assert statistics.median(took) < 0.25  # the sleep alone would be 0.5 s in the mean


@pytest.mark.parametrize("topology", ["tp1", "tp2"])
def test_a_sleeping_scheduler_sleeps_again_after_an_operation(stack: Stack) -> None:
    """Its wake-ups are forgotten: one that stays readable in the engine's poller makes it spin for good, unseen."""
    pids = [rank["pid"] for rank in stack.status()["ranks"]]
    resting(pids)
    stack.attach("asleep", wait_timeout_s=10)
    resting(pids)
    assert stack.put(stack.body("asleep-too", swap=True, wait_timeout_s=10))[0] == 200
    resting(pids)
    drained(stack)
    resting(pids)  # a closed gate is no reason to spin either
    resume(stack)
    stack.detach("?wait_timeout_s=10")
    resting(pids)


def resting(pids: list[int]) -> None:
    """Wait until no process uses more than ``REST`` of a processor for ``REST_OVER_S``; a spinning one never does."""
    sampled = (time.monotonic(), [_processor_s(pid) for pid in pids])

    def rests() -> bool:
        nonlocal sampled
        began, before = sampled
        span = time.monotonic() - began
        if span < REST_OVER_S:
            return False
        now = [_processor_s(pid) for pid in pids]
        sampled = (time.monotonic(), now)
        return all(after - was < REST * span for was, after in zip(before, now, strict=True))

    until(rests, f"rest of the processes {pids}")


def _processor_s(pid: int) -> float:
    """User and system time of all threads of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("topology", ["tp1", "tp2"])
def test_a_hold_ends_by_its_lease_and_what_waited_runs(stack: Stack) -> None:
    """F36: nobody resumes; the scheduler sleeps, and is woken by the lease's end, not by the end of its sleep."""
    ids = prompt(128)
    stack.server.generate(ids)
    hold_s, late = 1.45, []  # its sleeps of 1 s end about 0.5 s after that
    for _ in range(LEASES):
        code, answer = stack.admin("POST", "/hicache/drain", {"timeout_s": 30, "hold_s": hold_s})
        started = time.monotonic()
        assert code == 200, answer
        stack.server.generate(ids, 1)
        waited_s = time.monotonic() - started
        assert waited_s > hold_s - 0.5
        began = time.monotonic()
        stack.server.generate(ids, 1)
        late.append(waited_s - hold_s - (time.monotonic() - began))
    assert min(late) < 0.25, late


@pytest.mark.parametrize("topology", ["tp1"])
def test_a_paused_engine_with_running_requests_is_refused_by_name(stack: Stack) -> None:
    """It does not get idle by waiting: a drain says so instead of waiting."""
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(stack.server.generate, prompt(64), 300)
        until(lambda: "running_batch" in blocked_by(stack), "a running request")
        assert engine(stack, "POST", "/pause_generation", {"mode": "in_place"})[0] == 200
        try:
            until(lambda: "engine_paused" in blocked_by(stack), "a paused engine")
            started = time.monotonic()
            code, answer = stack.put(stack.body("paused", mode="drain", wait_timeout_s=60))
            assert time.monotonic() - started < 30.0
            assert (code, answer["error"]["details"].get("reason")) == (422, "engine_paused"), answer
        finally:
            assert engine(stack, "POST", "/continue_generation", {})[0] == 200
        assert len(ids_of(running.result(CALL_S))) == 300
    stack.attach("paused", wait_timeout_s=10)


@pytest.mark.parametrize("topology", ["tp1"])
def test_storage_threads_that_died_are_brought_back(stack: Stack) -> None:
    """A zero-copy call hangs, the engine's own DELETE gives up: its threads are gone and it never recovers by itself.

    Ours are: dead threads are found and started again, requests are served, and the detach works afterwards.
    """
    flag = stack.root / "hang"
    flag.unlink(missing_ok=True)
    config = {"interface_v1": 1, "hang_file": str(flag), "prefetch_timeout_base": 0.2}
    body = stack.dynamic("HangingPages", "pages", config, wait_timeout_s=10)
    code, answer = stack.put({**body, "hicache_storage_prefetch_policy": "timeout"})
    assert code == 200, answer  # the canary borrowed a page of the host pool for this
    ids = prompt()
    first = stack.server.generate(ids)
    until(lambda: len(stack.pages("pages")) >= 32, "pages in the store")
    stack.server.flush()
    again = stack.server.generate(ids)
    assert from_storage(again) >= HIT
    assert ids_of(again) == ids_of(first)
    stack.server.flush()
    flag.touch()
    try:
        assert from_storage(stack.server.generate(ids)) == 0  # given up, computed
        until(lambda: blocked_by(stack) == {"storage_calls"}, "a thread that hangs although the engine says idle")
        code, answer = stack.admin("DELETE", "/hicache/storage-backend")
        assert (code, answer["error"]["code"]) == (400, "not_idle"), answer
        assert engine(stack, "DELETE", "/hicache/storage-backend")[0] == 400  # 10 s later: its threads did not stop
        until(lambda: _restarts(stack) >= 3, "threads that were started again")
        stack.server.generate(prompt(256))
    finally:
        flag.unlink(missing_ok=True)
    until(lambda: not blocked_by(stack), "an idle engine")
    assert stack.detach("?wait_timeout_s=10")["changed"] is True
    stack.attach("after-death", wait_timeout_s=10)


def _restarts(stack: Stack) -> int:
    return sum(thread["restarts"] for rank in stack.status()["ranks"] for thread in rank["threads"])
