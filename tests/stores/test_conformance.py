"""What every backend must keep, over every stand of the catalogue, against the real store.

Where the store is of ours the test's name says EMULATED. Checks of a dead server are in ``test_servers.py``, of a full
store in ``test_full.py``; both start their own stands.
"""

import pytest
from tests.rigs.stores.base import Stand
from tests.rigs.stores.host import CallFailed, Host

from hicache_proto.model import LAYOUTS

pytestmark = pytest.mark.stores

GIL_GAP_S = 0.75  # two busy cores; what it is to catch are seconds (a client that holds the GIL while it waits)
GIL_TRIES = 3  # the machine's own pauses are not there each time, a client's are
RSS_GROWTH = 5 << 20  # F43
THREADS = 4


def test_round_trip_and_a_hole_in_the_batch(host: Host) -> None:
    """Results are per key, whatever the store does with a batch of which one key is missing."""
    assert host.exists([101, 102, 103]) == [False, False, False]
    assert host.put([101, 103]) == [True, True]
    assert host.exists([101, 102, 103]) == [True, False, True]
    assert host.get([101, 102, 103]) == ["hit", "miss", "hit"]
    assert host.get([102, 103, 101]) == ["miss", "hit", "hit"]
    assert host.get([102]) == ["miss"]
    assert host.exists([102, 101]) == [False, True]


def test_large_batches_and_empty_ones(host: Host) -> None:
    numbers = list(range(1000, 1128))
    assert host.put(numbers) == [True] * 128
    assert host.get(numbers) == ["hit"] * 128
    assert host.delete([*numbers, 999]) == 128
    assert host.exists(numbers) == [False] * 128
    assert host.put([]) == []
    assert host.get([]) == []
    assert host.exists([]) == []
    assert host.delete([]) == 0


def test_the_same_key_twice_in_a_batch(host: Host) -> None:
    assert host.put([201, 202, 201]) == [True, True, True]
    assert host.get([201, 202, 201]) == ["hit", "hit", "hit"]


def test_an_overwritten_key_is_one_version_whole(host: Host) -> None:
    """Some stores keep the old bytes and say stored; a mixture would be wrong."""
    assert host.put([301]) == [True]
    assert host.put([301], version=2) == [True]
    assert host.get([301])[0] in ("hit", "hit 2")
    assert host.delete([301]) == 1
    assert host.put([301], version=3) == [True]
    assert host.get([301]) == ["hit 3"]


def test_a_short_object_is_no_hit_and_can_be_written_anew(stand: Stand, host: Host) -> None:
    """notes/backends.md: several clients report a short object as read, with a stale tail. F67 for ``exists``."""
    assert host.put([401, 402]) == [True, True]
    if not stand.shorten(f"ns.{401:064x}", "ns"):
        pytest.skip(f"{stand.name}: {stand.why_whole}")
    assert host.get([401, 402])[1] == "hit"
    assert host.get([402, 401])[1] in ("miss", "error")
    host.call("set_aside", number=401)  # what the page check does with it
    assert host.exists([401, 402]) == [False, True]
    assert host.put([401]) == [True]
    assert host.get([401, 402]) == ["hit", "hit"]


def test_a_page_set_aside_is_gone_and_comes_back_by_a_put(host: Host) -> None:
    """F81: a stale hit is not looked up again and again."""
    host.put([501, 502])
    host.call("set_aside", number=501)
    host.call("set_aside", number=599)
    assert host.exists([501, 502]) == [False, True]
    assert host.get([501, 502]) == ["miss", "hit"]
    assert host.put([501]) == [True]
    assert host.get([501]) == ["hit"]


def test_clear_takes_this_namespace_only(stand: Stand, host: Host, own_host: Host) -> None:
    """F68."""
    if not stand.can_clear:
        with pytest.raises(CallFailed) as refused:
            host.call("clear")
        assert refused.value.kind == "PrepareFailed"
        return
    own_host.open(namespace="other")
    own_host.put([1, 2])
    host.call("clear")
    host.put([601, 602, 603])
    assert host.call("clear") == 3
    assert host.exists([601, 602, 603]) == [False, False, False]
    assert own_host.get([1, 2]) == ["hit", "hit"]
    assert own_host.call("clear") == 2
    own_host.close()


