"""An engine that was started with storage: adopted as it is, exchanged, put back; on a spinning scheduler."""

import pytest
from tests.rigs.sglang_server import HIT, Fleet, from_storage, ids_of, prompt, until


@pytest.mark.parametrize("topology", ["startup"])
def test_storage_from_the_command_line_is_adopted_and_replaced(fleet: Fleet, topology: str) -> None:
    """First contact adopts it as revision 1; a swap to another directory wins over the environment variable that the
    engine was started with; a roll-back to revision 1 finds the old pages. The tree is hashed before an attach."""
    stack = fleet.get(topology)
    status = stack.status()
    assert (status["state"], status["hicache_storage_backend"], status["drift"]) == ("attached", "file", [])
    assert status["hicache_storage_prefetch_policy"] == "wait_complete"
    first = status["revision"]
    ids = prompt()
    expected = ids_of(stack.server.generate(ids))
    until(lambda: len(stack.pages("startup")) >= 32, "pages in the store of the command line")
    stack.server.flush()
    again = stack.server.generate(ids)
    assert from_storage(again) >= HIT
    assert stack.status()["usage"]["get"]["hit"] > 0  # guarded since the engine's start

    before = stack.pages("startup")
    code, answer = stack.put(stack.body("other", swap=True, wait_timeout_s=10))
    assert code == 200, answer
    fresh = prompt()
    stack.server.generate(fresh)
    until(lambda: len(stack.pages("other")) >= 32, "pages in the other store")
    assert stack.pages("startup") == before

    stack.detach("?wait_timeout_s=10")
    unhashed = [prompt(512) for _ in range(4)]
    answers = [ids_of(stack.server.generate(ids)) for ids in unhashed]  # nodes without hashes
    stack.attach("later", wait_timeout_s=10)
    grown = [*unhashed[0], *prompt(256)]
    stack.server.generate(grown)  # hashed below nodes that were hashed late
    until(lambda: len(stack.pages("later")) > 1, "pages in the third store")
    assert [ids_of(stack.server.generate(ids)) for ids in unhashed] == answers

    code, back = stack.admin("POST", "/hicache/rollback", {"revision": first, "wait_timeout_s": 30})
    assert code == 200, back
    stack.server.flush()
    again = stack.server.generate(ids)
    assert from_storage(again) >= HIT
    assert ids_of(again) == expected
