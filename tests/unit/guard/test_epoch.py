"""F70: a store that is reachable and lost all it held. Said by the backend, or inferred by the guard."""

from collections.abc import Iterator

import pytest
from tests.rigs.backends import BK, EpochBK, Fault, RememberingBK, Rig

from hicache_hooks.backends.base import Got, StoreContext
from hicache_hooks.guard import Guard
from hicache_hooks.guard_settings import GuardSettings
from hicache_proto.model import EpochChange

KEYS = [f"ns.{i}" for i in range(8)]
EVERY_S = 10.0


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def rig() -> Iterator[Rig]:
    yield BK.rig()
    BK.reset()


@pytest.fixture
def clock() -> Clock:
    return Clock()


def pages(keys: list[str]) -> list[memoryview]:
    return [memoryview(bytearray(64)) for _ in keys]


class Held:
    """A guard by hand, and how often it told that what was stored is lost."""

    def __init__(self, cls: type[BK], clock: Clock, **settings: float) -> None:
        backend = cls({}, StoreContext(namespace="ns", page_bytes=64, layout="page_first"))
        backend.open()
        values = {"min_calls": 4, "probe_idle_s": 0.0, "epoch_s": EVERY_S, **settings}
        self.guard = Guard(backend, name="bk", clock=clock, threads=False, settings=GuardSettings(**values))  # type: ignore[arg-type]
        self.guard.learn_epoch()
        self.lost = 0
        self.guard.on_lost(self._told)
        self._clock = clock

    def _told(self) -> None:
        self.lost += 1

    def after(self, seconds: float) -> EpochChange | None:
        """The last change, so much later."""
        self._clock.now += seconds
        self.guard.tick()
        return self.guard.report().epoch_change

    def healthy(self) -> bool:
        """No error of any kind, nothing that a failover would act on."""
        report = self.guard.report()
        counts = self.guard.usage().values()
        failed = sum(count.error + count.timeout + count.skipped for count in counts)
        return (report.breaker, report.errors, report.timeouts, failed) == ("closed", 0, 0, 0)


@pytest.mark.parametrize("cls", [EpochBK, BK])
def test_an_emptied_store_has_no_hits_and_no_errors(cls: type[BK], rig: Rig, clock: Clock) -> None:
    """F70's check: the epoch goes from 1 to 2, all keys are gone: hits 0, no errors, breaker closed, one change."""
    held = Held(cls, clock)
    assert held.guard.batch_put(KEYS, pages(KEYS)) == [True] * 8
    assert held.after(2.0) is None
    rig.forget()
    assert held.guard.batch_exists(KEYS) == [False] * 8
    assert held.guard.batch_get(KEYS, pages(KEYS)) == [Got.MISS] * 8
    change = held.after(EVERY_S)
    how = "said" if cls is EpochBK else "inferred"
    assert change is not None
    assert (change.old, change.new, change.how, change.ago_s) == ("1", "2", how, 0.0)
    report = held.guard.report()
    assert (report.epoch, report.epoch_changes) == ("2", 1)
    assert (held.guard.usage()["get"].hit, held.lost, held.healthy()) == (0, 1, True)
    for _ in range(3):
        held.after(EVERY_S)
    assert (held.lost, held.guard.report().epoch_changes) == (1, 1)
    assert held.guard.report().epoch_change == EpochChange(n=change.n, old="1", new="2", how=how, ago_s=3 * EVERY_S)


def test_a_store_that_answers_from_memory_is_asked_itself_and_forgets(rig: Rig, clock: Clock) -> None:
    """Its memory would hide for ever that the content is gone."""
    held = Held(RememberingBK, clock)
    held.guard.batch_put(KEYS, pages(KEYS))
    assert held.after(2.0) is None
    rig.forget()
    assert held.guard.batch_exists(KEYS) == [True] * 8
    change = held.after(EVERY_S)
    assert change is not None
    assert (change.how, held.lost, held.healthy()) == ("inferred", 1, True)
    assert held.guard.batch_exists(KEYS) == [False] * 8


@pytest.mark.parametrize("raises", [None, OSError, SystemExit])
def test_a_store_forgets_without_the_guards_lock_and_may_fail(
    rig: Rig, clock: Clock, monkeypatch: pytest.MonkeyPatch, raises: type[BaseException] | None
) -> None:
    """It may be a class of somebody's that waits for a lock of its own; the scheduler takes the guard's."""
    held = Held(RememberingBK, clock)
    seen: list[tuple[bool, int]] = []

    def forget(self: RememberingBK) -> None:
        free = held.guard._lock.acquire(blocking=False)
        if free:
            held.guard._lock.release()
        seen.append((free, held.guard.in_flight()))
        if raises is not None:
            raise raises

    monkeypatch.setattr(RememberingBK, "forget", forget)
    held.guard._beliefs.forget = held.guard._backend.forget  # type: ignore[attr-defined]
    held.guard.batch_put(KEYS, pages(KEYS))
    held.after(2.0)
    rig.forget()
    assert held.after(EVERY_S) is not None
    assert seen == [(True, 1)], "as a call inside the store: nobody closes it meanwhile"
    assert (held.lost, held.healthy(), held.guard.in_flight()) == (1, True, 0)
    held.guard.close()
    assert held.guard.closed


