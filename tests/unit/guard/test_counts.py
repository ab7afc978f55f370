"""A store's counters: when it counts as written and never read."""

from hicache_hooks.guard_counts import BLOCK, BLOCKS, Counts
from hicache_proto.usage import MIN_LOOKUPS, stores

WINDOW = BLOCK * (BLOCKS + 1)  # after so many look-ups nothing of before counts


def asked(counts: Counts, n: int, *, written: int = 0, read: int = 0) -> None:
    for _ in range(n):
        counts.add("put", hit=written)
        counts.add("get", hit=read)
        counts.looked_up()


def test_a_store_that_was_read_once_and_never_again() -> None:
    """F57: writes > 0 and hits = 0 over the window, whatever was long ago; a page that is read ends it."""
    counts = Counts()
    asked(counts, MIN_LOOKUPS, written=1, read=1)
    assert not counts.store_usage().write_only
    asked(counts, WINDOW - 1, written=1)
    used = counts.store_usage()
    assert used.write_only
    assert used.recent.read == 0
    assert BLOCK * BLOCKS <= used.recent.lookups < WINDOW
    assert used.recent.written == used.recent.lookups
    asked(counts, 1, read=1)
    assert not counts.store_usage().write_only


def test_an_old_hit_inside_the_window_is_no_alarm() -> None:
    counts = Counts()
    asked(counts, 1, written=1, read=1)
    asked(counts, BLOCK * BLOCKS - 2, written=1)
    assert not counts.store_usage().write_only


def test_misses_alone_are_no_alarm() -> None:
    """Nothing is written either: the text is new, and the policy stores it later, or never."""
    counts = Counts()
    asked(counts, 2, written=1, read=1)
    asked(counts, 2 * WINDOW)
    assert not counts.store_usage().write_only


def test_windows_of_ranks_are_summed() -> None:
    """One that has no traffic is no alarm while another reads."""
    idle, busy = Counts(), Counts()
    asked(idle, 1, written=1, read=1)
    asked(busy, 1, written=1, read=1)
    asked(idle, 2 * WINDOW, written=1)
    asked(busy, 2 * WINDOW, written=1)
    assert stores([{"file": idle.store_usage()}, {"file": busy.store_usage()}])["file"].write_only
    asked(busy, 1, read=1)
    assert not stores([{"file": idle.store_usage()}, {"file": busy.store_usage()}])["file"].write_only


def test_the_last_put_says_whether_there_is_room() -> None:
    """F62: a page for which there is no room is a miss of its put; errors and other calls say nothing about room."""
    counts = Counts()
    assert not counts.no_room
    counts.add("put", hit=3, miss=1)
    assert counts.no_room
    counts.add("put", error=4)
    counts.add("get", hit=2, miss=2)
    assert counts.no_room
    counts.add("put", hit=4)
    assert not counts.no_room
