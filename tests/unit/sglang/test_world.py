"""The agreement of a world of two: COMMIT's votes, and whether both ranks have storage groups."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hicache_hooks.sglang.world import BroadcastWorld

WAIT_S = 10.0
made: list[int] = []  # ranks that made groups in the last agreement


class Gloo:
    """``all_reduce`` with MIN between two threads."""

    def __init__(self) -> None:
        self.votes: list[Any] = []
        self.met = threading.Barrier(2)

    def all_reduce(self, vote: Any, op: Any, group: Any) -> None:
        assert (op, group) == (torch.distributed.ReduceOp.MIN, self)
        self.votes.append(vote.clone())
        self.met.wait(WAIT_S)
        vote.copy_(torch.stack(self.votes).min(dim=0).values)
        self.met.wait(WAIT_S)


@pytest.fixture
def agree(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[bool, bool]]]:
    def run(*ranks: tuple[bool, bool]) -> list[tuple[bool, bool]]:
        """Each rank's vote and whether it has groups; returns each one's answer and whether it saw a split."""
        gloo = Gloo()
        made.clear()
        monkeypatch.setattr(torch.distributed, "all_reduce", gloo.all_reduce)
        answers: list[tuple[bool, bool]] = [(False, False)] * len(ranks)

        def rank(place: int, ok: bool, has: bool) -> None:
            world, split = BroadcastWorld(leader=place == 0, ranks=2, group=gloo), threading.Event()
            world.has_groups, world.on_split = (lambda: has), split.set
            world.make_groups = lambda: made.append(place)
            answers[place] = (world.agree(ok), split.is_set())

        threads = [threading.Thread(target=rank, args=(place, *vote)) for place, vote in enumerate(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        return answers

    return run


@pytest.mark.parametrize("has", [True, False])
def test_all_must_say_yes(agree: Callable[..., list[tuple[bool, bool]]], has: bool) -> None:
    """Rule 11."""
    assert agree((True, has), (True, has)) == [(True, False)] * 2
    assert sorted(made) == ([] if has else [0, 1])  # where none has any, all make them, right after the vote
    assert agree((True, has), (False, has)) == [(False, False)] * 2
    assert made == []


def test_groups_on_one_rank_alone_stop_every_switch(agree: Callable[..., list[tuple[bool, bool]]]) -> None:
    """F114: the rank without groups would make them alone and wait for ever, with the scheduler's thread."""
    assert agree((True, True), (True, False)) == [(False, True)] * 2
    assert made == []


def test_groups_that_cannot_be_made_are_a_no() -> None:
    """The other ranks learn it at the vote that ends COMMIT, and swap back."""
    world = BroadcastWorld(leader=True, ranks=1)
    split = threading.Event()
    world._group, world.on_split = object(), split.set
    world.make_groups = lambda: 1 // 0  # type: ignore[assignment,return-value]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "all_reduce", lambda vote, op, group: None)
        assert not world.agree(True)
    assert split.is_set()


def test_a_world_of_one_asks_nobody() -> None:
    world = BroadcastWorld(leader=True, ranks=1)
    assert world.agree(True)
    assert not world.agree(False)
