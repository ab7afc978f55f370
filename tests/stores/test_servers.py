"""Servers that are killed, hang, and come back, under one open backend. Real signals to real servers."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from tests.rigs.stores.base import Stand
from tests.rigs.stores.host import CallFailed, Host
from tests.stores.conftest import line_id, lines, started

pytestmark = pytest.mark.stores

SLACK_S = 3.0  # two busy cores
GIL_GAP_S = 1.5


@pytest.fixture(params=lines(server=True), ids=line_id)
def own_stand(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stand]:
    """A store that this test may harm."""
    line = request.param
    with ExitStack() as stack:
        yield started(line, tmp_path / line.name, stack)


@pytest.fixture
def host(own_stand: Stand) -> Iterator[Host]:
    """An open backend that has stored pages 1 and 2."""
    with Host(own_stand) as made:
        made.open()
        assert made.put([1, 2]) == [True, True]
        yield made


def attempts(stand: Stand, host: Host) -> list[str]:
    """One call of each kind on a dead store: never a hit, never late. Returns what each said."""
    limit = stand.dead_call_s + SLACK_S
    said = []
    for call in ("put", "get", "exists"):
        began = time.monotonic()
        try:
            answer = host.call(call, limit + 5, numbers=[1, 3], **({"version": 1} if call == "put" else {}))
        except CallFailed as exc:
            said.append(f"{call} raised {exc.kind}")
        else:
            said.append(f"{call} {answer}")
            # ``exists`` from a cache of the client and a page in flight may be right; a put cannot be.
            assert call != "put" or answer == [False, False], said
        assert time.monotonic() - began <= limit, said
    return said


def works_again(stand: Stand, host: Host, numbers: list[int]) -> list[str]:
    """Poll the same open backend until it stores and reads again; what ``get`` said then."""
    deadline = time.monotonic() + stand.back_s
    while True:
        with suppress(CallFailed):
            if host.put(numbers, timeout_s=stand.dead_call_s + 10) == [True] * len(numbers):
                return host.get(numbers, timeout_s=stand.dead_call_s + 10)
        assert time.monotonic() < deadline, f"{stand.name} is not back after {stand.back_s} s"
        time.sleep(0.1)  # pace of a poll


def test_a_killed_server_costs_bounded_calls_and_comes_back(own_stand: Stand, host: Host) -> None:
    own_stand.kill()
    said = attempts(own_stand, host)
    assert any("raised" in item or "False" in item or "error" in item or "miss" in item for item in said), said
    own_stand.restart()
    assert works_again(own_stand, host, [11, 12]) == ["hit", "hit"]
    before = host.get([1, 2])
    assert before == ["hit", "hit"] if own_stand.outlives_server else before in (["miss", "miss"], ["hit", "hit"])
    host.close()


def test_a_hung_server_costs_bounded_calls_and_no_other_thread(own_stand: Stand, host: Host) -> None:
    own_stand.hang()
    try:
        attempts(own_stand, host)
        limit = 2 * (own_stand.dead_call_s + SLACK_S) + 10
        found = host.call("probe", name="gil_gap", numbers=[21], rounds=1, timeout_s=limit)
        assert found["gap_s"] < GIL_GAP_S, found
    finally:
        own_stand.resume()
    assert works_again(own_stand, host, [31, 32]) == ["hit", "hit"]
    assert host.get([1, 2]) == ["hit", "hit"]
    host.close()


def test_close_on_a_hung_server_ends(own_stand: Stand, host: Host) -> None:
    """F72: a detach must not wait for a store that is gone."""
    own_stand.hang()
    began = time.monotonic()
    try:
        with suppress(CallFailed):
            host.close(timeout_s=own_stand.dead_call_s + SLACK_S + 5)
        assert time.monotonic() - began < own_stand.dead_call_s + SLACK_S
    finally:
        own_stand.resume()


def test_open_without_a_server_is_refused_in_time(own_stand: Stand) -> None:
    own_stand.kill()
    with Host(own_stand) as host:
        host.call("import_backend", own_stand.open_s, backend=own_stand.backend_name)
        began = time.monotonic()
        with pytest.raises(CallFailed) as caught:
            host.open()
        assert {"OSError", "HicacheError"} & set(caught.value.kinds), caught.value  # said, not stumbled over
        assert time.monotonic() - began < own_stand.dead_call_s + SLACK_S