def test_pages_outlive_the_client(stand: Stand, shared_host: Host) -> None:
    """Where the store lives elsewhere, a detach and attach finds the pages again (spec.md: detach never deletes)."""
    shared_host.open()
    shared_host.put([701, 702])
    shared_host.close()
    shared_host.open()
    expected = ["hit", "hit"] if stand.outlives_client else ["miss", "miss"]
    assert shared_host.get([701, 702]) == expected
    shared_host.close()


def test_health_is_plain_facts(host: Host) -> None:
    """Status shows it as JSON: the pipe of the host carried it, so it is."""
    assert host.health()


def test_calls_after_close_raise_and_close_is_idempotent(own_host: Host) -> None:
    """Several native clients crash here; ours must raise."""
    own_host.open()
    own_host.put([801])
    own_host.close()
    own_host.close()
    for call in ("put", "get", "exists", "delete"):
        with pytest.raises(CallFailed):
            own_host.call(call, numbers=[801], **({"version": 1} if call == "put" else {}))
    for call in ("clear", "health"):
        with pytest.raises(CallFailed):
            own_host.call(call)
    own_host.open()
    assert own_host.put([802]) == [True]
    own_host.close()


def test_the_guard_turns_calls_after_close_into_misses(shared_host: Host) -> None:
    shared_host.open(guard=True)
    assert shared_host.put([811]) == [True]
    assert shared_host.get([811, 812]) == ["hit", "miss"]
    shared_host.close()
    assert shared_host.get([811, 812]) == ["miss", "miss"]
    assert shared_host.put([811]) == [False]
    assert shared_host.exists([811]) == [False]
    usage = shared_host.call("usage")
    assert usage["get"] == {"hit": 1, "miss": 1, "error": 0, "timeout": 0, "skipped": 2}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bit_exact_in_every_layout_it_accepts(stand: Stand, shared_host: Host, layout: str) -> None:
    """Pool -> seal -> guard -> store -> check -> other pages of the pool; all bit patterns, NaNs too."""
    shared_host.open(guard=True)
    try:
        if layout not in shared_host.call("layouts"):
            pytest.skip(f"{stand.name} does not take {layout}")
        found = shared_host.call("probe", name="layout", layout=layout, timeout_s=60.0)
    finally:
        shared_host.close()
    assert found == {"stored": 16, "read": 16, "equal": True}


def test_four_threads_on_one_backend(stand: Stand, host: Host) -> None:
    found = host.call("probe", name="hammer", threads=THREADS, rounds=stand.rounds, batch=8, timeout_s=120.0)
    assert found == {"hits": THREADS * stand.rounds * 8, "wrong": 0, "refused": 0}
    assert host.put([820]) == [True]
    assert host.get([820]) == ["hit"]


def test_a_forked_child_is_refused_and_the_parent_goes_on(stand: Stand, own_host: Host) -> None:
    """notes/backends.md: with some clients the child hangs, with others the *parent* hangs for ever afterwards."""
    own_host.open()
    own_host.put([901])
    answers = own_host.call("probe", name="fork", number=901, timeout_s=60.0)
    for name, works in (("get", "'hit'"), ("exists", "True"), ("put", "True")):
        allowed = answers[name].startswith("raised") or (not stand.refuses_fork and answers[name] == works)
        assert allowed, answers
    assert own_host.put([903]) == [True]
    assert own_host.get([901, 903]) == ["hit", "hit"]
    own_host.close()


def test_other_threads_run_while_pages_move(host: Host) -> None:
    """The scheduler shares the GIL with the threads that call the store."""
    gaps: list[float] = []
    while len(gaps) < GIL_TRIES and min(gaps, default=GIL_GAP_S) >= GIL_GAP_S:
        found = host.call("probe", name="gil_gap", numbers=list(range(2000, 2128)), rounds=4, timeout_s=90.0)
        gaps.append(found["gap_s"])
    assert min(gaps) < GIL_GAP_S, gaps


def test_open_and_close_cycles_leave_nothing(stand: Stand, own_host: Host) -> None:
    """F43: descriptors and threads flat, memory within 5 MB, after the first cycles."""
    warm = stand.warm_cycles or max(2, stand.cycles // 10)
    found = own_host.call(
        "cycles", count=stand.cycles, warm=warm, timeout_s=stand.cycles_s, backend=stand.backend_name,
        config=stand.config(), namespace="ns", guard=False,
    )  # fmt: skip
    assert found["fds"][1] <= found["fds"][0], found
    assert found["threads"][1] <= found["threads"][0], found
    assert found["rss"][1] - found["rss"][0] < RSS_GROWTH, found
