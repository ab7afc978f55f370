"""Processes that die or stop beside each other: the engine serves without a sidecar, the sidecar outlives engines."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.stack.conftest import Stack
from tests.e2e.stack.test_main_job import prompt
from tests.rigs.procs import Processes, http_json, http_ok


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    with Processes(tmp_path) as started:
        yield started


def test_an_engine_serves_when_its_sidecar_is_stopped_or_killed(processes: Processes, tmp_path: Path) -> None:
    sidecar = processes.sidecar()
    engine = processes.engine(sidecar)
    stack = Stack(sidecar, engine, tmp_path)
    assert stack.attach()[0] == 200
    text = prompt("dead sidecar")
    first = engine.generate(text)
    sidecar.process.signal(signal.SIGSTOP)
    engine.flush()
    assert engine.generate(text)["output_ids"] == first["output_ids"]
    sidecar.process.kill()
    engine.flush()
    again = engine.generate(text)
    assert again["output_ids"] == first["output_ids"]
    assert again["meta_info"]["cached_tokens_details"]["storage"] > 0
    # A new sidecar on the same directories finds the engine again, and the same state.
    second = processes.sidecar()
    second.process.wait_until("/readyz", lambda: http_ok(f"{second.url}/readyz"), 15)
    status = Stack(second, engine, tmp_path).status()
    assert (status["hicache_storage_backend"], status["state"], status["drift"]) == ("file", "attached", [])


def test_a_killed_engine_is_a_clear_error_and_a_new_one_is_known_again(processes: Processes, tmp_path: Path) -> None:
    sidecar = processes.sidecar()
    stack = Stack(sidecar, processes.engine(sidecar), tmp_path)
    stack.engine.process.kill()
    sidecar.process.wait_until("loss of the engine", lambda: stack.status()["state"] == "engine_down", 15)
    code, answer = stack.attach()
    assert (code, answer["error"]["code"]) == (503, "no_engine")
    stack.engine = processes.engine(sidecar)
    assert stack.attach()[0] == 200


def test_without_any_engine_status_answers_and_changes_are_refused(processes: Processes, tmp_path: Path) -> None:
    sidecar = processes.sidecar()
    code, status = http_json("GET", f"{sidecar.url}/hicache/storage-backend")
    assert (code, status["state"], status["ranks"]) == (200, "engine_down", [])
    code, answer = http_json("PUT", f"{sidecar.url}/hicache/storage-backend", {"hicache_storage_backend": "file"})
    assert (code, answer["error"]["code"]) == (503, "no_engine")
    assert http_json("GET", f"{sidecar.url}/readyz")[0] == 503


def test_a_rank_that_is_missing_is_named(processes: Processes, tmp_path: Path) -> None:
    """F115: seven of eight is not all. A stopped replica is lost after its heartbeats stay away."""
    import os

    sidecar = processes.sidecar()
    stack = Stack(sidecar, processes.engine(sidecar, "--dp", "2"), tmp_path)
    ranks = stack.status()["ranks"]
    os.kill(ranks[1]["pid"], signal.SIGSTOP)
    try:
        sidecar.process.wait_until(
            "loss of rank 1", lambda: stack.admin("GET", "/hicache/ranks")[1]["missing_ranks"] == [1], 15
        )
        code, answer = stack.attach()
    finally:
        os.kill(ranks[1]["pid"], signal.SIGCONT)
    assert (code, answer["error"]["code"]) == (503, "no_engine")
    assert answer["error"]["details"]["missing_ranks"] == [1]
