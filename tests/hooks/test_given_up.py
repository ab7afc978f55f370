"""Builders that do not end: given up after a while, a few at most, and what they still make is closed."""

import threading

from tests.hooks.driver import FILE, Driver
from tests.hooks.test_endings import OTHER, error_of, scripted

from hicache_hooks.builder import MAX_GIVEN_UP
from hicache_proto.hooklink import Prepare


def impatient() -> Driver:
    """A rank that gives a cancelled builder up at once."""
    rank = Driver()
    rank.hook.transaction._builder._give_up_s = 0.01
    return rank


def hang(rank: Driver, n: int) -> threading.Event:
    """A PREPARE whose builder hangs until the event, and its UNDO."""
    rank.adapter.build_gate = gate = threading.Event()
    begun = rank.adapter.calls.count("build")
    rank.send(Prepare(target=FILE, prepared_s=30), n)
    rank.until(lambda: rank.adapter.calls.count("build") > begun)
    assert rank.undo(n).ok
    rank.adapter.build_gate = None
    return gate


def free(rank: Driver) -> None:
    """Scheduler passes until the next PREPARE would be taken."""
    rank.until(lambda: rank.hook.transaction._builder.busy is None and not rank.hook.transaction.record.builder_n)


def test_the_next_operation_does_not_wait_for_it() -> None:
    """Rule 9: what it makes in the end is closed once, and touches neither the table nor what runs by then.
    F46: while it is not back the report counts it."""
    rank = impatient()
    abandoned = rank.hook.report().abandoned
    gate = hang(rank, 1)
    free(rank)
    assert rank.hook.report().abandoned == abandoned + 1
    rank.move(2, OTHER)
    record, running = rank.hook.transaction.record, rank.adapter.installed
    gate.set()
    rank.until(lambda: len(rank.adapter.sets) > 1 and rank.closed().count(1) == 1)
    rank.settle()
    assert rank.hook.report().abandoned == abandoned
    assert (rank.hook.transaction.record, rank.adapter.installed) == (record, running)
    assert running.closed == 0
    rank.move(3)


def test_it_comes_back_in_the_middle_of_the_next_build() -> None:
    """The late set is closed; the present builder goes on, and its own result is taken."""
    rank = impatient()
    late = hang(rank, 1)
    free(rank)
    rank.adapter.build_gate = gate = threading.Event()
    waiting = rank.send(Prepare(target=OTHER, prepared_s=30), 2)
    rank.until(lambda: rank.adapter.calls.count("build") == 2)
    late.set()
    rank.until(lambda: 1 in rank.closed())
    assert rank.hook.transaction._builder.busy == 2
    gate.set()
    assert rank.answer_to(waiting).ok
    for answer in (rank.freeze(2), rank.commit(2), rank.finalize(2)):
        assert answer.ok, answer
    assert rank.adapter.installed.closed == 0
    assert sorted(rank.closed()) == [0, 1]


def test_their_number_is_bounded() -> None:
    """Each keeps a thread and a store's memory: one more is waited for, until one of them is back."""
    rank = impatient()
    gates = []
    for n in range(1, MAX_GIVEN_UP + 1):
        gates.append(hang(rank, n))
        free(rank)
    gates.append(hang(rank, 10))
    refused = error_of(rank.ask(Prepare(target=OTHER, prepared_s=30), 11))
    assert (refused.details["reason"], refused.details["running"]) == ("builder_busy", 10)
    assert rank.undo(11).ok
    watch = next(thread for thread in threading.enumerate() if thread.name == "hicache-build-watch-10")
    for _ in range(5):  # its looks; none of them may give it up
        watch.join(0.02)
        assert rank.hook.transaction._builder.busy == 10
    gates[0].set()
    free(rank)  # given up now: that one still hangs
    rank.move(12, OTHER)
    for gate in gates:
        gate.set()
    rank.until(lambda: sorted(rank.closed()) == [0] + [1] * len(gates))


def test_one_that_ends_in_time_is_not_given_up() -> None:
    """Its end is the ordinary one: the table closes what it built."""
    rank = Driver()
    gate = hang(rank, 1)
    gate.set()
    free(rank)
    rank.settle()
    assert rank.closed() == [1]
    assert rank.hook.transaction._builder._given_up == 0
    rank.move(2, OTHER)


def test_one_that_fails_late_leaves_nothing() -> None:
    rank = impatient()
    rank.adapter.build_gate = gate = threading.Event()
    rank.send(Prepare(target=scripted(build_error=True), prepared_s=30), 1)
    rank.until(lambda: rank.adapter.calls.count("build") == 1)
    assert rank.undo(1).ok
    rank.adapter.build_gate = None
    free(rank)
    rank.move(2)
    gate.set()
    rank.until(lambda: rank.hook.transaction._builder._given_up == 0)
    assert rank.closed() == [0]
    assert rank.hook.transaction.record.n == 2
