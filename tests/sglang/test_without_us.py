"""What the stock path does where ours refuses: the comparison behind a claim. The server is lost by it."""

import pytest
from tests.rigs.procs import http_json
from tests.rigs.sglang_server import Stack, prompt


@pytest.mark.parametrize("topology", ["tp2"])
def test_one_rank_that_cannot_build_hangs_the_stock_engine(stack: Stack) -> None:
    """The engine's own PUT enters a collective on one rank alone: it never answers, and no request does after it."""
    assert stack.server.generate(prompt(64), 1)["output_ids"]
    stack.server.flush()  # its answer is out before its pages are in L2, and the stock PUT refuses until they are
    with pytest.raises(TimeoutError):
        stack.server.storage("PUT", stack.dynamic("OneRankFails", "stock"), timeout_s=8.0)
    sampling = {"max_new_tokens": 1, "temperature": 0}
    body = {"input_ids": prompt(64), "sampling_params": sampling}
    with pytest.raises(TimeoutError):
        http_json("POST", f"{stack.server.url}/generate", body, timeout_s=8.0)
    stack.lose_server()
