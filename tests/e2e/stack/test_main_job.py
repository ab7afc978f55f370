"""The main job over HTTP: attach, write, flush, read back, policies, refusals, detach. Real processes throughout."""

import json
import resource
import threading
from pathlib import Path

import pytest
from tests.e2e.stack.conftest import Stack

PROMPT = (
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness. "
)


def prompt(tag: str, tokens: int = 600) -> str:
    """A prompt of ``tokens`` bytes that no other test used: it starts with its own tag."""
    return (f"[{tag}] " + PROMPT * (tokens // len(PROMPT) + 1))[:tokens]


def pages_of(root: Path) -> int:
    """Files of pages below a store."""
    return sum(1 for path in root.rglob("*") if path.is_file() and path.stat().st_size >= 4096)


@pytest.mark.parametrize("dp_rank", [0, 1])
def test_tokens_come_back_from_storage_with_the_same_output(stack: Stack, dp_rank: int) -> None:
    text = prompt(f"roundtrip-{dp_rank}")
    plain = stack.engine.generate(text, dp_rank=dp_rank)  # recomputed, nothing attached
    stack.engine.flush()
    code, answer = stack.attach(f"roundtrip-{dp_rank}")
    assert code == 200, answer
    assert (answer["success"], answer["changed"], answer["state"]) == (True, True, "attached")
    assert [rank["success"] for rank in answer["ranks"]] == [True, True]
    written = stack.engine.generate(text, dp_rank=dp_rank)
    stack.engine.flush()  # waits for the backups, empties L1 and L2
    assert pages_of(stack.root / f"roundtrip-{dp_rank}") >= len(text) // 16 - 1
    read = stack.engine.generate(text, dp_rank=dp_rank)
    assert read["output_ids"] == written["output_ids"] == plain["output_ids"]
    assert read["meta_info"]["cached_tokens_details"]["storage"] >= len(text) - 32
    assert stack.status()["usage"]["get"]["hit"] > 0


def test_detach_stops_using_the_store_and_keeps_what_it_holds(stack: Stack) -> None:
    text = prompt("kept")
    assert stack.attach("kept")[0] == 200
    first = stack.engine.generate(text, dp_rank=0)
    stack.engine.flush()
    code, answer = stack.detach()
    assert (code, answer["changed"], answer["state"]) == (200, True, "detached")
    again = stack.engine.generate(text, dp_rank=0)
    assert again["meta_info"]["cached_tokens_details"]["storage"] == 0
    assert again["output_ids"] == first["output_ids"]
    stack.engine.flush()
    assert stack.attach("kept")[0] == 200
    assert stack.engine.generate(text, dp_rank=0)["meta_info"]["cached_tokens_details"]["storage"] >= len(text) - 32


def test_attach_and_detach_are_idempotent(stack: Stack) -> None:
    assert stack.attach("same")[1]["changed"] is True
    revision = stack.status()["revision"]
    code, answer = stack.attach("same")
    assert (code, answer["changed"], answer["revision"]) == (200, False, revision)
    assert stack.detach()[1]["changed"] is True
    assert stack.detach()[1]["changed"] is False


def test_a_same_backend_attach_applies_live_keys_and_refuses_the_others(stack: Stack) -> None:
    """F20: status never lies about what is applied."""
    assert stack.attach("f20", {"prefetch_threshold": 256})[0] == 200
    code, answer = stack.attach("f20", {"prefetch_threshold": 64})
    assert (code, answer["changed_keys"]) == (200, ["prefetch_threshold"])
    assert [rank["prefetch_knobs"]["prefetch_threshold"] for rank in stack.status()["ranks"]] == [64, 64]
    code, answer = stack.attach("f20-other")
    assert (code, answer["error"]["code"]) == (409, "already_attached")
    assert answer["error"]["details"]["reason"] == "needs_swap"
    assert "file_storage_path" in json.dumps(answer["error"]["details"])
    code, answer = stack.attach("f20-other", swap=True)
    assert code == 200, answer
    assert all("f20-other" in rank["hicache_storage_backend_extra_config"] for rank in stack.status()["ranks"])


def test_policies_change_without_a_new_set(stack: Stack) -> None:
    assert stack.attach("policies")[0] == 200
    fields = {"hicache_storage_prefetch_policy": "wait_complete", "hicache_write_policy": "write_back"}
    code, answer = stack.attach("policies", **fields)
    assert code == 200
    assert sorted(answer["changed_keys"]) == ["hicache_storage_prefetch_policy", "hicache_write_policy"]
    for rank in stack.status()["ranks"]:
        assert {name: rank[name] for name in fields} == fields
    code, _ = stack.attach("policies", hicache_storage_prefetch_policy="timeout", hicache_write_policy="write_through")
    assert code == 200


def test_a_busy_engine_is_refused_with_every_blocker_and_nothing_changes(stack: Stack) -> None:
    """F1, F3: 400 at once, blockers by name and rank, state as before."""
    before = stack.status()
    done = threading.Event()

    def long_request() -> None:
        stack.engine.generate(prompt("busy", 400), tokens=600, dp_rank=1, timeout_s=120)
        done.set()

    worker = threading.Thread(target=long_request)
    worker.start()
    try:
        for _ in range(500):  # until the engine says that it is busy
            code, idle = stack.admin("GET", "/hicache/idle")
            if not idle["idle"]:
                break
        assert code == 200
        code, answer = stack.attach("busy")
        assert not done.is_set(), "the request ended before the attach was asked for"
    finally:
        worker.join()
    assert (code, answer["error"]["code"], answer["error"]["retryable"]) == (400, "not_idle", True)
    assert answer["error"]["message"].startswith("Reject attach: scheduler is not idle. #queue-req=")
    blockers = answer["error"]["details"]["blocked_by"]
    assert {entry["rank"] for entry in blockers} == {1}
    assert any(entry["name"] == "running_batch" and entry["count"] == 1 for entry in blockers)
    after = stack.status()
    assert (after["state"], after["revision"]) == (before["state"], before["revision"])
    assert not (stack.root / "busy").exists()


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"hicache_storage_backend": "flie"}, "unknown_backend"),
        ({"hicache_storage_backend": "file", "hicache_storage_backend_extra_config_json": "{nope"}, "invalid_config"),
        ({"hicache_storage_backend": "file", "hicache_storage_backend_extra_config_json": "[1]"}, "invalid_config"),
        ({"hicache_storage_backend": "file", "hicache_storage_backend_extra_config_json": '{"file_storage_path":"/x","prefetch_treshold":1}'}, "invalid_config"),  # noqa: E501
        ({"hicache_storage_backend": "file", "hicache_storage_backend_extra_config_json": '{"file_storage_path":"/x","prefetch_threshold":true}'}, "invalid_config"),  # noqa: E501
        ({"hicache_storage_backend": "file", "hicache_storage_backend_extra_config_json": '{"file_storage_path":"/x","prefetch_timeout_base":1e400}'}, "invalid_config"),  # noqa: E501
        ({"hicache_storage_backend": "file", "hicache_storage_backend_extra_config_json": "@/etc/shadow"}, "invalid_config"),  # noqa: E501
        ({"hicache_storage_backend": "file", "hicache_write_policy": "write-through"}, "invalid_request"),
        ({"hicache_storage_backend": "file", "mode": "gently"}, "invalid_request"),
        ({"hicache_storage_backend": "file", "surprise": 1}, "invalid_request"),
        ({"hicache_storage_backend": 5}, "invalid_request"),
        ({}, "invalid_request"),
    ],
)  # fmt: skip
def test_bad_input_is_422_and_touches_nothing(stack: Stack, body: dict[str, object], code: str) -> None:
    before = stack.status()
    status, answer = stack.admin("PUT", "/hicache/storage-backend", body)
    assert (status, answer["error"]["code"]) == (422, code), answer
    assert answer["error"]["retryable"] is False
    after = stack.status()
    assert (after["state"], after["revision"]) == (before["state"], before["revision"])


