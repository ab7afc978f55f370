"""The engine's own view of its storage, and what the engine changes by itself: GET follows, drift is shown."""

import json
import urllib.request
from collections import Counter
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.rigs.sglang_server import HIT, TOKEN, Stack, from_storage, prompt, until

CYCLES = 20
TOPOLOGIES = ["tp1", "tp2", "dp2"]


def shows(stack: Stack, backend: str | None) -> None:
    until(lambda: stack.server.shown() == backend, f"{backend} in the engine's own GET", 10.0)


def drifted(stack: Stack) -> set[tuple[str, Any, Any]]:
    return {(row["field"], row["desired"], row["reported"]) for row in stack.status()["drift"]}


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_the_engines_own_get_follows(stack: Stack) -> None:
    """Attach, policy and detach through the sidecar are seen in the engine's own GET, secrets are not."""
    stack.attach("view", config={"api_token": "hunter22"}, hicache_storage_prefetch_policy="timeout")
    shows(stack, "file")
    view = stack.server.storage()[1]
    assert view["hicache_storage_prefetch_policy"] == "timeout"
    assert str(stack.root / "view") in view["hicache_storage_backend_extra_config"]
    assert "hunter22" not in json.dumps(view)
    code, answer = stack.put(stack.body("view", config={"api_token": "hunter22"},
                                        hicache_storage_prefetch_policy="best_effort"))  # fmt: skip
    assert (code, answer["changed_keys"]) == (200, ["hicache_storage_prefetch_policy"])
    until(lambda: stack.server.storage()[1]["hicache_storage_prefetch_policy"] == "best_effort", "the new policy")
    stack.detach()
    shows(stack, None)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_the_engines_own_attach_is_drift_on_every_rank(stack: Stack) -> None:
    """Nothing is touched until an operator says what counts: reapply brings detached back, adopt takes it over."""
    stock = stack.body("stock")
    assert stack.server.storage("PUT", stock)[0] == 200
    status = stack.status()
    rows = [row for row in status["drift"] if row["field"] == "hicache_storage_backend"]
    assert [(row["rank"], row["desired"], row["reported"]) for row in rows] == [
        (rank, None, "file") for rank in range(stack.ranks)
    ]
    ids = prompt()
    stack.server.generate(ids)  # the engine's own attachment works
    until(lambda: len(stack.pages("stock")) >= 32, "pages in the engine's own store")
    stack.server.flush()

    assert stack.admin("POST", "/hicache/storage-backend/resolve", {"how": "reapply"})[0] == 200
    status = stack.status()
    assert (status["state"], status["drift"]) == ("detached", [])
    shows(stack, None)

    assert stack.server.storage("PUT", stock)[0] == 200
    assert stack.admin("POST", "/hicache/storage-backend/resolve", {"how": "adopt"})[0] == 200
    status = stack.status()
    assert (status["state"], status["drift"], status["hicache_storage_backend"]) == ("attached", [], "file")
    assert from_storage(stack.server.generate(ids)) >= HIT
    shows(stack, "file")


@pytest.mark.parametrize("topology", ["tp2"])
def test_the_engines_own_changes_over_ours_are_drift(stack: Stack) -> None:
    """A PUT of the same backend changes policies only, and answers 200; a DELETE detaches ours; a clear is told."""
    stack.attach("ours", hicache_storage_prefetch_policy="timeout")
    answer = stack.server.storage("PUT", stack.body("ours", hicache_storage_prefetch_policy="best_effort"))
    assert answer[0] == 200
    assert ("hicache_storage_prefetch_policy", "timeout", "best_effort") in drifted(stack)
    assert stack.admin("POST", "/hicache/storage-backend/resolve", {"how": "reapply"})[0] == 200
    assert drifted(stack) == set()

    ids = prompt()
    stack.server.generate(ids)
    until(lambda: len(stack.pages("ours")) >= 64, "pages in the store")
    stack.server.flush()  # until then the engine's own DELETE may find its last acknowledgements on their way
    assert stack.server.storage("DELETE")[0] == 200
    assert ("hicache_storage_backend", "file", None) in drifted(stack)
    assert stack.admin("POST", "/hicache/storage-backend/resolve", {"how": "reapply"})[0] == 200
    assert stack.status()["state"] == "attached"
    stack.server.flush()
    assert from_storage(stack.server.generate(ids)) >= HIT

    stack.server.flush()  # nothing is on its way to the store any more
    last = _last_event(stack)
    assert stack.server.storage("POST", path="/clear")[0] == 200
    assert stack.pages("ours") == set()
    events = until(lambda: (found := _events(stack, last, "drift"))[1:] and found, "a drift event of each rank")
    assert {event["data"]["rank"] for event in events} == {0, 1}
    assert all("clear" in event["data"]["detail"] for event in events)


def _stream(stack: Stack, last: int | None) -> Any:
    headers = {"Authorization": f"Bearer {TOKEN}"} | ({} if last is None else {"Last-Event-ID": str(last)})
    return urllib.request.urlopen(urllib.request.Request(stack.sidecar.url + "/events", headers=headers), timeout=2)


def _last_event(stack: Stack) -> int:
    with _stream(stack, None) as stream:
        for line in stream:
            if line.startswith(b"id:"):
                return int(line[3:])
    raise AssertionError("no snapshot")


def _events(stack: Stack, last: int, kind: str) -> list[dict[str, Any]]:
    found = []
    with _stream(stack, last) as stream:
        try:
            for line in stream:
                if line.startswith(b"data:"):
                    found.append(json.loads(line[5:]))
        except TimeoutError:  # the stream has no end: what came in time is what there was
            pass
    return [event for event in found if event.get("kind") == kind]


@pytest.mark.parametrize("topology", ["tp1"])
def test_storage_metrics_appear_once_across_cycles(stack: Stack) -> None:
    """F89: 20 attach and detach cycles, 5 of them failing: /metrics parses, each family once, no series doubled."""
    ids = prompt(512)
    for cycle in range(CYCLES):
        if cycle % 4 == 3:
            body = stack.dynamic("OneRankFails", "metrics", {"class_name": "Missing"})
            assert stack.put(body)[0] in (403, 502)
        else:
            stack.attach("metrics", wait_timeout_s=10)
            if cycle % 4 == 0:
                stack.server.flush()  # the second time the tokens come from storage
                stack.server.generate(ids)
            stack.detach("?wait_timeout_s=10")
    text = stack.server.metrics()
    families = [family for family in text_string_to_metric_families(text) if family.name.startswith("sglang:")]
    assert [name for name, count in Counter(family.name for family in families).items() if count > 1] == []
    names = {family.name for family in families}
    assert {"sglang:backuped_tokens", "sglang:prefetched_tokens"} <= names
    series = Counter(
        (sample.name, tuple(sorted(sample.labels.items()))) for family in families for sample in family.samples
    )
    assert [key for key, count in series.items() if count > 1] == []
    backed = [
        sample for family in families if family.name == "sglang:backuped_tokens" for sample in family.samples
        if sample.name.endswith("_total")
    ]  # fmt: skip
    assert {sample.labels["storage_backend"] for sample in backed} - {"dynamic"} == {"file"}  # other tests' stores too
    assert sum(sample.value for sample in backed) >= 512
