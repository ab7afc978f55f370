"""A topology in which the hooks were not shown to work: hooked, seen, and refused by name."""

import pytest
from tests.rigs.sglang_server import Fleet


@pytest.mark.parametrize("topology", ["dpattention"])
def test_dp_attention_is_refused_by_name(fleet: Fleet, topology: str) -> None:
    """Its ranks are all known to the sidecar; every change is refused at once with the reason, nothing is touched."""
    stack = fleet.get(topology)
    code, document = stack.admin("GET", "/hicache/ranks")
    assert code == 200
    assert [rank["rank"] for rank in document["ranks"]] == [0, 1]
    for rank in document["ranks"]:
        assert any("DP attention" in problem for problem in rank["capabilities"]["problems"]), rank
    code, answer = stack.put(stack.body("refused"))
    assert (code, answer["error"]["code"]) == (422, "unsupported_by_engine"), answer
    assert "DP attention" in answer["error"]["message"]
    status = stack.status()
    assert (status["state"], status["drift"]) == ("detached", [])
    assert stack.server.shown() is None