def test_a_store_that_one_rank_cannot_write_leaves_all_ranks_as_before(stack: Stack) -> None:
    """Rank 1 may write no file (its own resource limit): prepare_failed names it, and rank 0 lets go of its own."""
    before = stack.status()
    pid = before["ranks"][1]["pid"]
    limits = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        code, answer = stack.attach("one-rank")
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
    assert (code, answer["error"]["code"]) == (502, "prepare_failed"), answer
    details = answer["error"]["details"]
    assert (details["rank"], details["rolled_back"]) == (1, True)
    assert "rank 1" in answer["error"]["message"]
    assert [row["rank"] for row in details["ranks"]] == [0, 1]
    after = stack.status()
    assert (after["state"], after["agreed"], after["drift"]) == ("detached", True, [])
    assert [rank["hicache_storage_backend"] for rank in after["ranks"]] == [None, None]
    assert after["hicache_write_policy"] == before["hicache_write_policy"]
    assert stack.attach("one-rank")[0] == 200  # and nothing of the failure stands in the way of the next


def test_a_store_that_no_rank_can_make_leaves_all_ranks_as_before(stack: Stack) -> None:
    """A directory that cannot be made: prepare_failed, nothing attached anywhere."""
    (stack.root / "not-a-directory").write_text("a file")
    code, answer = stack.attach("not-a-directory/below")
    assert (code, answer["error"]["code"]) == (502, "prepare_failed"), answer
    status = stack.status()
    assert [rank["hicache_storage_backend"] for rank in status["ranks"]] == [None, None]
    assert status["drift"] == []
    assert stack.engine.generate("still serving", tokens=4)["output_ids"]
