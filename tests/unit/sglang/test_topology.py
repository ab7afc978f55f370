"""Where a scheduler stands, and which combinations are refused by name."""

from types import SimpleNamespace
from typing import Any

import pytest

from hicache_hooks.sglang import topology
from hicache_hooks.sglang.refusing import RefusingAdapter
from hicache_proto.errors import UnsupportedByEngine
from hicache_proto.model import TargetState


@pytest.fixture
def parallel(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The engine's parallel context: one rank, alone."""
    context = SimpleNamespace(
        dp_rank=None, num_dp_ranks=1, attn_dp_size=1, attn_dp_enabled=False, attn_cp_size=1,
        pp_rank=0, pp_size=1, tp_rank=0, tp_size=1,
    )  # fmt: skip
    monkeypatch.setattr(topology, "parallel", lambda: context)
    return context


def scheduler(**changes: Any) -> Any:
    tree = SimpleNamespace(cache_controller=object(), _storage_attachment=object())
    return SimpleNamespace(tree_cache=tree, enable_hierarchical_cache=True, **changes)


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({}, (0, 1, 0, 1)),
        ({"tp_rank": 1, "tp_size": 2}, (0, 1, 1, 2)),
        ({"dp_rank": 1, "num_dp_ranks": 2}, (1, 2, 0, 1)),
        # DP attention: two groups in one tensor-parallel world, not two worlds of two.
        ({"dp_rank": 1, "num_dp_ranks": 2, "attn_dp_size": 2, "tp_rank": 1, "tp_size": 2}, (0, 1, 1, 2)),
        ({"dp_rank": 3, "num_dp_ranks": 4, "attn_dp_size": 2, "tp_rank": 1, "tp_size": 2}, (1, 2, 1, 2)),
    ],
)
def test_the_place_of_a_rank(
    parallel: SimpleNamespace, changes: dict[str, int], place: tuple[int, int, int, int]
) -> None:
    """The sidecar counts the ranks that it expects by these: too many, and it would wait instead of refusing."""
    vars(parallel).update(changes)
    found = topology.identity()
    assert (found.dp_rank, found.dp_size, found.tp_rank, found.tp_size) == place


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"pp_size": 2}, "pp_size"),
        ({"attn_dp_enabled": True}, "DP attention"),
        ({"attn_cp_size": 2}, "context parallelism"),
    ],
)
def test_what_was_not_shown_is_refused_by_name(parallel: SimpleNamespace, changes: dict[str, Any], name: str) -> None:
    assert topology.refusals(scheduler()) == []
    vars(parallel).update(changes)
    (refusal,) = topology.refusals(scheduler())
    assert name in refusal


def test_an_engine_without_what_storage_hangs_on_is_refused_by_name(parallel: SimpleNamespace) -> None:
    bare = scheduler()
    bare.enable_hierarchical_cache = False
    assert "--enable-hierarchical-cache" in topology.refusals(bare)[0]
    other = scheduler()
    other.tree_cache._storage_attachment = None
    assert "cannot attach storage at run time" in topology.refusals(other)[0]


def test_a_refusing_rank_says_why(parallel: SimpleNamespace) -> None:
    adapter = RefusingAdapter(scheduler(), ["pipeline parallelism is not supported yet"], lambda: None)
    with pytest.raises(UnsupportedByEngine, match="pipeline parallelism"):
        adapter.validate(TargetState(), mode="strict", swap=False)
    with pytest.raises(UnsupportedByEngine):
        adapter.build(TargetState(), lambda: False)
