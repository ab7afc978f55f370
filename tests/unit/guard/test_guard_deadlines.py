"""Deadlines, breakers and probes of the guard on a hand-turned clock; then the thread that keeps them, for real."""

import errno
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from tests.rigs.backends import BK, Fault, Rig

from hicache_hooks.backends.base import Got, StoreContext
from hicache_hooks.guard import Guard
from hicache_hooks.guard_settings import GUARD_KNOBS, PREFIX, GuardSettings, changed

KEYS = ["ns.a", "ns.b"]
WAIT_S = 10.0


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Looks:
    """A probe that is told what to say, and counts."""

    def __init__(self) -> None:
        self.answer: bool | BaseException = True
        self.made: list[str] = []
        self.hold: threading.Event | None = None

    def _look(self, what: str) -> bool:
        self.made.append(what)
        if self.hold is not None:
            self.hold.wait(WAIT_S)
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer

    def read(self, put: bool) -> bool:
        return self._look(f"read put={put}")

    def write(self) -> bool:
        return self._look("write")


@pytest.fixture
def rig() -> Iterator[Rig]:
    yield BK.rig()
    BK.reset()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def looks() -> Looks:
    return Looks()


def pages(n: int = 2) -> list[memoryview]:
    return [memoryview(bytearray(64)) for _ in range(n)]


def opened() -> BK:
    backend = BK({}, StoreContext(namespace="ns", page_bytes=64, layout="page_first"))
    backend.open()
    return backend


def by_hand(clock: Clock, looks: Looks | None = None, **settings: float) -> Guard:
    values = {"min_calls": 4, "probe_idle_s": 0.0, **settings}
    return Guard(
        opened(), name="bk", clock=clock, threads=False, probe=looks,
        settings=GuardSettings(**values),  # type: ignore[arg-type]
    )  # fmt: skip


def hung(guard: Guard, rig: Rig, method: str, call: Callable[[], object]) -> threading.Thread:
    """A thread inside ``method``."""
    rig.faults[method] = Fault(hang=True)
    thread = threading.Thread(target=call, name=f"in-{method}")
    thread.start()
    assert rig.entered[method].wait(WAIT_S)
    return thread


def test_a_late_call_is_counted_at_its_deadline_and_its_result_dropped(rig: Rig, clock: Clock, looks: Looks) -> None:
    """Rule 6: timed out there and then; the hits that it brings later are nobody's."""
    guard = by_hand(clock, looks, deadline_s=5.0)
    guard.batch_put(KEYS, pages())
    told: list[object] = []
    guard.on_late(lambda: "owner", told.append)
    results: list[list[Got]] = []
    thread = hung(guard, rig, "batch_get", lambda: results.append(guard.batch_get(KEYS, pages())))
    clock.now += 4.9
    assert guard.tick() == pytest.approx(0.1)
    assert told == []
    clock.now += 0.1
    guard.tick()
    assert told == ["owner"]
    assert guard.usage()["get"].timeout == 2
    report = guard.report()
    assert (report.late, report.timeouts, report.stuck) == (1, 1, ["in-batch_get"])
    guard.tick()
    assert told == ["owner"]
    rig.release.set()
    thread.join(WAIT_S)
    assert results == [[Got.MISS, Got.MISS]]
    usage = guard.usage()["get"]
    assert (usage.hit, usage.miss, usage.error, usage.timeout) == (0, 0, 0, 2)
    assert guard.report().late == 0


def test_a_hung_store_is_left_alone_after_one_deadline(rig: Rig, clock: Clock, looks: Looks) -> None:
    """design.md: a failing store costs one timeout, not one per request; the other side goes on (F62)."""
    guard = by_hand(clock, looks, deadline_s=5.0)
    thread = hung(guard, rig, "batch_get", lambda: guard.batch_get(KEYS, pages()))
    clock.now += 5
    guard.tick()
    before = rig.calls["batch_exists"]
    assert guard.batch_exists(KEYS) == [False, False]
    assert guard.refuses("get", 2)
    assert rig.calls["batch_exists"] == before
    assert guard.store_usage().skipped == {"breaker": 4}
    assert guard.batch_put(KEYS, pages()) == [True, True]
    report = guard.report()
    assert (report.breaker, report.reason) == ("open", "hung")
    assert (report.sides["read"].state, report.sides["write"].state) == ("open", "closed")
    rig.release.set()
    thread.join(WAIT_S)


