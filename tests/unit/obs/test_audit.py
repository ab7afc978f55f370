"""The audit line: one for each change, none for reading, never a secret."""

import logging

import pytest
import trio
from tests.unit.server.fakes import FakeService

from hicache_proto import api
from hicache_proto.errors import HicacheError, RolledBack
from hicache_sidecar.core.actor import Actor, Role
from hicache_sidecar.obs.audit import Audited
from hicache_sidecar.obs.counters import MAX_SERIES, OTHER, Counters

ROOT = Actor(name="root", role=Role.ADMIN, uid=0, gid=0, pid=42)


@pytest.fixture
def audited(caplog: pytest.LogCaptureFixture) -> tuple[Audited, FakeService, Counters]:
    caplog.set_level(logging.INFO)
    service, counters = FakeService(), Counters()
    return Audited(service, counters), service, counters


Trio = tuple[Audited, FakeService, Counters]


def audit_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "hicache.audit"]


async def test_change_leaves_one_line(audited: Trio, caplog: pytest.LogCaptureFixture) -> None:
    request = api.AttachRequest(hicache_storage_backend="file", reason="upgrade", request_id="k", if_revision=3)
    await audited[0].handle(request, ROOT, lambda _: None)
    (line,) = audit_lines(caplog)
    for part in (
        "root uid=0 pid=42 via=socket", "attach hicache_storage_backend=file", 'reason="upgrade"', "if_revision=3",
        "request_id=k", "-> ok", "operation_id=op-1", "revision=7",
    ):  # fmt: skip
        assert part in line
    assert audited[2].get("hicache_requests", "attach", "socket", "ok") == 1


async def test_refusals_and_strangers_leave_one_too(audited: Trio, caplog: pytest.LogCaptureFixture) -> None:
    audited[1].raises = RolledBack("no", operation_id="op-2")
    with pytest.raises(RolledBack):
        await audited[0].handle(api.DetachRequest(), ROOT, lambda _: None)
    viewer = Actor(name="loopback", role=Role.VIEWER, transport="http")
    with pytest.raises(HicacheError):
        await audited[0].handle(api.ClearRequest(confirm="ns-1"), viewer, lambda _: None)
    first, second = audit_lines(caplog)
    assert "-> rolled_back operation_id=op-2" in first
    assert "loopback via=http: clear confirm=ns-1 -> forbidden" in second


async def test_a_clear_says_who_what_and_how_much(audited: Trio, caplog: pytest.LogCaptureFixture) -> None:
    """F118: principal, scope and count."""
    answer = api.ClearAnswer(success=True, deleted=12, namespace="ns-1", message="deleted 12 pages of ns-1", ranks=[])
    audited[1].answer = answer
    await audited[0].handle(api.ClearRequest(confirm="ns-1"), ROOT, lambda _: None)
    (line,) = audit_lines(caplog)
    assert line.startswith("audit: root uid=0 pid=42 via=socket: clear confirm=ns-1 -> ok deleted=12 namespace=ns-1")


async def test_cancelled_and_failed_ones_as_well(audited: Trio, caplog: pytest.LogCaptureFixture) -> None:
    audited[1].wait = trio.Event()
    with trio.move_on_after(0):
        await audited[0].handle(api.DetachRequest(), ROOT, lambda _: None)
    audited[1].wait, audited[1].raises = None, ValueError("x")
    with pytest.raises(ValueError):
        await audited[0].handle(api.DetachRequest(), ROOT, lambda _: None)
    first, second = audit_lines(caplog)
    assert "-> cancelled" in first
    assert "-> internal" in second


async def test_reading_leaves_none(audited: Trio, caplog: pytest.LogCaptureFixture) -> None:
    await audited[0].handle(api.StatusRequest(), ROOT, lambda _: None)
    assert audit_lines(caplog) == []
    assert audited[2].get("hicache_requests", "status", "socket", "ok") == 1


async def test_config_is_never_in_the_line_and_lines_cannot_be_forged(
    audited: Trio, caplog: pytest.LogCaptureFixture
) -> None:
    """F94, and a reason with a line break stays one line."""
    request = api.AttachRequest(
        hicache_storage_backend="file",
        hicache_storage_backend_extra_config_json='{"password": "S3NTINEL"}',
        reason="x\naudit: root: detach -> ok" + "y" * 1000,
    )
    await audited[0].handle(request, ROOT, lambda _: None)
    (line,) = audit_lines(caplog)
    assert "S3NTINEL" not in line
    assert "\n" not in line
    assert len(line) < 600


def test_counters_are_bounded_and_strict() -> None:
    """F92: 1 000 different values over time do not grow the table for ever."""
    counters = Counters()
    for index in range(MAX_SERIES + 500):
        counters.add("hicache_internal_errors", f"where-{index}")
    series = {family.name: values for family, values in counters.families()}["hicache_internal_errors"]
    assert len(series) == MAX_SERIES + 1
    assert series[OTHER,] == 500
    with pytest.raises(KeyError):
        counters.add("hicache_nothing")
    with pytest.raises(ValueError):
        counters.add("hicache_internal_errors", "a", "b")
