"""A store that fails under load, on two real replicas: what each policy does, that no request fails, and the way back.

The store is BK (dynamic, in memory): every call of it fails while a file exists, also its ``open``, so that it cannot
be attached again before it is well.
"""

import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.stack.conftest import Stack
from tests.e2e.stack.test_main_job import prompt
from tests.rigs.procs import POLL_S, Processes

from hicache_proto.api import StatusDocument
from hicache_proto.failover import FailoverDocument, FailoverPolicy, Spare
from hicache_sidecar.client import Client

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WITHIN_S = 60.0  # two cores, shared; what is measured is said by the events
FAILING = ("open", "health", "batch_get", "batch_put", "batch_exists", "delete")
GUARD = {"guard_min_calls": 4, "guard_window_s": 3.0, "guard_hold_s": 0.3, "guard_hold_max_s": 0.6}
QUICK: dict[str, Any] = {"confirm_s": 0.2, "min_stay_s": 1.0, "steady_s": 2.0, "backoff_s": 0.5, "backoff_max_s": 1.0}


@pytest.fixture(scope="module")
def allowed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack whose engine may load BK."""
    root = tmp_path_factory.mktemp("failover")
    with Processes(root) as processes:
        sidecar = processes.sidecar()
        engine = processes.engine(
            sidecar, "--dp", "2", "--l1-tokens", "4096", "--l2-tokens", "8192",
            HICACHE_DYNAMIC_BACKENDS="tests.rigs.backends:BK", PYTHONPATH=str(Path(__file__).resolve().parents[3]),
        )  # fmt: skip
        yield Stack(sidecar, engine, root)


class Load:
    """One client per replica; every prompt is new. What failed, and what came out, is kept."""

    def __init__(self, stack: Stack, tag: str) -> None:
        self._stack, self._tag = stack, tag
        self.outputs: list[tuple[str, int, list[int]]] = []
        self.failed: list[str] = []
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._client, args=(rank,)) for rank in (0, 1)]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(120)

    def _client(self, rank: int) -> None:
        number = 0
        while not self._ended.is_set():
            number += 1
            text = prompt(f"{self._tag}-{rank}-{number}", 400)
            try:
                answer = self._stack.engine.generate(text, tokens=4, dp_rank=rank, timeout_s=60)
            except BaseException as error:
                self.failed.append(f"{text[:40]}: {error}")
            else:
                self.outputs.append((text, rank, answer["output_ids"]))


def until(what: str, ready: Callable[[], bool], within_s: float = WITHIN_S) -> None:
    deadline = time.monotonic() + within_s
    while not ready():
        assert time.monotonic() < deadline, what
        time.sleep(POLL_S)  # pace of a poll


def asked(status: StatusDocument) -> dict[str, int]:
    """Calls that were made, by kind; skipped ones are none."""
    return {kind: used.latency.count for kind, used in status.usage.items()}


@pytest.mark.parametrize("case", ["bypass", "detach", "spare-drain", "spare-hot"])
def test_a_store_that_fails_under_load(allowed: Stack, case: str) -> None:
    """F77, F78: bypass first, one ordinary operation by policy, zero failed requests, and back when it is well."""
    stack = allowed
    down = stack.root / f"{case}-down"
    faults = {method: {"error": "OSError", "while_file": str(down)} for method in FAILING}
    config = {
        "backend_name": "bk", "module_path": "tests.rigs.backends", "class_name": "BK", "prefetch_threshold": 64,
        "options": {"store": case, "faults": faults}, **GUARD,
    }  # fmt: skip
    spares, mode = [], "auto"
    if case.startswith("spare"):
        extra = {"file_storage_path": str(stack.root / f"{case}-spare"), "prefetch_threshold": 64, **GUARD}
        spares = [Spare(hicache_storage_backend="file", hicache_storage_backend_extra_config_json=json.dumps(extra))]
        mode = case.removeprefix("spare-")
    action = "spares" if spares else case
    policy = FailoverPolicy(action=action, spares=spares, mode=mode, reconnect=True, **QUICK)  # type: ignore[arg-type]

    with Client.connect(stack.sidecar.socket) as client:

        def shown() -> FailoverDocument:
            return client.failover()

        client.detach(wait_timeout_s=30)
        client.attach("dynamic", json.dumps(config), wait_timeout_s=30)
        client.set_failover({"dynamic": policy}, reason=case)
        assert shown().state == "watching"
        with Load(stack, case) as load:
            until("requests are served", lambda: len(load.outputs) > 4)
            began = len(shown().steps)
            down.touch()
            until("the failover acted", lambda: len(shown().steps) > began)
            away = {"bypass": "bypassed", "detach": "detached"}.get(case, "on_spare")
            until(f"state {away}", lambda: shown().state == away)
            served = len(load.outputs)
            until("requests are served meanwhile", lambda: len(load.outputs) > served + 4)
            status = client.status(fresh=True)
            backend = {"bypass": "dynamic", "detach": None}.get(case, "file")
            assert [rank.hicache_storage_backend for rank in status.ranks] == [backend] * 2
            assert [rank.bypass for rank in status.ranks] == [case == "bypass"] * 2
            if case == "bypass":  # F78: the store is left alone
                served = len(load.outputs)
                until("requests are served beside the store", lambda: len(load.outputs) > served + 4)
                assert asked(client.status(fresh=True)) == asked(status)
            assert status.drift == []
            assert status.desired is not None
            assert status.desired.hicache_storage_backend == backend
            down.unlink()
            until("back and well", lambda: "recovered" in [step.step for step in shown().steps[began:]])
            status = client.status(fresh=True)
            assert [rank.hicache_storage_backend for rank in status.ranks] == ["dynamic"] * 2
            assert [rank.bypass for rank in status.ranks] == [False] * 2
            hits = len(load.outputs)
            until("requests are served at the end", lambda: len(load.outputs) > hits + 2)
        assert load.failed == []
        steps = [step.step for step in shown().steps[began:]]
        assert steps[0] == "bypass"
        if case != "bypass":
            rows = [row for row in client.history().revisions if row.actor == "failover" and row.result == "committed"]
            assert [row.target.hicache_storage_backend for row in rows[-2:]] == [backend, "dynamic"]
            assert all("breaker" in row.reason or "go back" in row.reason for row in rows[-2:])
        client.set_failover({})
        client.detach(wait_timeout_s=30)

    stack.engine.flush()
    for text, rank, output in random.Random(case).sample(load.outputs, min(12, len(load.outputs))):
        assert stack.engine.generate(text, tokens=4, dp_rank=rank)["output_ids"] == output