def test_probes_close_it_and_no_request_pays_for_them(rig: Rig, clock: Clock, looks: Looks) -> None:
    """F79, F84: hits come back without an operator."""
    guard = by_hand(clock, looks, hold_s=2.0)
    rig.faults["batch_exists"] = Fault(error=ConnectionError)
    for _ in range(4):
        guard.batch_exists(KEYS)
    assert guard.report().breaker == "open"
    calls = rig.calls["batch_exists"]
    looks.answer = OSError("still away")
    clock.now += 2.5
    guard.tick()
    assert looks.made == ["read put=True"]
    assert guard.report().breaker == "open"
    looks.answer = True
    rig.faults.clear()
    for _ in range(40):
        clock.now += guard.tick() or 0.0
        assert guard.refuses("exists", 1) == (guard.report().breaker != "closed")
        if guard.report().breaker == "closed":
            break
    assert looks.made == ["read put=True"] * 4
    assert rig.calls["batch_exists"] == calls
    assert guard.batch_exists(KEYS) == [False, False]
    assert rig.calls["batch_exists"] == calls + 1


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_stops_writes_only_and_at_once(rig: Rig, clock: Clock, looks: Looks, number: int) -> None:
    """F62: ENOSPC opens the write side; reads still hit; with room again writes go on without an attach."""
    guard = by_hand(clock, looks, hold_s=2.0)
    guard.batch_put(KEYS, pages())

    class Full(OSError):
        def __init__(self, text: str) -> None:
            super().__init__(number, text)

    rig.faults["batch_put"] = Fault(error=Full)
    assert guard.batch_put(KEYS, pages()) == [False, False]
    assert guard.report().sides["write"].reason == "no_space"
    assert guard.batch_get(KEYS, pages()) == [Got.HIT, Got.HIT]
    assert not guard.open_for("put")
    rig.faults.clear()
    while not guard.open_for("put"):
        clock.now += guard.tick() or 0.01
    assert looks.made == ["write"] * 3
    assert guard.batch_put(KEYS, pages()) == [True, True]


def test_a_read_probe_does_not_write_while_writing_is_stopped(rig: Rig, clock: Clock, looks: Looks) -> None:
    guard = by_hand(clock, looks)
    rig.faults.update(batch_put=Fault(error=OSError), batch_get=Fault(error=OSError))
    for _ in range(4):
        guard.batch_put(KEYS, pages())
        guard.batch_get(KEYS, pages())
    clock.now += 3
    guard.tick()
    assert sorted(looks.made) == ["read put=False", "write"]


def test_an_unused_store_is_probed_and_two_bad_answers_open_it(rig: Rig, clock: Clock, looks: Looks) -> None:
    """F79: no traffic, the endpoint is gone: open within two probe periods."""
    guard = by_hand(clock, looks, probe_idle_s=10.0)
    assert guard.tick() == pytest.approx(10.0)
    clock.now += 10
    guard.tick()
    assert guard.report().breaker == "closed"
    looks.answer = False
    clock.now += 10
    guard.tick()
    assert guard.report().breaker == "closed"
    clock.now += 10
    guard.tick()
    assert (guard.report().breaker, guard.report().reason) == ("open", "no_answer")


def test_traffic_spares_the_idle_probe(rig: Rig, clock: Clock, looks: Looks) -> None:
    guard = by_hand(clock, looks, probe_idle_s=10.0)
    for _ in range(5):
        clock.now += 8
        guard.batch_exists(KEYS)
        guard.tick()
    assert looks.made == []


def test_without_a_probe_traffic_is_the_probe(rig: Rig, clock: Clock) -> None:
    guard = by_hand(clock, None)
    rig.faults["batch_get"] = Fault(error=OSError)
    for _ in range(4):
        guard.batch_get(KEYS, pages())
    assert guard.report().breaker == "open"
    rig.faults.clear()
    calls = rig.calls["batch_get"]
    guard.batch_get(KEYS, pages())
    assert rig.calls["batch_get"] == calls
    for _ in range(3):
        clock.now += 3
        guard.batch_get(KEYS, pages())
    assert rig.calls["batch_get"] == calls + 3
    assert guard.report().breaker == "closed"


def test_a_stale_hit_is_not_promised_again(rig: Rig, clock: Clock, looks: Looks) -> None:
    """F81: exists says yes, get says no: the next look-up says no, until it is written again or time has passed."""
    guard = by_hand(clock, looks, negative_ttl_s=30.0)
    rig.faults["batch_exists"] = Fault(answer="all")
    assert guard.batch_exists(KEYS) == [True, True]
    assert guard.batch_get(KEYS, pages()) == [Got.MISS, Got.MISS]
    assert guard.batch_exists(KEYS) == [False, False]
    guard.batch_put(KEYS[:1], pages(1))
    assert guard.batch_exists(KEYS) == [True, False]
    clock.now += 31
    assert guard.batch_exists(KEYS) == [True, True]


def test_a_whole_call_that_failed_says_nothing_about_its_keys(rig: Rig, clock: Clock, looks: Looks) -> None:
    """Else a short outage would hide what is stored for as long as the negative cache remembers."""
    guard = by_hand(clock, looks)
    guard.batch_put(KEYS, pages())
    rig.faults["batch_get"] = Fault(error=TimeoutError, times=1)
    guard.batch_get(KEYS, pages())
    assert guard.batch_exists(KEYS) == [True, True]


