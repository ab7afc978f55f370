"""The guard: whatever a store does, the engine sees hits and misses, and each is counted once."""

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.rigs.backends import BK, Fault, Rig

from hicache_hooks import guard as guard_module
from hicache_hooks.backends.base import Got, StoreContext
from hicache_hooks.describe import Said, describe_exception
from hicache_hooks.guard import Guard
from hicache_hooks.guard_settings import GuardSettings
from hicache_proto.errors import PrepareFailed
from hicache_proto.model import OpUsage

KEYS = ["ns.a", "ns.b", "ns.c"]


def pages(n: int = 3) -> list[memoryview]:
    return [memoryview(bytearray(64)) for _ in range(n)]


@pytest.fixture
def guard(rig: Rig) -> Guard:
    backend = BK({}, StoreContext(namespace="ns", page_bytes=64, layout="page_first"))
    backend.open()
    return Guard(backend, name="bk")


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def counts(usage: OpUsage) -> tuple[int, int, int, int, int]:
    return usage.hit, usage.miss, usage.error, usage.timeout, usage.skipped


def test_results_pass_through_and_are_counted(guard: Guard) -> None:
    """F91: hit and miss apart, bytes of what moved."""
    assert guard.batch_put(KEYS[:2], pages(2)) == [True, True]
    assert guard.batch_exists(KEYS) == [True, True, False]
    assert guard.batch_get(KEYS, pages()) == [Got.HIT, Got.HIT, Got.MISS]
    usage = guard.usage()
    assert counts(usage["put"]) == (2, 0, 0, 0, 0)
    assert counts(usage["exists"]) == (2, 1, 0, 0, 0)
    assert counts(usage["get"]) == (2, 1, 0, 0, 0)
    assert usage["put"].bytes == usage["get"].bytes == 128
    assert usage["get"].latency.count == 1


@pytest.mark.parametrize(
    "error", [OSError, ValueError, NotImplementedError, SystemExit, KeyboardInterrupt, GeneratorExit]
)
def test_no_exception_leaves_the_guard(guard: Guard, rig: Rig, error: type[BaseException]) -> None:
    """F38, F80: SystemExit and its like too; all keys of the call are errors and read as misses."""
    for method in ("batch_put", "batch_get", "batch_exists", "set_aside", "health", "close"):
        rig.faults[method] = Fault(error=error, text="s3cr3t-SENTINEL")
    assert guard.batch_put(KEYS, pages()) == [False] * 3
    assert guard.batch_get(KEYS, pages()) == [Got.MISS] * 3
    assert guard.batch_exists(KEYS) == [False] * 3
    guard.set_aside("ns.a", "checksum")
    health = guard.health()
    assert health["ok"] is False
    assert "SENTINEL" not in repr(health)
    assert all(counts(guard.usage()[kind]) == (0, 0, 3, 0, 0) for kind in ("put", "get", "exists"))
    guard.close()
    assert guard.closed
    assert guard.close_error == error.__name__


def test_a_backends_own_timeouts_are_counted_as_such(guard: Guard, rig: Rig) -> None:
    """F91: 3 miss, 2 errors, 1 timeout -> exactly these."""
    for _ in range(3):
        guard.batch_get(["ns.missing"], pages(1))
    rig.faults["batch_get"] = Fault(error=OSError)
    for _ in range(2):
        guard.batch_get(["ns.missing"], pages(1))
    rig.faults["batch_get"] = Fault(error=TimeoutError)
    guard.batch_get(["ns.missing"], pages(1))
    assert counts(guard.usage()["get"]) == (0, 3, 2, 1, 0)


def test_failures_every_third_call_lose_nothing_else(guard: Guard, rig: Rig) -> None:
    """F38, F69: 300 writes, every third raises -> 100 errors, 200 stored."""
    rig.faults["batch_put"] = Fault(error=OSError, every=3)
    stored = sum(guard.batch_put([f"ns.{i}"], pages(1))[0] for i in range(300))
    assert stored == len(rig.data) == 200
    assert counts(guard.usage()["put"]) == (200, 0, 100, 0, 0)


