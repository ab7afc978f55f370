"""F58 with real processes: two replicas whose trees live on the device alone, let go with everything or not at all."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.engine.conftest import SMALL
from tests.e2e.engine.test_equality import prompts
from tests.e2e.engine.test_processes import until
from tests.e2e.engine.test_storage import Load
from tests.rigs.procs import Engine, Processes, Sidecar, http_json

from hicache_sidecar.client.typed import Client

POOLS = ("--l1-tokens", "8192", "--l2-tokens", "16384")  # L1 holds all texts: nothing is evicted
TEXTS = prompts(4)
REASON = "checkpoint_failed"


class Stack:
    """Sidecar, engine and a client; ``write_back``, so that nothing is stored before it is evicted."""

    def __init__(self, sidecar: Sidecar, engine: Engine, client: Client, root: Path) -> None:
        self.sidecar, self.engine, self.client, self.root = sidecar, engine, client, root

    def attach(self, backend: str, config: dict[str, Any]) -> None:
        answer = self.client.attach(
            backend, json.dumps({"prefetch_threshold": 32, **config}), mode="drain", wait_timeout_s=20.0,
            hicache_write_policy="write_back", hicache_storage_prefetch_policy="wait_complete",
        )  # fmt: skip
        assert answer.success

    def directory(self, name: str) -> dict[str, Any]:
        return {"file_storage_path": str(self.root / name)}

    def pages(self, name: str) -> int:
        return sum(1 for path in (self.root / name / "pages").glob("*/*/*") if path.is_file())

    def ask(self) -> list[list[int]]:
        """All texts of both replicas; their outputs."""
        return [self.generate(text, rank)["output_ids"] for text in TEXTS for rank in (0, 1)]

    def generate(self, text: str, rank: int) -> dict[str, Any]:
        return self.engine.generate(text, 24, dp_rank=rank)

    def cached(self, tier: str) -> list[int]:
        """Tokens of each text that come from ``tier`` on each replica."""
        found = [self.generate(text, rank) for text in TEXTS for rank in (0, 1)]
        return [answer["meta_info"]["cached_tokens_details"][tier] for answer in found]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Sidecar, Engine, Client]]:
    """Two replicas whose L1 holds all texts."""
    with Processes(tmp_path_factory.mktemp("checkpoint")) as processes:
        sidecar = processes.sidecar()
        engine = processes.engine(
            sidecar, "--dp", "2", *SMALL, *POOLS, HICACHE_DYNAMIC_BACKENDS="tests.rigs.backends:BK",
            PYTHONPATH=str(Path(__file__).resolve().parents[3]),
        )  # fmt: skip
        with Client.connect(sidecar.socket) as client:
            yield sidecar, engine, client


@pytest.fixture
def stack(running: tuple[Sidecar, Engine, Client], tmp_path: Path) -> Stack:
    """Detached and empty."""
    sidecar, engine, client = running
    client.detach(mode="drain", wait_timeout_s=20.0)
    engine.flush()
    return Stack(sidecar, engine, client, tmp_path)


def hicachectl(stack: Stack, *words: str) -> tuple[int, dict[str, Any]]:
    argv = [sys.executable, "-m", "hicache_sidecar.cli.main", "--socket", stack.sidecar.socket, "-o", "json", *words]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, json.loads(done.stdout)


def test_detach_and_swap_let_a_store_go_with_the_whole_tree_in_the_other(stack: Stack) -> None:
    """The hot roots are on the device alone; afterwards every text can be restored, from A and from B."""
    stack.attach("file", stack.directory("a"))
    expected = stack.ask()
    assert stack.pages("a") == 0
    code, answer = hicachectl(stack, "detach", "--checkpoint", "--mode", "drain")
    assert (code, answer["state"]) == (0, "detached")
    stored = stack.pages("a")
    assert stored > 0
    note = next(note for note in answer["notes"] if note.startswith("checkpoint: "))
    assert int(note.split()[1]) >= stored  # replicas share pages
    assert all(stack.cached("device"))  # nothing was cleared
    stack.engine.flush()
    stack.attach("file", stack.directory("a"))
    assert all(stack.cached("storage"))
    assert stack.ask() == expected
    body = {
        "hicache_storage_backend": "file", "swap": True, "checkpoint": True, "mode": "drain",
        "hicache_storage_backend_extra_config_json": json.dumps({"prefetch_threshold": 32, **stack.directory("b")}),
    }  # fmt: skip
    status, answer = http_json("PUT", f"{stack.sidecar.url}/hicache/storage-backend", body, 60.0)
    assert (status, answer["state"]) == (200, "attached"), answer
    assert stack.pages("b") >= stored
    written = stack.client.status(fresh=True).usage["put"].hit
    assert stack.ask() == expected
    assert stack.client.status(fresh=True).usage["put"].hit == written  # B is known to have it
    stack.engine.flush()
    assert all(stack.cached("storage"))
    assert stack.ask() == expected
    status, answer = http_json(
        "DELETE", f"{stack.sidecar.url}/hicache/storage-backend?checkpoint=true&mode=drain", None, 60.0
    )
    assert (status, answer["changed"]) == (200, True)


def test_a_store_that_takes_no_page_is_neither_swapped_in_nor_let_go(stack: Stack, tmp_path: Path) -> None:
    """F58: fail closed. Tree and store stay on both replicas, also when only one of them could not store."""
    stack.attach("file", stack.directory("a"))
    expected = stack.ask()
    broken, claim = tmp_path / "broken", tmp_path / "claim"
    config = {
        "backend_name": "bk", "module_path": "tests.rigs.backends", "class_name": "BK", "prefetch_threshold": 32,
        "guard_min_calls": 1000, "guard_epoch_s": 0, "guard_probe_idle_s": 0,
        "options": {"faults": {"batch_put": {"answer": "none", "while_file": str(broken), "claim": str(claim)}}},
    }  # fmt: skip
    answer = stack.client.swap(
        "dynamic", json.dumps(config), mode="drain", hicache_write_policy="write_back",
        hicache_storage_prefetch_policy="wait_complete",
    )  # fmt: skip
    assert answer.success
    broken.touch()
    code, error = hicachectl(stack, "detach", "--checkpoint", "--mode", "drain")
    assert (code, error["error"]["code"], error["error"]["details"]["reason"]) == (9, "prepare_failed", REASON)
    status = stack.client.status(fresh=True)
    assert (status.state, status.hicache_storage_backend) == ("attached", "dynamic")
    assert [rank.state for rank in status.ranks] == ["attached"] * 2
    assert all(stack.cached("device"))
    assert stack.ask() == expected
    broken.unlink()
    code, answer = hicachectl(stack, "detach", "--checkpoint", "--mode", "drain")
    assert (code, answer["state"]) == (0, "detached")
    assert stack.ask() == expected


def test_traffic_goes_on_beside_the_checkpoint_and_loses_nothing(stack: Stack) -> None:
    """The long part is in PREPARE; what came meanwhile is stored in FREEZE, so every text can be restored from B."""
    texts = prompts(12)
    expected = [stack.engine.generate(text, 24)["output_ids"] for text in texts]
    stack.engine.flush()
    stack.attach("file", stack.directory("a"))
    with Load(stack.engine, expected) as load:
        until("answers before", lambda: load.answers >= 6, 60.0)
        answer = stack.client.swap(
            "file", json.dumps({"prefetch_threshold": 32, **stack.directory("b")}), mode="drain", wait_timeout_s=20.0,
            checkpoint=True, hicache_write_policy="write_back", hicache_storage_prefetch_policy="wait_complete",
        )  # fmt: skip
        assert answer.success
        seen = load.answers
        until("answers after", lambda: load.answers >= seen + 6, 60.0)
    assert load.problems == []
    assert [stack.engine.generate(text, 24)["output_ids"] for text in texts] == expected
    assert stack.client.detach(mode="drain", wait_timeout_s=20.0, checkpoint=True).success
    stack.engine.flush()
    stack.attach("file", stack.directory("b"))
    for text, output in zip(texts, expected, strict=True):
        answers = [stack.generate(text, rank) for rank in (0, 1)]
        assert [answer["output_ids"] for answer in answers] == [output] * 2
        assert all(answer["meta_info"]["cached_tokens_details"]["storage"] for answer in answers)
    assert stack.client.detach(mode="drain", wait_timeout_s=20.0).success