def test_a_page_set_aside_is_not_promised_again(rig: Rig, clock: Clock, looks: Looks) -> None:
    guard = by_hand(clock, looks)
    guard.batch_put(KEYS, pages())
    rig.faults["set_aside"] = Fault(error=OSError)  # the store cannot even put it away
    guard.set_aside(KEYS[0], "checksum")
    assert guard.batch_exists(KEYS) == [False, True]


def test_single_keys_that_fail_weigh_as_their_share(rig: Rig, clock: Clock, looks: Looks) -> None:
    guard = by_hand(clock, looks, error_ratio=0.6)

    class Half(BK):
        def batch_get(self, keys: list[str], pages: list[memoryview]) -> list[Got]:  # type: ignore[override]
            return [Got.ERROR, *super().batch_get(keys[1:], pages[1:])]

    guard._backend = Half({}, StoreContext(namespace="ns", page_bytes=64, layout="page_first"))
    for _ in range(20):
        guard.batch_get(KEYS, pages())
    report = guard.report()
    assert (report.breaker, report.ratio, report.errors, report.calls) == ("closed", 0.5, 20, 20)
    assert guard.usage()["get"].error == 20


def test_new_settings_count_for_the_calls_to_come(rig: Rig, clock: Clock, looks: Looks) -> None:
    guard = by_hand(clock, looks, deadline_s=50.0)
    guard.configure(GuardSettings(deadline_s=1.0, probe_idle_s=0.0))
    thread = hung(guard, rig, "batch_exists", lambda: guard.batch_exists(KEYS))
    clock.now += 1
    guard.tick()
    assert guard.report().timeouts == 1
    rig.release.set()
    thread.join(WAIT_S)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("guard_deadline_s", 0), ("guard_deadline_s", True), ("guard_deadline_s", "5"), ("guard_min_calls", 1.5),
        ("guard_min_calls", 0), ("guard_error_ratio", 0), ("guard_error_ratio", 1.1), ("guard_hold_s", -1),
        ("guard_window_s", float("nan")), ("guard_probe_idle_s", -1), ("guard_hold_max_s", float("inf")),
    ],
)  # fmt: skip
def test_settings_out_of_range_are_refused(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=r"number|integer"):
        changed(GuardSettings(), key, value)


def test_every_setting_can_be_set() -> None:
    for key in GUARD_KNOBS:
        assert getattr(changed(GuardSettings(), key, 1), key.removeprefix(PREFIX)) == 1


# ------------------------------------------------------------------ with the thread


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_the_monitor_keeps_deadlines_and_ends_with_the_guard(rig: Rig, looks: Looks) -> None:
    settings = GuardSettings(deadline_s=0.2, probe_idle_s=0.0, hold_s=0.1)
    guard = Guard(opened(), name="kept", probe=looks, settings=settings)
    told = threading.Event()
    guard.on_late(lambda: 7, lambda owner: told.set())
    thread = hung(guard, rig, "batch_get", lambda: guard.batch_get(KEYS, pages()))
    assert told.wait(WAIT_S)
    until(lambda: guard.report().breaker == "closed")  # the probes are good although the call still hangs
    assert looks.made == ["read put=True"] * 3
    guard.close()
    assert not guard.closed  # rule 4: the call is still inside
    rig.release.set()
    thread.join(WAIT_S)
    until(lambda: guard.closed)
    assert rig.calls["close"] == 1
    until(lambda: not any("kept" in item.name for item in threading.enumerate()))


def test_probes_that_hang_are_few_and_never_closed_under(rig: Rig, looks: Looks) -> None:
    """F46: threads that a dead store holds are capped; F27: the backend closes when the last of them is back."""
    looks.hold = threading.Event()
    settings = GuardSettings(deadline_s=0.05, probe_idle_s=0.0, hold_s=0.02, hold_max_s=0.02, min_calls=1)
    guard = Guard(opened(), name="dead", probe=looks, settings=settings)
    rig.faults["batch_get"] = Fault(error=OSError)
    guard.batch_get(KEYS, pages())
    until(lambda: guard.in_flight() == 4)
    assert guard.report().late == 0  # late are calls of traffic
    threads = [item.name for item in threading.enumerate() if item.name.startswith("hicache-probe-dead")]
    assert len(threads) == 4
    guard.close()
    assert rig.calls["close"] == 0
    looks.hold.set()
    until(lambda: guard.closed)
    assert rig.calls["close"] == 1


def test_many_calls_cost_the_monitor_few_turns(rig: Rig, looks: Looks) -> None:
    """F4: it sleeps until a deadline; calls that end in time do not wake it one by one."""
    guard = Guard(opened(), name="quiet", probe=looks, settings=GuardSettings(probe_idle_s=0.0))
    turns = []
    tick = guard._watch._monitor._tick  # type: ignore[union-attr]
    guard._watch._monitor._tick = lambda: (turns.append(1), tick())[1]  # type: ignore[union-attr]
    for _ in range(2000):
        guard.batch_exists(KEYS)
    assert len(turns) < 20
    guard.close()
