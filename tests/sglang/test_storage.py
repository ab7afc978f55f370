"""Attach, detach and swap on the real SGLang, through the sidecar: what a client and an operator see."""

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from tests.rigs.sglang_server import CALL_S, HIT, Stack, from_storage, ids_of, prompt, until

CLIENTS = 8


@pytest.mark.parametrize("topology", ["tp1", "tp2", "dp2"])
def test_attach_generate_flush_generate(stack: Stack) -> None:
    """2048 tokens come back from storage after a flush, with the same output; detach, and detach again."""
    before = stack.server.generate(ids := prompt())
    assert from_storage(before) == 0
    hits, errors = _reads(stack)  # of stores that other tests attached to this engine
    of_file = _file_hits(stack)
    answer = stack.attach("main", wait_timeout_s=10)
    assert answer["changed"] is True
    assert [rank["success"] for rank in answer["ranks"]] == [True] * stack.ranks
    stack.server.flush()
    wrote = stack.server.generate(ids)
    assert ids_of(wrote) == ids_of(before)
    pages = 2048 // 64 * (2 if stack.topology == "tp2" else 1)
    until(lambda: len(stack.pages("main")) >= pages, f"{pages} pages in the store")
    stack.server.flush()
    again = stack.server.generate(ids)
    assert from_storage(again) >= HIT
    assert ids_of(again) == ids_of(before)

    status = stack.status()
    assert (status["state"], status["hicache_storage_backend"], status["drift"]) == ("attached", "file", [])
    reads = _reads(stack)
    assert reads[0] > hits
    assert reads[1] == errors
    used = status["usage_by_backend"]["file"]
    assert (_file_hits(stack) - of_file, used["write_only"]) == (reads[0] - hits, False)
    assert used["lookups"] > 0
    assert min(used["ops"][kind]["bytes"] for kind in ("get", "put")) > 0
    first = stack.detach("?wait_timeout_s=10")
    assert (first["changed"], stack.status()["state"]) == (True, "detached")
    assert stack.detach()["changed"] is False  # idempotent
    written = stack.pages("main")
    stack.server.generate(prompt())
    assert stack.pages("main") == written


def _reads(stack: Stack) -> tuple[int, int]:
    """Pages read, and reads that failed, since the engine's start."""
    reads = stack.status()["usage"].get("get", {})
    return int(reads.get("hit", 0)), int(reads.get("error", 0))


def _file_hits(stack: Stack) -> int:
    """Pages read from ``file`` stores since the engine's start."""
    used = stack.status()["usage_by_backend"].get("file", {"ops": {}})
    return int(used["ops"].get("get", {}).get("hit", 0))


@pytest.mark.parametrize("topology", ["tp1", "tp2", "dp2"])
def test_a_busy_engine_is_refused_at_once(stack: Stack) -> None:
    """F5, spec: PUT while a request runs: 400 with the blockers by name, nothing changed, the request is served."""
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(stack.server.generate, prompt(64), 400)
        until(lambda: _blockers(stack), "a busy engine")
        started = time.monotonic()
        code, answer = stack.put(stack.body("busy"))
        took_s = time.monotonic() - started
        assert not running.done()
        assert len(ids_of(running.result(CALL_S))) == 400
    assert (code, answer["error"]["code"]) == (400, "not_idle")
    assert answer["error"]["retryable"] is True
    blocked = answer["error"]["details"]["blocked_by"]
    assert {"rank", "name", "count"} <= set(blocked[0])
    assert "running_batch" in {row["name"] for row in blocked}
    assert "Reject attach: scheduler is not idle." in answer["error"]["message"]
    assert took_s < 3.0
    assert stack.status()["state"] == "detached"
    assert stack.server.shown() is None


def _blockers(stack: Stack) -> bool:
    code, document = stack.admin("GET", "/hicache/idle")
    return code == 200 and bool(document["blocked_by"])


@pytest.mark.parametrize("topology", ["tp2"])
def test_one_rank_that_cannot_build_hangs_nobody(stack: Stack) -> None:
    """A backend whose constructor raises on tensor-parallel rank 1 alone: refused, the next request is as fast."""
    usual_s = max(_seconds(lambda: stack.server.generate(prompt(256))) for _ in range(4))
    code, answer = stack.put(stack.dynamic("OneRankFails", "one-rank", wait_timeout_s=10))
    assert (code, answer["error"]["code"]) == (502, "prepare_failed")
    assert "rank 1" in answer["error"]["message"]
    assert "constructor failed: RuntimeError" in answer["error"]["message"]  # its text may hold secrets (F94)
    assert _seconds(lambda: stack.server.generate(prompt(256))) < usual_s + 1.0
    assert stack.status()["state"] == "detached"
    stack.attach("after", wait_timeout_s=10)


def _seconds(call: Any) -> float:
    started = time.monotonic()
    call()
    return time.monotonic() - started


class Clients:
    """Eight clients that ask all the time, each its own prompts, until told to stop."""

    def __init__(self, stack: Stack, prompts: list[list[int]]) -> None:
        self._stack, self._prompts = stack, prompts
        self._over = threading.Event()
        self.answers: list[tuple[int, list[int]]] = []
        self._lock = threading.Lock()

    def __enter__(self) -> "Clients":
        self._pool = ThreadPoolExecutor(CLIENTS)
        self._futures: list[Future[None]] = [self._pool.submit(self._client, number) for number in range(CLIENTS)]
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._pool.shutdown(wait=True)
        for future in self._futures:
            future.result()  # a failed request fails the test

    def served(self) -> int:
        return len(self.answers)

    def _client(self, number: int) -> None:
        mine = range(number, len(self._prompts), CLIENTS)
        while not self._over.is_set():
            for index in mine:
                output = ids_of(self._stack.server.generate(self._prompts[index]))
                with self._lock:
                    self.answers.append((index, output))


@pytest.mark.parametrize("topology", ["tp1", "tp2", "dp2"])
def test_swap_under_drain_with_clients_and_roll_back(stack: Stack) -> None:
    """Two directories, eight clients: no failed request, right outputs, new pages in the new one alone; and back."""
    prompts = [prompt(192) for _ in range(CLIENTS * 2)]
    expected = [ids_of(stack.server.generate(ids)) for ids in prompts]  # a run without any storage
    first = stack.attach("one", wait_timeout_s=10)
    stack.server.flush()
    long = prompt()
    kept = ids_of(stack.server.generate(long))
    until(lambda: len(stack.pages("one")) >= 32, "pages in the first store")
    with Clients(stack, prompts) as clients:
        until(lambda: clients.served() >= CLIENTS, "served clients", CALL_S)
        code, answer = stack.put(stack.body("two", swap=True, mode="drain", wait_timeout_s=60))
        assert code == 200, answer
        served = clients.served()
        until(lambda: clients.served() >= served + CLIENTS, "clients served after the swap", CALL_S)
    assert all(output == expected[index] for index, output in clients.answers)
    settled = stack.pages("one")
    fresh = prompt()
    stack.server.generate(fresh)
    until(lambda: len(stack.pages("two")) >= 32, "pages in the second store")
    assert stack.pages("one") == settled
    assert stack.status()["revision"] == answer["revision"]

    code, back = stack.admin("POST", "/hicache/rollback", {"revision": first["revision"], "wait_timeout_s": 30})
    assert code == 200, back
    stack.server.flush()
    again = stack.server.generate(long)
    assert from_storage(again) >= HIT
    assert ids_of(again) == kept
    missed = stack.server.generate(fresh)
    assert from_storage(missed) == 0
