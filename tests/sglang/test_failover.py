"""The failover policy ``bypass`` on the real engine: a store that fails, and comes back, under requests."""

from typing import Any

import pytest
from tests.rigs.sglang_server import CALL_S, HIT, Stack, from_storage, ids_of, prompt, until

# A window that holds enough calls of a slow machine too.
GUARD = {"guard_min_calls": 4, "guard_window_s": 60.0, "guard_hold_s": 0.3, "guard_hold_max_s": 0.6}
QUICK = {"confirm_s": 0.2, "min_stay_s": 0.5, "steady_s": 1.0, "backoff_s": 0.5, "backoff_max_s": 1.0}


def policies(stack: Stack, policy: Any) -> None:
    code, answer = stack.admin("PUT", "/hicache/failover", {"policies": {"dynamic": policy}, "keep_others": True})
    assert code == 200, answer


def failover(stack: Stack) -> dict[str, Any]:
    code, document = stack.admin("GET", "/hicache/failover")
    assert code == 200, document
    return dict(document)


@pytest.mark.parametrize("topology", ["tp1", "tp2"])
def test_a_store_that_fails_is_bypassed_and_used_again(stack: Stack) -> None:
    """F77, F78: no request fails or changes, all ranks bypass, and the old pages hit when the store is back."""
    down = stack.root / "down"
    down.unlink(missing_ok=True)
    code, answer = stack.put(stack.dynamic("FailingStore", "failing", {"down_file": str(down), **GUARD}))
    assert code == 200, answer
    policies(stack, {"action": "bypass", **QUICK})
    try:
        ids = prompt()
        expected = ids_of(stack.server.generate(ids))
        until(lambda: len(stack.pages("failing")) >= 32 * (2 if stack.topology == "tp2" else 1), "pages in the store")
        stack.server.flush()
        before = len(failover(stack)["steps"])
        down.touch()
        until(lambda: _served(stack) and failover(stack)["state"] == "bypassed", "a failover", CALL_S)
        status = stack.status()
        assert (status["state"], status["hicache_storage_backend"], status["drift"]) == ("bypassed", "dynamic", [])
        assert [rank["bypass"] for rank in status["ranks"]] == [True] * stack.ranks
        assert status["usage"]["exists"]["error"] > 0
        away = stack.server.generate(ids)
        assert (from_storage(away), ids_of(away)) == (0, expected)

        down.unlink()
        until(lambda: "recovered" in _steps(stack)[before:], "the way back", CALL_S)
        assert _steps(stack)[before:][0] == "bypass"
        status = stack.status()
        assert (status["state"], status["drift"]) == ("attached", [])
        assert [rank["bypass"] for rank in status["ranks"]] == [False] * stack.ranks
        stack.server.flush()
        again = stack.server.generate(ids)
        assert from_storage(again) >= HIT
        assert ids_of(again) == expected
    finally:
        down.unlink(missing_ok=True)
        policies(stack, None)


def _served(stack: Stack) -> bool:
    """One more request, whose prompt nobody used: a lookup in the store, and pages to write."""
    return len(ids_of(stack.server.generate(prompt(256), 1))) == 1


def _steps(stack: Stack) -> list[str]:
    return [step["step"] for step in failover(stack)["steps"]]
