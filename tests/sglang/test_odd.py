"""Stores that fail as no store should, and the engine's own API in the middle of our operation."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.rigs.sglang_server import CALL_S, Stack, from_storage, ids_of, prompt, until

EXTRA = "hicache_storage_backend_extra_config_json"


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


def test_a_close_that_hangs_is_named_and_its_end_is_noticed(stack: Stack) -> None:
    """F117: the detach is done and requests are served; the next change is refused until the old store is closed."""
    flag, body = odd(stack, "close", "hang")
    code, answer = stack.put(body)
    assert code == 200, answer
    flag.touch()
    try:
        assert stack.detach("?wait_timeout_s=10")["changed"] is True
        until(lambda: stack.status()["state"] == "quarantined", "the news of a close that hangs")
        code, answer = stack.put(stack.body("next", wait_timeout_s=10))
        assert (code, answer["error"]["code"]) == (409, "quarantined"), answer
        assert answer["error"]["details"]["reason"] == "threads_stuck", answer
        stack.server.generate(prompt(64))
    finally:
        flag.unlink(missing_ok=True)
    until(lambda: stack.status()["state"] == "detached", "the end of the quarantine")
    stack.attach("next", wait_timeout_s=10)


def test_a_store_that_hangs_in_the_canary(stack: Stack) -> None:
    """F46: it costs one deadline, and the builder is free for the next store while the call still hangs."""
    flag, body = odd(stack, "exists", "hang")
    body = stack.dynamic("OddStore", "odd-canary", {**json.loads(body[EXTRA]), "guard_deadline_s": 0.5})
    flag.touch()
    try:
        code, answer = stack.put(body)
        assert (code, answer["error"]["code"]) == (502, "prepare_failed"), answer
        assert answer["error"]["details"]["reason"] == "canary_late", answer
        stack.attach("well", wait_timeout_s=10)
    finally:
        flag.unlink(missing_ok=True)


@pytest.mark.parametrize("topology", ["tp1", "tp2"])
def test_a_constructor_that_hangs_costs_its_own_operation(stack: Stack) -> None:
    """F46: nobody waits for it for good: the next attach is done while it hangs; what it makes in the end is closed."""
    flag, body = odd(stack, "start", "hang")
    closed = [stack.root / "odd-start" / f"closed-{rank}" for rank in range(stack.ranks)]
    for mark in closed:
        mark.unlink(missing_ok=True)
    flag.touch()
    try:
        code, answer = stack.put({**body, "timeout_s": 2})
        assert (code, answer["error"]["code"]) == (504, "deadline_exceeded"), answer
        stack.attach("well", wait_timeout_s=10, timeout_s=60)
        assert not any(mark.exists() for mark in closed)
    finally:
        flag.unlink(missing_ok=True)
    until(lambda: all(mark.exists() for mark in closed), "the close of what came late")
    stack.server.generate(prompt())
    until(lambda: len(stack.pages("well")) >= 32 * stack.ranks, "pages in the store that was attached")
    assert not stack.pages("odd-start")
    status = stack.status()
    assert (status["state"], status["drift"]) == ("attached", [])


def test_a_backend_whose_package_is_not_there_is_named(stack: Stack) -> None:
    """As `backends` says; nothing is built."""
    code, document = stack.admin("GET", "/hicache/backends")
    missing = {row["name"]: row["missing"] for row in document["backends"] if not row["available"]}
    assert missing["aibrix"] == ["aibrix_kvcache"]
    code, answer = stack.put(stack.body("none", "aibrix"))
    assert (code, answer["error"]["code"]) == (422, "backend_unavailable"), answer
    assert answer["error"]["details"]["missing"] == ["aibrix_kvcache"]


@pytest.mark.parametrize(("name", "reason"), [("shm", "canary_exists_mismatch"), ("sim", "canary_mismatch")])
def test_what_is_no_store_is_refused_by_the_canary(stack: Stack, name: str, reason: str) -> None:
    """F15: the engine registers two that give no page back; its own PUT would take them."""
    code, answer = stack.put({"hicache_storage_backend": name, "wait_timeout_s": 10})
    assert (code, answer["error"]["details"]["reason"]) == (502, reason), answer
    rows = {row["name"]: row["notes"] for row in stack.admin("GET", "/hicache/backends")[1]["backends"]}
    assert "canary" in rows[name][0]
    assert stack.status()["state"] == "detached"


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
def test_a_store_that_was_emptied_behind_us_is_told(stack: Stack) -> None:
    """F70: nothing fails and no breaker opens; each rank says so, and the pages are computed and written anew."""
    stack.attach("emptied", config={"guard_epoch_s": 0.5}, wait_timeout_s=10)
    ids = prompt(512)
    first = ids_of(stack.server.generate(ids))
    until(lambda: len(stack.pages("emptied")) >= 8 * stack.ranks, "pages in the store")
    stack.server.flush()
    assert from_storage(stack.server.generate(ids)) > 0  # read: every rank knows that its store held them
    for page in (stack.root / "emptied").glob("*.bin"):
        page.unlink()
    told = until(lambda: (news := _epochs(stack))[stack.ranks - 1 :] and news, "the news from every rank")
    assert {word.split(":")[1].strip() for word in told} == {f"rank {rank}" for rank in range(stack.ranks)}
    stack.server.flush()
    again = stack.server.generate(ids)
    assert (ids_of(again), from_storage(again)) == (first, 0)
    until(lambda: len(stack.pages("emptied")) >= 8 * stack.ranks, "the pages once more")
    assert stack.status()["state"] == "attached"


def _epochs(stack: Stack) -> list[str]:
    return [word for word in stack.status()["warnings"] if word.startswith("store_epoch_changed")]


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
