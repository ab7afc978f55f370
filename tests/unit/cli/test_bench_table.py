"""The bench runner's verdicts: a table that calls a missed target met would hide every slow build."""

from typing import Any

import pytest
from tests.bench.__main__ import ratio_of, table, target_met


def row(**fields: Any) -> dict[str, Any]:
    return {"name": "n", "value": 10.0, "unit": "ms", **fields}


@pytest.mark.parametrize(
    ("fields", "met"),
    [
        ({}, None), ({"target": 10}, True), ({"target": 9.9}, False), ({"target": "<= 10"}, True),
        ({"target": "< 10 ms"}, False), ({"target": ">= 10"}, True), ({"target": "> 10"}, False),
        ({"target": "≥ 11"}, False),
        ({"target": "<= 2.0x", "comparison": 5.0}, True), ({"target": "<= 1.9x", "comparison": 5.0}, False),
        ({"target": ">= 1.5 x", "comparison": 8.0}, False), ({"target": ">= 1.1×", "comparison": 8.0}, True),
    ],
)  # fmt: skip
def test_targets(fields: dict[str, Any], met: bool | None) -> None:
    assert target_met(row(**fields)) is met


@pytest.mark.parametrize("fields", [{"target": "fast"}, {"target": "<= 2x"}, {"target": "<= 2x", "comparison": "that"}])
def test_targets_that_say_nothing_are_errors(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        target_met(row(**fields))


def test_table_shows_ratio_and_verdict() -> None:
    text = table([row(comparison=4.0, target="<= 2x"), row(name="longer name")])
    assert "2.5" in text
    assert "NO" in text
    assert ratio_of(row()) is None
