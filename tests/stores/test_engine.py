"""Every store behind the embedded engine: tokens come back from it with the same output. Sidecar, engine and store are
real processes. What happens when the server dies is in ``test_engine_death.py``.
"""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from tests.e2e.engine.test_equality import prompts
from tests.rigs.stores.serving import Serving, serving
from tests.stores.conftest import line_id, lines, started

pytestmark = pytest.mark.stores


@pytest.fixture(scope="module", params=lines(), ids=line_id)
def every(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """Each store of the catalogue, its engine detached."""
    line = request.param
    root = tmp_path_factory.mktemp(f"engine-{line.name}")
    with ExitStack() as stack:
        stand = started(line, root / "store", stack)
        yield stack.enter_context(serving(stand, root))


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
