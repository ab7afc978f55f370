"""The engine under a real sidecar: swaps under load, a restarted rank, and a store that is closed before the end."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.engine.conftest import SMALL
from tests.e2e.engine.test_equality import prompts
from tests.e2e.engine.test_processes import alive, health, until
from tests.rigs.procs import Engine, Processes, Sidecar, http_json

from hicache_hooks.embedded.scheduler_main import CLOSING
from hicache_proto.api import EventDocument
from hicache_proto.errors import HicacheError
from hicache_sidecar.client.typed import Client

# L2 holds three prompts, so that storage is read all the time.
TINY = ("--l1-tokens", "1024", "--l2-tokens", "1536")


def file_config(path: Path) -> str:
    return json.dumps({"file_storage_path": str(path), "prefetch_threshold": 32})


@pytest.fixture
def stack(processes: Processes, request: pytest.FixtureRequest) -> Iterator[tuple[Sidecar, Engine, Client]]:
    """dp=2 with tiny pools, and a client with this user's rights. The parameter: the engine's stop budget, seconds."""
    sidecar = processes.sidecar()
    engine = processes.engine(
        sidecar, "--dp", "2", *SMALL, *TINY, "--stop-timeout", getattr(request, "param", "4"),
        HICACHE_DYNAMIC_BACKENDS="tests.rigs.backends:BK", PYTHONPATH=str(Path(__file__).resolve().parents[3]),
    )  # fmt: skip
    with Client.connect(sidecar.socket) as client:
        yield sidecar, engine, client


class Load:
    """Callers that ask all prompts again and again; every answer is compared."""

    def __init__(self, engine: Engine, expected: list[list[int]]) -> None:
        self.problems: list[str] = []
        self.answers = 0
        self.from_storage = 0
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(engine, expected, i)) for i in range(3)]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _run(self, engine: Engine, expected: list[list[int]], first: int) -> None:
        i = first
        while not self._ended.is_set():
            body = {"text": prompts(12)[i % 12], "sampling_params": {"max_new_tokens": 24}}
            status, answer = http_json("POST", f"{engine.url}/generate", body, 60.0)
            if status != 200 or answer["output_ids"] != expected[i % 12]:
                self.problems.append(f"prompt {i % 12}: {status} {answer}")
            else:
                self.from_storage += answer["meta_info"]["cached_tokens_details"]["storage"]
            self.answers += 1
            i += 5


@pytest.mark.parametrize("mode", ["hot", "drain"])
def test_swaps_under_load_fail_no_request_and_change_no_output(
    stack: tuple[Sidecar, Engine, Client], tmp_path: Path, mode: str
) -> None:
    """Every cell of the core test at once: L1, L2, L3, eviction, concurrency, two processes, a store that changes."""
    _, engine, client = stack
    expected = [engine.generate(text, 24)["output_ids"] for text in prompts(12)]
    client.attach("file", file_config(tmp_path / "a"), mode="drain", wait_timeout_s=10.0)
    with Load(engine, expected) as load:
        for turn in range(6):
            seen = load.answers
            until("answers between the swaps", lambda seen=seen: load.answers >= seen + 12)
            answer = client.swap("file", file_config(tmp_path / "ba"[turn % 2]), mode=mode, wait_timeout_s=20.0)
            assert answer.success, answer
            assert answer.changed
    assert load.problems == []
    assert load.from_storage > 0
    assert client.status(fresh=True).state == "attached"


def test_a_restarted_rank_is_brought_back_to_the_store(stack: tuple[Sidecar, Engine, Client], tmp_path: Path) -> None:
    """F70: kill -9 of a rank while attached; the next epoch attaches by itself and reads what the first one wrote."""
    _, engine, client = stack
    client.attach("file", file_config(tmp_path / "a"))
    text = prompts(12)[3]
    first = engine.generate(text, 24, dp_rank=1)
    engine.flush()
    second = {"dp_rank": 1, "up": True, "epoch": 2, "pid": 0}
    os.kill(health(engine)["ranks"][1]["pid"], signal.SIGKILL)
    until("restarted scheduler", lambda: health(engine)["ranks"][1] | {"pid": 0} == second)

    def converged() -> bool:
        try:
            status = client.status(fresh=True)
        except HicacheError:
            return False
        here = not status.missing_ranks and [rank.epoch for rank in status.ranks] == [1, 2]
        return here and status.state == "attached" and not status.drift

    until("both ranks on the store", converged, 30.0)
    again = engine.generate(text, 24, dp_rank=1)
    assert again["output_ids"] == first["output_ids"]
    assert again["meta_info"]["cached_tokens_details"]["storage"] > 0


def test_the_http_view_of_the_engine_follows_operations(stack: tuple[Sidecar, Engine, Client], tmp_path: Path) -> None:
    """spec.md, "Status": also the process that answers the engine's HTTP API shows what runs."""
    _, engine, client = stack

    def shown() -> list[str | None]:
        states = http_json("GET", f"{engine.url}/get_server_info")[1]["internal_states"]
        return [state["hicache_storage_backend"] for state in states]

    client.attach("file", file_config(tmp_path / "a"))
    until("the attached view", lambda: shown() == ["file", "file"])
    client.detach()
    until("the detached view", lambda: shown() == [None, None])


