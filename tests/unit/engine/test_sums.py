"""Sums over ranks are kept until a report is new."""

from hicache_proto.model import EffectiveState, IdleReport, OpUsage, RankReport, StoreUsage
from hicache_sidecar.engine.sums import Sums


def report(hits: int) -> RankReport:
    used = {"get": OpUsage(hit=hits)}
    return RankReport(state=EffectiveState(), idle=IdleReport(), usage=used, stores={"file": StoreUsage(ops=used)})


def test_a_new_report_of_one_rank_is_summed_again() -> None:
    sums, one, two = Sums(), report(1), report(2)
    used, by_store = sums.of([one, two])
    assert (used["get"].hit, by_store["file"].ops["get"].hit) == (3, 3)
    assert sums.of([one, two])[0] is used, "the same reports"
    used, by_store = sums.of([one, report(5)])
    assert (used["get"].hit, by_store["file"].ops["get"].hit) == (6, 6)


def test_a_rank_that_comes_or_goes_is_summed_again() -> None:
    sums, one, two = Sums(), report(1), report(2)
    assert sums.of([one])[0]["get"].hit == 1
    assert sums.of([one, two])[0]["get"].hit == 3
    assert sums.of([two])[0]["get"].hit == 2
    assert sums.of([]) == ({}, {})
    assert sums.of([]) == ({}, {})
