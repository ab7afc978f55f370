"""The process leaves: what is told to the sidecar while storage is let go (F72)."""

from pathlib import Path

import pytest
from tests.hooks.router import Router
from tests.rigs.light_rank import LightRank

from hicache_proto.hooklink import Goodbye, Notice


@pytest.mark.parametrize("stuck", [["hicache-x-backup-0"], []])
def test_storage_that_does_not_let_go_is_told_before_the_goodbye(tmp_path: Path, stuck: list[str]) -> None:
    """The rank is still connected while it lets its storage go; a clean end has nothing to tell."""
    endpoint = f"ipc://{tmp_path}/hooks.sock"
    with Router(endpoint) as sidecar:
        rank = LightRank(endpoint, incarnation="i1")
        sidecar.welcome()
        rank.hook.close("stopping", leave=lambda: stuck)
        sidecar.expect(Goodbye)
        notices = [m for _, m in sidecar.kept if isinstance(m, Notice)]
        assert [(n.kind, n.detail) for n in notices] == [("unclean_detach", name) for name in stuck]
        rank.close()


def test_storage_that_raises_is_unclean_and_the_goodbye_comes_all_the_same(tmp_path: Path) -> None:
    """Only the kind of the error is told: its text may hold secrets (F94)."""

    def leave() -> list[str]:
        raise OSError("secret")

    endpoint = f"ipc://{tmp_path}/hooks.sock"
    with Router(endpoint) as sidecar:
        rank = LightRank(endpoint, incarnation="i1")
        sidecar.welcome()
        rank.hook.close("stopping", leave=leave)
        sidecar.expect(Goodbye)
        assert [m.detail for _, m in sidecar.kept if isinstance(m, Notice)] == ["OSError"]
        rank.close()
