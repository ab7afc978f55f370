"""Stores that fail as no store should, and the engine's own API in the middle of our operation."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.rigs.sglang_server import CALL_S, Stack, ids_of, prompt, until


def odd(stack: Stack, where: str, what: str) -> tuple[Path, dict[str, Any]]:
    """Its flag, armed only when touched, and the PUT body."""
    flag = stack.root / "odd"
    flag.unlink(missing_ok=True)
    config = {"odd_in": where, "odd_what": what, "odd_file": str(flag)}
    return flag, stack.dynamic("OddStore", f"odd-{where}", config, wait_timeout_s=10)


@pytest.mark.parametrize(
    ("where", "what"), [("exists", "exit"), ("get", "nameless"), ("set", "interrupt"), ("close", "stop")]
)
def test_what_a_store_raises_stays_in_the_guard(stack: Stack, where: str, what: str) -> None:
    """F49: SystemExit, KeyboardInterrupt, and one whose text cannot be had either, out of each call and the close."""
    flag, body = odd(stack, where, what)
    ids = prompt(512)
    try:
        code, answer = stack.put(body)
        assert code == 200, answer
        flag.touch()
        first = ids_of(stack.server.generate(ids))
        stack.server.flush()
        assert ids_of(stack.server.generate(ids)) == first
        assert stack.detach("?wait_timeout_s=30")["changed"] is True
    finally:
        flag.unlink(missing_ok=True)
    assert all(thread["alive"] for rank in stack.status()["ranks"] for thread in rank["threads"])


def test_a_constructor_whose_error_has_no_text(stack: Stack) -> None:
    """F49: refused by name; nothing is left of it."""
    flag, body = odd(stack, "start", "nameless")
    flag.touch()
    try:
        code, answer = stack.put(body)
    finally:
        flag.unlink(missing_ok=True)
    assert (code, answer["error"]["code"]) == (502, "prepare_failed"), answer
    assert "Nameless" in answer["error"]["message"]
    stack.server.generate(prompt(64))


@pytest.mark.parametrize("topology", ["tp1", "tp2"])
def test_the_engines_own_put_while_we_build(stack: Stack) -> None:
    """COMMIT replaces what PREPARE saw and nothing else: what the engine attached meanwhile stays, and is drift."""
    for begun in (stack.root / "slow").glob("begun-*"):
        begun.unlink()
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(stack.put, stack.dynamic("SlowStart", "slow", {"start_s": 2}, wait_timeout_s=10))
        until(lambda: len(list((stack.root / "slow").glob("begun-*"))) == stack.ranks, "a builder on every rank")
        code, answer = stack.server.storage("PUT", stack.body("stock"))
        assert code == 200, answer
        code, answer = slow.result(CALL_S)
    assert (code, answer["error"]["code"]) == (502, "rolled_back"), answer
    assert "own API" in answer["error"]["message"]
    status = stack.status()
    assert status["hicache_storage_backend"] == "file"
    assert {row["rank"] for row in status["drift"]} == set(range(stack.ranks))
    assert stack.admin("POST", "/hicache/storage-backend/resolve", {"how": "reapply"})[0] == 200
    assert (stack.status()["state"], stack.server.shown()) == ("detached", None)
