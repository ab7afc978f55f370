"""A store whose server is killed under load, behind the embedded engine: no request notices, and hits come back.

Every store with a server of its own, with the real server, beside an engine that never had a store. What is asserted
is the cause of a small cost: the breaker opens in its window, and then no request makes a call. The cost itself, the
time to the first token beside that engine's, is printed here and has its target in ``tests/bench/bench_dead_store.py``.
"""

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.e2e.engine.test_equality import prompts
from tests.e2e.engine.test_storage import Load
from tests.rigs.stores.serving import Serving, guard_knobs, serving, until
from tests.stores.conftest import line_id, lines, started

pytestmark = [pytest.mark.stores, pytest.mark.timeout(600)]

HITS_S = 60.0
BACK_S = 90.0  # the breaker looks again after growing holds, and the store has its own time to come back
ANSWERS = 24
ANSWERS_S = 120.0
PAIRS = 30


@pytest.fixture(params=lines(server=True), ids=line_id)
def with_server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Serving]:
    """Each store with a server."""
    line = request.param
    with ExitStack() as stack:
        stand = started(line, tmp_path / "store", stack)
        yield stack.enter_context(serving(stand, tmp_path, plain=True))


def test_a_killed_server_fails_no_request_and_hits_return_by_themselves(with_server: Serving) -> None:
    """No operator: the engine recomputes while the store is gone and uses it again when it is back (F77, F79, F84)."""
    engine, plain, stand = with_server.engine, with_server.plain, with_server.stand
    assert plain is not None
    expected = [plain.generate(text, 24)["output_ids"] for text in prompts(12)]
    with_server.attach(**guard_knobs())
    config = json.loads(with_server.client.status(fresh=True).hicache_storage_backend_extra_config or "")
    window_s, deadline_s = float(config["guard_window_s"]), float(config["guard_deadline_s"])
    with Load(engine, expected) as load:
        until("hits before", lambda: load.from_storage > 0, HITS_S)
        stand.kill()
        killed = time.monotonic()
        until("an open breaker", lambda: with_server.guard().breaker != "closed", HITS_S)
        report = with_server.guard()
        opened_s = time.monotonic() - report.opened_for_s - killed
        # A call that is inside when the server dies is known to have failed at its deadline.
        assert opened_s <= window_s + deadline_s, report
        until("what was inside at the opening is over",
              lambda: min(side.opened_for_s for side in with_server.guard().sides.values() if side.state != "closed")
              > 2 * deadline_s, HITS_S)  # fmt: skip
        calls, seen = with_server.guard().calls, load.answers
        until("answers while the store is dead", lambda: load.answers >= seen + ANSWERS, ANSWERS_S)
        report = with_server.guard()
        assert report.breaker != "closed"
    assert load.problems == []
    used = with_server.client.status(fresh=True).usage
    assert used["exists"].skipped > 0

    ours, theirs = with_server.first_tokens([f"{i} {prompts(12)[4]}" for i in range(PAIRS)])
    after = with_server.guard()
    print(f"{stand.name}: breaker open {opened_s:.2f} s after the kill ({report.reason}), {report.calls - calls} calls "
          f"made by {load.answers - seen} requests with the breaker open; time to first token "
          f"{ours / theirs:.2f} x that of an engine without a store")  # fmt: skip
    assert after.calls == report.calls == calls, "with the breaker open no request makes a call"

    with Load(engine, expected) as load:
        stand.restart()
        hits = with_server.client.status(fresh=True).usage["get"].hit
        until("hits after", lambda: with_server.client.status(fresh=True).usage["get"].hit > hits, BACK_S)
    assert load.problems == []
