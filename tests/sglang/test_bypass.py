"""A store that hangs inside its read call, under load: bypass at once, then a detach that nobody feels."""

import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.rigs.sglang_server import CALL_S, Stack, from_storage, prompt, until

CLIENTS = 4
TOKENS = 1024
STALL_US = 200_000  # the engine's own detach stands still for 10 s per thread


def timed(stack: Stack, ids: list[int]) -> tuple[float, int]:
    """Seconds of one request, and its tokens from storage."""
    started = time.monotonic()
    answer = stack.server.generate(ids, 1)
    return time.monotonic() - started, from_storage(answer)


def load(stack: Stack, prompts: list[list[int]]) -> list[tuple[float, int]]:
    """All of them by ``CLIENTS`` clients at once."""
    with ThreadPoolExecutor(CLIENTS) as pool:
        return list(pool.map(lambda ids: timed(stack, ids), prompts))


def computing(stack: Stack) -> float:
    """Median seconds of a request whose prompt nobody has seen, under the same load, caches empty."""
    stack.server.flush()
    return statistics.median(took for took, _ in load(stack, [prompt(TOKENS) for _ in range(2 * CLIENTS)]))


@pytest.mark.parametrize("topology", ["tp1", "tp2"])
def test_bypass_frees_a_hanging_store(stack: Stack) -> None:
    """F77: requests are back at 1.5 x the time of computing at most; the detach after it stalls nobody."""
    flag = stack.root / "hang"
    flag.unlink(missing_ok=True)
    code, answer = stack.put(stack.dynamic("HangingGet", "hanging", {"hang_file": str(flag)}, wait_timeout_s=10))
    assert code == 200, answer
    prompts = [prompt(TOKENS) for _ in range(3 * CLIENTS)]
    stored = len(prompts) * TOKENS // 64 * stack.ranks
    load(stack, prompts)
    until(lambda: len(stack.pages("hanging")) >= stored, "stored pages", CALL_S)
    computing_s = computing(stack)
    until(lambda: _idle(stack), "an idle engine", CALL_S)
    flag.touch()
    try:
        with ThreadPoolExecutor(CLIENTS) as pool:
            stuck = [pool.submit(timed, stack, ids) for ids in prompts[:CLIENTS]]
            until(lambda: _blocked_by(stack) & {"storage_calls", "ongoing_prefetch"}, "a call that hangs")
            assert not all(future.done() for future in stuck)
            started = time.monotonic()
            assert stack.admin("POST", "/hicache/storage-backend/bypass", {"enabled": True})[0] == 200
            assert time.monotonic() - started < 2.0
            for future in stuck:
                assert future.result(CALL_S)[1] == 0
        assert stack.status()["state"] == "bypassed"
        bypassed = load(stack, prompts[CLIENTS:])
        assert [hits for _, hits in bypassed] == [0] * 2 * CLIENTS
        assert stack.status()["usage"]["get"]["skipped"] > 0
        rounds = [bypassed, *(load(stack, [prompt(TOKENS) for _ in range(2 * CLIENTS)]) for _ in range(2))]
        bypassed_s = statistics.median(took for each in rounds for took, _ in each)

        answer = stack.detach("?mode=drain&wait_timeout_s=30")  # the store still hangs
        assert max(rank["stall_us"] for rank in answer["ranks"]) < STALL_US
        computing_s = max(computing_s, computing(stack))  # detached, the store still hangs
        assert bypassed_s <= 1.5 * computing_s
    finally:
        flag.unlink(missing_ok=True)
    # A rank whose old store hung for longer than its close waits is quarantined until the call is back (F117).
    until(lambda: stack.status()["state"] == "detached", "the end of the calls that hung")
    stack.attach("hanging-after", wait_timeout_s=10)  # threads and idle check are as before


def _idle(stack: Stack) -> bool:
    return not _blocked_by(stack)


def _blocked_by(stack: Stack) -> set[str]:
    code, document = stack.admin("GET", "/hicache/idle")
    return {row["name"] for row in document["blocked_by"]} if code == 200 else {"no answer"}
