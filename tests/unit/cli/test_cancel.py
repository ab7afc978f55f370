"""``hicachectl cancel`` by its exit code: 0 says that the old state holds, and nothing else does."""

from typing import Any

import pytest

OPERATION = {"id": "op-1", "kind": "swap", "phase": "done", "done": True, "started_at": "t", "elapsed_ms": 1.0}
ERROR = {"code": "rolled_back", "message": "cancelled: every rank is on the old state"}


@pytest.mark.parametrize(
    ("answer", "code", "said"),
    [
        ({**OPERATION, "phase": "failed", "error": ERROR}, 0, ""),
        (OPERATION, 1, "op-1 was done before it could be cancelled; `hicachectl rollback` goes back\n"),
        ({**OPERATION, "phase": "freeze", "done": False}, 4, "op-1 is not over yet: hicachectl operations op-1\n"),
    ],
)
@pytest.mark.parametrize("form", ["table", "json"])
def test_the_exit_code_tells_which_state_holds(
    ctl: Any, answer: dict[str, Any], code: int, said: str, form: str
) -> None:
    ran = ctl("-o", form, "cancel", "op-1", answer=answer)
    assert (ran.code, ran.err) == (code, said)
    if form == "json":
        assert ran.json["phase"] == answer["phase"]
