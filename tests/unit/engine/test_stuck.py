"""Threads that hang inside a store are news: once when it begins, once when it is over (F39)."""

from types import SimpleNamespace
from typing import Any

from hicache_proto.model import GuardReport, RankReport, ThreadReport
from hicache_sidecar.engine.events import EventHub
from hicache_sidecar.engine.stuck import StuckThreads


class Registry:
    """Where the listener is registered."""

    def __init__(self) -> None:
        self.on_report: list[Any] = []

    def report(self, session: str, *, stuck: tuple[str, ...] = (), stalled: tuple[str, ...] = ()) -> None:
        report = RankReport(
            guard=GuardReport(name="file", stuck=list(stuck)),
            threads=[ThreadReport("idle"), *(ThreadReport(name, stalled_s=9.0) for name in stalled)],
        )
        for listener in self.on_report:
            listener(SimpleNamespace(hello=SimpleNamespace(role="rank"), rank=3, id=session, report=report))


def test_a_thread_that_hangs_is_told_once_and_so_is_the_end() -> None:
    registry, hub = Registry(), EventHub(first_id=1)
    StuckThreads(registry, hub)  # type: ignore[arg-type]
    for _ in range(3):
        registry.report("s1", stalled=("a-backup-0",))
    registry.report("s1", stuck=("a-backup-0",))  # the same thread, now past its call's deadline
    registry.report("s1", stuck=("a-backup-0", "a-backup-1"))
    registry.report("s1")
    registry.report("s1")
    registry.report("s2", stalled=("d2h-0",))
    registry.report("s3", stalled=("d2h-0",))
    told = [(event.kind, event.data.get("threads")) for event in hub._ring]
    assert told == [
        ("storage_stuck", ["a-backup-0"]), ("storage_stuck", ["a-backup-1"]), ("storage_unstuck", None),
        ("storage_stuck", ["d2h-0"]), ("storage_stuck", ["d2h-0"]),
    ]  # fmt: skip
    assert {event.data["rank"] for event in hub._ring} == {3}
