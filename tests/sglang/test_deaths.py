"""kill -9 of the sidecar and of the engine in the middle of an operation: the engine serves, recovery converges."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.rigs.sglang_server import CALL_S, HIT, Stack, from_storage, ids_of, prompt, until

LEASE_S = 10.0  # in_doubt_s: after it a rank is on the old state whatever happened


def settled(stack: Stack) -> dict[str, Any] | None:
    """Status, once no operation runs, nothing drifts, and all ranks say the same."""
    status = stack.status()
    same = len({(rank["hicache_storage_backend"], rank["revision"]) for rank in status["ranks"]}) == 1
    return status if same and status["state"] == "attached" and not status["drift"] and stack.ready() else None


def store_of(status: dict[str, Any]) -> str:
    return Path(
        str(status["hicache_storage_backend_extra_config"]).split('"file_storage_path": "')[1].split('"')[0]
    ).name


@pytest.mark.parametrize("point", ["frozen", "first-commit"])
@pytest.mark.parametrize("topology", ["tp2", "dp2"])
def test_the_sidecar_dies_in_a_swap(stack: Stack, point: str) -> None:
    """Between FREEZE and COMMIT, and after one rank's COMMIT: requests go on, all ranks end on one store."""
    ids = prompt(256)
    expected = ids_of(stack.server.generate(ids))
    stack.attach("old", wait_timeout_s=10)
    fired = stack.arm(point)
    with ThreadPoolExecutor(2) as pool:
        swap = pool.submit(stack.put, stack.body("new", swap=True, mode="drain", wait_timeout_s=30))
        until(fired.exists, "the sidecar's death", 60.0)
        started = time.monotonic()
        serving = pool.submit(stack.server.generate, prompt(256))  # waits for the lease at most
        with pytest.raises(OSError):
            swap.result(CALL_S)
        serving.result(CALL_S)
        assert time.monotonic() - started < LEASE_S + 10.0
    assert ids_of(stack.server.generate(ids)) == expected
    stack.sidecar.process.wait()
    stack.restart_sidecar()
    status = until(lambda: settled(stack), "one state on all ranks", 60.0)
    if point == "frozen":
        assert store_of(status) == "old"
    winner, loser = (store_of(status), "new" if store_of(status) == "old" else "old")
    before = stack.pages(loser)
    fresh = prompt()
    first = stack.server.generate(fresh)
    until(lambda: len(stack.pages(winner)) >= 32, "pages in the store that won")
    assert stack.pages(loser) == before
    stack.server.flush()
    again = stack.server.generate(fresh)
    assert from_storage(again) >= HIT
    assert ids_of(again) == ids_of(first)


@pytest.mark.parametrize("topology", ["tp1", "tp2", "dp2"])
def test_the_engine_dies_in_an_operation(stack: Stack) -> None:
    """kill -9 of every engine process while a slow store is built; started again: what was desired is applied.

    The requests of before hit again, on whichever replica.
    """
    ids = prompt()
    stack.attach("kept", wait_timeout_s=10)
    before = stack.server.generate(ids)
    until(lambda: len(stack.pages("kept")) >= 32, "pages in the store")
    until(lambda: stack.admin("GET", "/hicache/idle")[1].get("idle"), "all pages in the store")
    with ThreadPoolExecutor(1) as pool:
        swap = pool.submit(stack.put, stack.dynamic("SlowStart", "slow", {"start_s": 20}, swap=True, wait_timeout_s=10))
        until(lambda: _phase(stack) == "prepare", "an operation in PREPARE")
        stack.server.process.kill()
        code, answer = swap.result(CALL_S)
    assert (code, answer["error"]["code"]) in {(502, "prepare_failed"), (503, "no_engine")}, answer
    assert stack.status()["state"] == "engine_down"
    stack.server = stack.start_server()
    status = until(lambda: settled(stack), "the desired state", 60.0)
    assert store_of(status) == "kept"
    again = stack.server.generate(ids)
    assert from_storage(again) >= HIT
    assert ids_of(again) == ids_of(before)
    assert stack.server.shown() == "file"
    # F19: what it died under is not tried again, not even when asked.
    code, answer = stack.put(stack.dynamic("SlowStart", "slow", {"start_s": 20}, swap=True, wait_timeout_s=10))
    assert (code, answer["error"]["code"]) == (409, "quarantined"), answer


def _phase(stack: Stack) -> str:
    code, document = stack.admin("GET", "/hicache/operations")
    running = [job for job in document["operations"] if not job["done"]] if code == 200 else []
    return str(running[0]["phase"]) if running else ""
