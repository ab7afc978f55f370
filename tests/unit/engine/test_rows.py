"""Rows of status are kept until a report is new; what changes without a report is never kept."""

from typing import Any

import pytest

from hicache_proto.hooklink import RankHello
from hicache_proto.model import EffectiveState, IdleReport, RankIdentity, RankReport, State
from hicache_proto.transaction import RankPhase
from hicache_proto.version import PROTOCOL_VERSION
from hicache_sidecar.engine import rows as module
from hicache_sidecar.engine.registry import Session
from hicache_sidecar.engine.rows import Rows

SECRET = '{"file_storage_path": "/s", "password": "hunter2"}'


class Registry:
    """Sessions, and an age that a test sets."""

    def __init__(self) -> None:
        self.ranks: dict[int, Session] = {}
        self.age = 0

    def age_ms(self, session: Session) -> int:
        return self.age

    def seat(self, rank: int, report: RankReport, *, pid: int = 1) -> Session:
        hello = RankHello(
            protocol=PROTOCOL_VERSION, engine_id="e", session=f"s{rank}-{pid}", role="rank", pid=pid, incarnation="i",
            identity=RankIdentity(dp_rank=rank, dp_size=2), epoch=1,
        )  # fmt: skip
        self.ranks[rank] = Session(hello=hello, report=report, seen_at=0.0, report_at=0.0)
        return self.ranks[rank]


def report(backend: str | None = "file", **fields: Any) -> RankReport:
    return RankReport(state=EffectiveState(backend=backend, extra_config=SECRET), idle=IdleReport(), **fields)


@pytest.fixture
def redacted(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """Every config that was redacted."""
    seen: list[str | None] = []
    real = module.redact_config
    monkeypatch.setattr(module, "redact_config", lambda config: (seen.append(config), real(config))[1])
    return seen


def test_a_report_is_redacted_once_however_often_status_is_asked_for(redacted: list[str | None]) -> None:
    registry, rows = Registry(), Rows()
    registry.seat(1, report())
    registry.seat(0, report())
    for registry.age in (5, 7):
        got = rows.of(registry)  # type: ignore[arg-type]
        assert [(row.rank, row.report_age_ms, row.state) for row in got] == [
            (0, registry.age, State.ATTACHED), (1, registry.age, State.ATTACHED)
        ]  # fmt: skip
        assert all("hunter2" not in str(row) for row in got)
    assert len(redacted) == 2
    registry.ranks[1].report = report(None)
    assert [row.state for row in rows.of(registry)] == [State.ATTACHED, State.DETACHED]  # type: ignore[arg-type]
    assert len(redacted) == 3


def test_a_lost_rank_and_its_successor_are_never_shown_as_the_former_one() -> None:
    registry, rows = Registry(), Rows()
    one = report()
    session = registry.seat(0, one, pid=1)
    assert [(r.pid, r.connected) for r in rows.of(registry)] == [(1, True)]  # type: ignore[arg-type]
    session.alive = False
    (row,) = rows.of(registry)  # type: ignore[arg-type]
    assert (row.connected, row.state) == (False, State.ENGINE_DOWN)
    registry.seat(0, one, pid=2)
    assert [(r.pid, r.connected) for r in rows.of(registry)] == [(2, True)]  # type: ignore[arg-type]
    del registry.ranks[0]
    assert rows.of(registry) == []  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("backend", "to_store", "state"),
    [("file", True, State.ATTACHING), ("file", False, State.DETACHING), (None, True, State.ATTACHING)],
)
def test_a_rank_in_a_swap_is_not_detaching(backend: str | None, to_store: bool, state: State) -> None:
    """What a rank reports is the store that it has; where it goes, the operation knows."""
    registry, rows = Registry(), Rows()
    registry.seat(0, report(backend, op_phase=RankPhase.PREPARING))
    (row,) = rows.of(registry, to_store=to_store)  # type: ignore[arg-type]
    assert row.state is state
