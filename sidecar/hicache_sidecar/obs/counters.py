"""Plain counters of the process, kept apart from any metrics library.

The transports and the engine link count here; ``metrics.py`` renders the numbers when somebody asks. A name and its
label names are declared once, so that a family can neither appear twice nor change shape (failures.md F89), and the
number of label values is bounded, so that no client can grow the memory (F92).
"""

from collections.abc import Iterator
from typing import NamedTuple

MAX_SERIES = 512  # per family; the label values are ours and few, so this is only a backstop
OTHER = "other"  # where values beyond the bound are counted


class Family(NamedTuple):
    """One counter family: its name without ``_total``, help text and label names."""

    name: str
    help: str
    labels: tuple[str, ...]


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("hicache_control_connections", "Control-socket connections by what became of them", ("result",)),
        Family("hicache_control_dropped_frames", "Control-socket frames refused before or while decoding", ("reason",)),
        Family("hicache_control_dropped_progress", "Progress frames not sent because the client read too slowly", ()),
        Family("hicache_http_connections", "HTTP connections by what became of them", ("result",)),
        Family("hicache_http_responses", "HTTP responses by route and status", ("route", "status")),
        Family("hicache_requests", "Requests by type, transport and result code", ("request", "transport", "code")),
        Family("hicache_internal_errors", "Unhandled exceptions, each with a traceback in the log", ("where",)),
    )
}


class Counters:
    """Counts by (family, label values). One instance per process; only the trio thread adds."""

    def __init__(self) -> None:
        self._values: dict[str, dict[tuple[str, ...], int]] = {name: {} for name in FAMILIES}

    def add(self, name: str, *values: str, by: int = 1) -> None:
        """Count one event.

        Raises:
            KeyError: no such family.
            ValueError: the number of label values does not fit the family.
        """
        family = FAMILIES[name]
        if len(values) != len(family.labels):
            raise ValueError(f"{name} has the labels {family.labels}")
        series = self._values[name]
        if values not in series and len(series) >= MAX_SERIES:
            values = (OTHER,) * len(values)
        series[values] = series.get(values, 0) + by

    def get(self, name: str, *values: str) -> int:
        """The present count; 0 if it never happened."""
        return self._values[name].get(values, 0)

    def families(self) -> Iterator[tuple[Family, dict[tuple[str, ...], int]]]:
        """Every family with a copy of its series, also the empty ones."""
        for name, family in FAMILIES.items():
            yield family, dict(self._values[name])
