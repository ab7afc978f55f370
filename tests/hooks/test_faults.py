"""Fault points: off by default, by name, and never silently misspelt."""

import pytest

from hicache_hooks.faults import BOUNDARIES, ENV, LOCAL_PHASES, PHASES, FaultError, Faults, LinkCut


def test_nothing_happens_by_default() -> None:
    faults = Faults.from_env({})
    assert not faults
    for phase in PHASES:
        for boundary in BOUNDARIES:
            faults.hit(phase, boundary)
    assert faults.hits == []


def test_a_fault_fires_once_and_all_means_every_time() -> None:
    faults = Faults.from_env({ENV: "commit.before_apply=error, undo.recv=cut@all"})
    with pytest.raises(FaultError, match=r"commit\.before_apply"):
        faults.hit("commit", "before_apply")
    faults.hit("commit", "before_apply")
    for _ in range(2):
        with pytest.raises(LinkCut):
            faults.hit("undo", "recv")
    faults.hit("undo", "after_apply")
    assert faults.hits == ["commit.before_apply", "undo.recv", "undo.recv"]


@pytest.mark.parametrize(
    "spec",
    [
        "commit",
        "commit.before=error",
        "comit.recv=error",
        "commit.recv=explode",
        "commit.recv=hang:x",
        "commit.recv=hang:-1",
        "commit.recv=hang:1e9",
        "commit.before_apply=cut",
        "commit.recv=kill@often",
        *[f"{phase}.recv=error" for phase in LOCAL_PHASES],
    ],
)
def test_a_misspelt_fault_is_an_error(spec: str) -> None:
    with pytest.raises(ValueError, match="fault"):
        Faults(spec)