@pytest.mark.parametrize("answer", [None, [], [True], [Got.HIT] * 4, "abc", ["hit", "hit", "odd"], [1, 2, 3], 7])
def test_answers_of_the_wrong_shape_are_errors(guard: Guard, monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    """A store that answers short must not shift results onto other keys."""
    for method in ("batch_put", "batch_get", "batch_exists"):
        monkeypatch.setattr(guard._backend, method, lambda *args, answer=answer: answer)
    assert guard.batch_put(KEYS, pages()) == [False] * 3
    assert guard.batch_get(KEYS, pages()) == [Got.MISS] * 3
    assert guard.batch_exists(KEYS) == [False] * 3
    assert all(guard.usage()[kind].error == 3 for kind in ("put", "get", "exists"))


def test_results_per_key_may_be_errors(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard._backend, "batch_get", lambda keys, out: ["hit", "miss", "error"])
    assert guard.batch_get(KEYS, pages()) == [Got.HIT, Got.MISS, Got.ERROR]
    assert counts(guard.usage()["get"]) == (1, 1, 1, 0, 0)


def test_bypass_skips_and_comes_back(guard: Guard, rig: Rig) -> None:
    """F77: reads miss, writes are skipped, the backend is not called; reversible."""
    guard.batch_put(KEYS, pages())
    assert guard.set_bypass(True) is False
    before = dict(rig.calls)
    assert guard.batch_put(KEYS, pages()) == [False] * 3
    assert guard.batch_get(KEYS, pages()) == [Got.MISS] * 3
    assert guard.batch_exists(KEYS) == [False] * 3
    assert dict(rig.calls) == before
    assert guard.usage()["get"].skipped == 3
    assert guard.set_bypass(False) is True
    assert guard.batch_get(KEYS, pages()) == [Got.HIT] * 3


def test_bypass_does_not_wait_for_a_hanging_call(guard: Guard, rig: Rig) -> None:
    """F77: at once and under load; the result of the hanging call is dropped."""
    guard.batch_put(KEYS, pages())
    rig.faults["batch_get"] = Fault(hang=True)
    results: list[list[Got]] = []
    thread = threading.Thread(target=lambda: results.append(guard.batch_get(KEYS, pages())))
    thread.start()
    assert rig.entered["batch_get"].wait(10)
    assert guard.in_flight() == 1
    assert guard.oldest_call_s() >= 0
    guard.set_bypass(True)  # returns although a call hangs
    assert guard.batch_get(KEYS, pages()) == [Got.MISS] * 3
    rig.release.set()
    thread.join(10)
    assert results == [[Got.MISS] * 3]
    assert counts(guard.usage()["get"]) == (0, 0, 0, 0, 6)
    assert guard.in_flight() == 0


def test_close_waits_for_the_last_call_and_happens_once(guard: Guard, rig: Rig) -> None:
    """F27: never while a call is inside; the last one to leave closes."""
    rig.faults["batch_put"] = Fault(hang=True)
    thread = threading.Thread(target=lambda: guard.batch_put(KEYS, pages()))
    thread.start()
    assert rig.entered["batch_put"].wait(10)
    guard.close()
    assert not guard.closed
    assert rig.calls["close"] == 0
    rig.release.set()
    thread.join(10)
    assert guard.closed
    guard.close()
    assert rig.calls["close"] == 1
    assert guard.batch_get(KEYS, pages()) == [Got.MISS] * 3
    assert guard.usage()["get"].skipped == 3


def test_clear_says_when_it_failed(guard: Guard, rig: Rig) -> None:
    """F68: a backend error is an error, not a count."""
    rig.data.update({"ns.a": b"", "other.a": b""})
    assert guard.clear() == 1
    assert list(rig.data) == ["other.a"]
    rig.faults["clear"] = Fault(error=OSError, text="s3cr3t-SENTINEL")
    with pytest.raises(PrepareFailed) as caught:
        guard.clear()
    assert caught.value.details == {"reason": "clear_failed"}
    assert "SENTINEL" not in caught.value.message + repr(caught.value.__context__)
    guard.close()
    with pytest.raises(PrepareFailed):
        guard.clear()


def test_a_clear_that_hangs_is_given_up_and_keeps_the_store_open(
    guard: Guard, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every wait has a deadline. F46: one thread for all who ask. F27: nobody closes a store that is being cleared."""
    monkeypatch.setattr(guard_module, "CLEAR_S", 0.05)
    rig.faults["clear"] = Fault(hang=True)
    with pytest.raises(PrepareFailed) as caught:
        guard.clear()
    assert caught.value.details == {"reason": "clear_late"}
    assert guard.inside() == ["hicache-clear-bk"]
    assert guard.report().stuck == ["hicache-clear-bk"]
    with pytest.raises(PrepareFailed, match="still runs") as caught:
        guard.clear()
    assert caught.value.details == {"reason": "clear_late"}
    assert rig.calls["clear"] == 1
    assert guard.batch_put(KEYS, pages()) == [True] * 3, "traffic goes on"
    guard.close()
    assert not guard.closed
    rig.release.set()
    until(lambda: guard.closed)
    assert rig.calls["close"] == 1
    assert counts(guard.usage()["clear"]) == (0, 0, 0, 2, 0)


def test_health_has_a_deadline_and_is_no_use_of_the_store(guard: Guard, rig: Rig) -> None:
    """A status page must not wait for a store, nor open its breaker."""
    guard.configure(GuardSettings(deadline_s=0.05))
    rig.faults["health"] = Fault(hang=True)
    assert guard.health()["error"] == "StillRunning"
    assert guard.health()["error"] == "StillRunning"
    assert rig.calls["health"] == 1
    assert guard.report().timeouts == 0
    assert guard.report().breaker == "closed"
    rig.release.set()
    until(lambda: not guard.inside())
    rig.faults.clear()
    assert guard.health()["ok"] is True
    guard.close()
    assert guard.health()["error"] == ""


def test_no_thread_for_a_clear_is_said(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(PrepareFailed):
            guard.clear()
    assert guard.clear() == 0
    guard.close()


def test_prefix_keys_reach_only_backends_that_take_them(rig: Rig) -> None:
    seen: list[Any] = []

    class Prefixed(BK):
        def batch_exists(self, keys: Any, prefix_keys: Any = None) -> list[bool]:
            seen.append(prefix_keys)
            return super().batch_exists(keys)

    guard = Guard(Prefixed({}, StoreContext(namespace="ns", page_bytes=64, layout="page_first")))
    guard.batch_exists(KEYS, prefix_keys=["ns.p"])
    guard.batch_put(KEYS, pages(), prefix_keys=["ns.p"])
    assert seen == [["ns.p"]]


def test_counters_add_up_under_threads(guard: Guard) -> None:
    guard.batch_put(KEYS, pages())
    threads = [threading.Thread(target=lambda: [guard.batch_get(KEYS, pages()) for _ in range(200)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert counts(guard.usage()["get"]) == (2400, 0, 0, 0, 0)
    assert guard.in_flight() == 0


def test_exceptions_are_named_without_their_text() -> None:
    """F94."""
    assert describe_exception(ValueError("s3cr3t")) == "ValueError"
    assert describe_exception(OSError(28, "s3cr3t", "/path/s3cr3t")) == "OSError: No space left on device"


def test_a_text_of_our_own_is_said() -> None:
    """F94: the marker says whose words they are; a resolver's error number is none of strerror's."""

    class Ours(Said, TimeoutError):
        pass

    assert describe_exception(Ours("redis: no answer in time")) == "redis: no answer in time"
    assert describe_exception(Ours()) == "Ours"
    assert describe_exception(socket.gaierror(-2, "s3cr3t")) == "the host's name cannot be resolved"