def attach_scripted(client: Client, log: Path, **faults: Any) -> None:
    options = {"store": "stop", "log": str(log), "faults": faults}
    config = {"backend_name": "bk", "module_path": "tests.rigs.backends", "class_name": "BK", "options": options}
    client.attach("dynamic", json.dumps(config))


def events(log: Path) -> list[str]:
    return [json.loads(line)["event"] for line in log.read_text().splitlines()]


def last_event(side: Sidecar) -> int:
    with Client.connect(side.socket) as client:
        return next(client.watch(quiet_timeout_s=10.0)).id


def until_both_left(client: Client, number: int) -> list[EventDocument]:
    """Events after ``number``, up to the one that says that the second rank is gone."""
    seen: list[EventDocument] = []
    for event in client.watch(number, quiet_timeout_s=10.0):
        seen.append(event)
        if sum(e.kind == "rank" and not e.data["connected"] for e in seen) == 2:
            break
    return seen


@pytest.mark.parametrize("stack", ["30"], indirect=True)  # a clean end is no matter of time
def test_the_store_is_closed_before_the_engine_ends(stack: tuple[Sidecar, Engine, Client], tmp_path: Path) -> None:
    """F72: a stop detaches; a store with a lease would otherwise keep dead segments."""
    side, engine, client = stack
    log = tmp_path / "calls"
    attach_scripted(client, log)
    engine.generate(prompts(12)[0], 24)
    number = last_event(side)
    engine.process.signal(signal.SIGTERM)
    assert engine.process.wait() == 0
    assert events(log) == ["open", "open", "close", "close"]
    assert not any(event.kind == "unclean_detach" for event in until_both_left(client, number))


def test_a_store_that_hangs_at_close_does_not_hold_up_the_stop(
    stack: tuple[Sidecar, Engine, Client], tmp_path: Path
) -> None:
    """F72: the stop still ends in its budget, and says by its exit code and by an event for each rank that the detach
    was not clean."""
    side, engine, client = stack
    log = tmp_path / "calls"
    attach_scripted(client, log, close={"hang": True})
    number = last_event(side)
    pids = [rank["pid"] for rank in health(engine)["ranks"]]
    began = time.monotonic()
    engine.process.signal(signal.SIGTERM)
    assert engine.process.wait() == 1
    assert time.monotonic() - began < 5.5
    assert events(log).count("close") == 2
    assert not any(alive(pid) for pid in pids)
    told = [event.data for event in until_both_left(client, number) if event.kind == "unclean_detach"]
    assert sorted((data["rank"], data["detail"]) for data in told) == [(0, CLOSING), (1, CLOSING)]