@pytest.mark.parametrize("cls", [EpochBK, BK])
def test_what_was_believed_to_be_missing_is_asked_for_again(cls: type[BK], rig: Rig, clock: Clock) -> None:
    """Negative knowledge goes too: another engine has filled the new store meanwhile."""
    held = Held(cls, clock, negative_ttl_s=1000.0)
    held.guard.batch_put(KEYS, pages(KEYS))
    held.guard.batch_get(KEYS[:4], pages(KEYS[:4]))
    rig.faults["batch_get"] = Fault(answer="none")
    held.guard.batch_get(["ns.x"], pages(["ns.x"]))
    rig.faults.clear()
    rig.forget()
    rig.data["ns.x"] = b"from another engine"
    assert held.guard.batch_exists(["ns.x"]) == [False]
    assert held.after(EVERY_S) is not None
    assert held.guard.batch_exists(["ns.x"]) == [True]


def test_a_known_page_that_is_missed_makes_the_look_come_at_once(rig: Rig, clock: Clock) -> None:
    held = Held(BK, clock)
    held.guard.batch_put(KEYS, pages(KEYS))
    held.after(1.0)
    rig.forget()
    assert held.after(1.0) is None  # not due for another eight seconds
    held.guard.batch_exists(KEYS)
    assert held.after(0.0) is not None


def test_pages_that_a_store_evicts_are_no_new_epoch(rig: Rig, clock: Clock) -> None:
    """Inferred only when none of the sample is left."""
    held = Held(BK, clock)
    held.guard.batch_put(KEYS, pages(KEYS))
    held.after(1.0)
    for key in KEYS[:-1]:
        del rig.data[key]
    assert held.guard.batch_get(KEYS[:7], pages(KEYS[:7])) == [Got.MISS] * 7
    assert held.after(EVERY_S) is None
    assert held.lost == 0


def test_a_store_that_never_shows_what_it_took_is_not_believed(rig: Rig, clock: Clock) -> None:
    """One that drops every page in silence would else begin an epoch every ten seconds."""
    held = Held(BK, clock)
    held.guard.batch_put(KEYS, pages(KEYS))
    rig.data.clear()
    for _ in range(5):
        assert held.after(EVERY_S) is None
    assert held.lost == 0


@pytest.mark.parametrize("cls", [EpochBK, BK])
def test_a_store_that_fails_says_nothing_about_what_it_holds(cls: type[BK], rig: Rig, clock: Clock) -> None:
    """A failed look counts as no error of traffic and as no answer; the next one counts."""
    held = Held(cls, clock)
    held.guard.batch_put(KEYS, pages(KEYS))
    held.after(1.0)
    rig.faults["epoch"] = rig.faults["batch_exists"] = Fault(error=OSError)
    assert held.after(EVERY_S) is None
    assert held.after(EVERY_S) is None
    assert held.healthy()
    rig.faults.clear()
    assert held.after(EVERY_S) is None
    rig.forget()
    assert held.after(EVERY_S) is not None


def test_our_own_clear_begins_anew_without_a_change(rig: Rig, clock: Clock) -> None:
    """Whoever cleared it knows; what was stored is still to be forgotten, or it would never be written again."""
    for count, cls in enumerate((EpochBK, BK), start=1):
        held = Held(cls, clock)
        held.guard.batch_put(KEYS, pages(KEYS))
        held.after(1.0)
        assert held.guard.clear() == 8
        rig.epoch += 1  # as a marker beside the pages
        assert held.lost == 1, count
        for _ in range(3):
            assert held.after(EVERY_S) is None
        assert held.guard.report().epoch_changes == 0


def test_zero_means_never(rig: Rig, clock: Clock) -> None:
    held = Held(EpochBK, clock, epoch_s=0.0)
    held.guard.batch_put(KEYS, pages(KEYS))
    looks = rig.calls["epoch"]
    rig.forget()
    assert held.after(1000.0) is None
    assert rig.calls["epoch"] == looks


def test_an_epoch_cannot_carry_text_into_events(rig: Rig, clock: Clock) -> None:
    """What a foreign class says is bounded in length and characters before it reaches status (F92, F94)."""
    held = Held(EpochBK, clock)
    held.guard.batch_put(KEYS, pages(KEYS))
    rig.epoch = 'x"\n' * 100  # type: ignore[assignment]
    change = held.after(EVERY_S)
    assert change is not None
    assert change.new == ("x__" * 100)[:64]


def test_looks_leave_the_idle_probe_alone(rig: Rig, clock: Clock) -> None:
    """F79: looking for the epoch is no use of the store."""

    class Looks:
        made = 0

        def read(self, put: bool) -> bool:
            self.made += 1
            return True

        def write(self) -> bool:
            return True

    looks = Looks()
    backend = EpochBK({}, StoreContext(namespace="ns", page_bytes=64, layout="page_first"))
    settings = GuardSettings(probe_idle_s=10.0, epoch_s=1.0)
    guard = Guard(backend, name="bk", clock=clock, threads=False, settings=settings, probe=looks)
    guard.learn_epoch()
    guard.batch_put(KEYS, pages(KEYS))
    for _ in range(12):
        clock.now += 1.0
        guard.tick()
    assert looks.made == 1
    assert rig.calls["epoch"] >= 10
