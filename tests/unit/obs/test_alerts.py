"""The alert rules that are shipped: they ask for metrics that exist, and their state numbers are the fixed ones."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.unit.obs.test_metrics import FakeCoordinator

from hicache_proto.model import State
from hicache_sidecar.obs.counters import Counters
from hicache_sidecar.obs.metrics import STATE_NUMBERS, Metrics

FILE = Path(__file__).resolve().parents[3] / "systemd" / "prometheus-alerts.yml"
RULES: list[dict[str, Any]] = yaml.safe_load(FILE.read_text())["groups"][0]["rules"]


def test_names_are_unique_and_every_rule_is_whole() -> None:
    names = [rule["alert"] for rule in RULES]
    assert len(set(names)) == len(names) > 5
    assert {rule["labels"]["severity"] for rule in RULES} == {"warning", "critical"}
    assert all(rule["annotations"]["summary"] for rule in RULES)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule["alert"]))
def test_every_metric_of_a_rule_is_served(rule: dict[str, Any]) -> None:
    """A renamed metric would leave a rule that is valid and never fires."""
    body, _ = Metrics(Counters()).render(FakeCoordinator(), "")  # type: ignore[arg-type]
    served = set(re.findall(r"^# HELP (\w+)", body.decode(), re.MULTILINE))
    asked = set(re.findall(r"\b(?:hicache_\w+|up)\b", rule["expr"]))
    assert asked
    assert asked - served <= {"up"}  # the scraper's own


@pytest.mark.parametrize(
    ("alert", "state"),
    [
        ("HicacheEngineDown", State.ENGINE_DOWN),
        ("HicacheBypassed", State.BYPASSED),
        ("HicacheSplit", State.SPLIT),
        ("HicacheQuarantined", State.QUARANTINED),
    ],
)
def test_a_state_is_asked_for_by_its_number(alert: str, state: State) -> None:
    expr = next(rule["expr"] for rule in RULES if rule["alert"] == alert)
    assert f"hicache_state == {STATE_NUMBERS[state]}" in expr
