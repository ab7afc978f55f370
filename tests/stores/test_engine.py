"""Every real store behind the embedded engine: tokens come back from it with the same output, and its death fails no
request. Sidecar, engine and store are real processes.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest
from tests.e2e.engine.conftest import SMALL
from tests.e2e.engine.test_equality import prompts
from tests.e2e.engine.test_processes import until
from tests.e2e.engine.test_storage import TINY, Load
from tests.rigs.procs import Engine, Processes
from tests.rigs.stores.base import Stand
from tests.stores.conftest import line_id, lines, started

from hicache_sidecar.client.typed import Client

pytestmark = pytest.mark.stores

BACK_S = 90.0  # the breaker looks again after growing holds, and the store has its own time to come back
DEAD_ANSWERS = 24  # requests that must be right while the store is dead


@dataclass
class Serving:
    """One engine on one store."""

    stand: Stand
    engine: Engine
    client: Client

    def attach(self) -> None:
        """Attach the stand's store; a short threshold, so that small prompts are fetched."""
        config = json.dumps({**self.stand.config(), "prefetch_threshold": 32})
        answer = self.client.attach(self.stand.backend_name, config, mode="drain", wait_timeout_s=20.0)
        assert answer.success, answer

    def detach(self) -> None:
        """Once the backups have ended."""
        assert self.client.detach(mode="drain", wait_timeout_s=20.0).success


def serving(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    line = request.param
    root = tmp_path_factory.mktemp(f"engine-{line.name}")
    with ExitStack() as stack:
        stand = started(line, root / "store", stack)
        processes = stack.enter_context(Processes(root))
        sidecar = processes.sidecar()
        engine = processes.engine(sidecar, *SMALL, *TINY, **stand.env())
        client = stack.enter_context(Client.connect(sidecar.socket))
        yield Serving(stand, engine, client)


every = pytest.fixture(scope="module", params=lines(), ids=line_id, name="every")(serving)
with_server = pytest.fixture(params=lines(server=True), ids=line_id, name="with_server")(serving)


def storage_tokens(answer: dict[str, dict[str, dict[str, int]]]) -> int:
    """Tokens of one answer that came from the store."""
    return answer["meta_info"]["cached_tokens_details"]["storage"]


def test_tokens_come_back_from_the_store_with_the_same_output(every: Serving) -> None:
    text = prompts(12)[4]
    plain = every.engine.generate(text, 24)
    every.engine.flush()
    every.attach()
    written = every.engine.generate(text, 24)
    every.engine.flush()  # waits for the backups, empties L1 and L2
    read = every.engine.generate(text, 24)
    assert read["output_ids"] == written["output_ids"] == plain["output_ids"]
    assert storage_tokens(read) >= len(text) - 48
    status = every.client.status(fresh=True)
    assert status.usage["get"].hit > 0
    assert status.usage["get"].error == status.usage["put"].error == 0
    every.detach()
    every.engine.flush()
    again = every.engine.generate(text, 24)
    assert (storage_tokens(again), again["output_ids"]) == (0, plain["output_ids"])
    every.attach()
    every.engine.flush()
    back = every.engine.generate(text, 24)
    assert back["output_ids"] == plain["output_ids"]
    assert (storage_tokens(back) > 0) == every.stand.outlives_client
    every.detach()


def test_a_killed_server_fails_no_request_and_hits_return_by_themselves(with_server: Serving) -> None:
    """No operator: the engine recomputes while the store is gone and uses it again when it is back."""
    engine, stand = with_server.engine, with_server.stand
    expected = [engine.generate(text, 24)["output_ids"] for text in prompts(12)]
    with_server.attach()
    with Load(engine, expected) as load:
        until("hits before", lambda: load.from_storage > 0, 60.0)
        stand.kill()
        seen = load.answers
        until("answers while the store is dead", lambda: load.answers >= seen + DEAD_ANSWERS, 120.0)
        stand.restart()
        hits = with_server.client.status(fresh=True).usage["get"].hit
        until("hits after", lambda: with_server.client.status(fresh=True).usage["get"].hit > hits, BACK_S)
    assert load.problems == []
    usage = with_server.client.status(fresh=True).usage
    assert sum(usage[kind].error + usage[kind].timeout + usage[kind].skipped for kind in ("put", "get", "exists")) > 0
