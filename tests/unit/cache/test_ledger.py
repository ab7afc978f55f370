"""The page ledger against a plain model, and that each misuse raises and changes nothing."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hicache_hooks.cache.ledger import Ended, LedgerError, PageLedger

TOTAL = 12


class LedgerMachine(RuleBasedStateMachine):
    """F41, F42: what the ledger says equals what a list of owners says."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = PageLedger(TOTAL)
        self.open: dict[int, list[int]] = {}
        self.tree: list[int] = []

    def some(self, data: st.DataObject, pages: list[int]) -> list[int]:
        picked = data.draw(st.lists(st.sampled_from(pages), unique=True)) if pages else []
        return picked

    @rule()
    def begin(self) -> None:
        self.open[self.ledger.begin("x")] = []

    @precondition(lambda self: self.open)
    @rule(data=st.data(), n=st.integers(0, TOTAL))
    def take(self, data: st.DataObject, n: int) -> None:
        number = data.draw(st.sampled_from(sorted(self.open)))
        free = TOTAL - len(self.tree) - sum(map(len, self.open.values()))
        pages = self.ledger.take(number, n)
        assert (pages is None) == (n > free)
        self.open[number] += pages or []

    @precondition(lambda self: self.open)
    @rule(data=st.data(), keep=st.booleans())
    def leave(self, data: st.DataObject, keep: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.open)))
        pages = self.some(data, self.open[number])
        (self.ledger.to_tree if keep else self.ledger.release)(number, pages)
        self.open[number] = [p for p in self.open[number] if p not in pages]
        self.tree += pages if keep else []

    @rule(data=st.data())
    def free_tree(self, data: st.DataObject) -> None:
        pages = self.some(data, self.tree)
        self.ledger.free_tree(pages)
        self.tree = [p for p in self.tree if p not in pages]

    @precondition(lambda self: self.open)
    @rule(data=st.data(), outcome=st.sampled_from(Ended))
    def end(self, data: st.DataObject, outcome: Ended) -> None:
        number = data.draw(st.sampled_from(sorted(self.open)))
        self.ledger.end(number, outcome)
        del self.open[number]
        with pytest.raises(LedgerError):
            self.ledger.end(number, outcome)

    @rule(data=st.data(), number=st.integers(0, 6))
    def misuse(self, data: st.DataObject, number: int) -> None:
        page = data.draw(st.integers(0, TOTAL - 1))
        if page not in self.tree:
            with pytest.raises(LedgerError):
                self.ledger.free_tree([page])
        if page not in self.open.get(number, []):
            for move in (self.ledger.release, self.ledger.to_tree):
                with pytest.raises(LedgerError):
                    move(number, [page])

    @invariant()
    def agrees(self) -> None:
        self.ledger.check()
        self.ledger.check_tree(self.tree)
        assert self.ledger.reserved == sum(map(len, self.open.values()))
        assert self.ledger.open == len(self.open)


LedgerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_ledger_model = LedgerMachine.TestCase


def test_a_double_free_in_one_call_raises_and_changes_nothing() -> None:
    ledger = PageLedger(4)
    number = ledger.begin("x")
    pages = ledger.take(number, 2) or []
    for twice in (ledger.release, ledger.to_tree):
        with pytest.raises(LedgerError):
            twice(number, [pages[0], pages[0]])
    ledger.to_tree(number, pages)
    with pytest.raises(LedgerError):
        ledger.free_tree([pages[0], pages[0]])
    ledger.check()
    assert (ledger.free, ledger.in_tree, ledger.reserved) == (2, 2, 0)


def test_a_wrong_tree_is_noticed() -> None:
    ledger = PageLedger(4)
    number = ledger.begin("x")
    ledger.to_tree(number, ledger.take(number, 2) or [])
    with pytest.raises(LedgerError):
        ledger.check_tree([0])


def test_counts_that_do_not_add_up_are_noticed() -> None:
    """F42: the cheap check of every idle moment."""
    ledger = PageLedger(4)
    number = ledger.begin("x")
    ledger.take(number, 2)
    assert ledger.balanced
    ledger._operations[number][1].pop()
    assert not ledger.balanced
    with pytest.raises(LedgerError):
        ledger.check()
