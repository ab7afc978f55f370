"""F70 on real servers: flushed, restarted from nothing, restarted with their data; under a backend, and the engine."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.engine.test_equality import prompts
from tests.rigs.stores import catalogue
from tests.rigs.stores.redis import PAGE, RedisStand
from tests.rigs.stores.serving import Serving, guard_knobs, serving, until
from tests.rigs.stores.weed import WeedStand
from tests.stores.conftest import line_id, lines, started

from hicache_hooks.backends.base import Got, StoreContext
from hicache_hooks.backends.redis import RedisOptions, RedisStore
from hicache_hooks.backends.s3_client import S3Client
from hicache_proto.failover import FailoverPolicy
from hicache_sidecar.client.typed import Client

pytestmark = pytest.mark.stores

EVENT_S = 60.0
EMPTY = [line for line in lines(server=True) if not line.stand_class().outlives_server]


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisStand]:
    if (missing := RedisStand.missing()) is not None:
        pytest.skip(missing)
    with RedisStand("redis", tmp_path) as stand:
        yield stand


def opened(stand: RedisStand, namespace: str = "ns") -> RedisStore:
    options = RedisOptions(**stand.config()).effective({})
    store = RedisStore(options, StoreContext(namespace=namespace, page_bytes=PAGE, layout="page_first"), stand.env())
    store.open()
    return store


def page() -> memoryview:
    return memoryview(bytearray(PAGE))


def test_redis_says_when_it_lost_what_it_held(redis: RedisStand) -> None:
    """A flush and a restart from nothing are new epochs; data that came back, and a marker evicted alone, are none."""
    store, other = opened(redis), opened(redis)
    first = store.epoch()
    assert (store.epoch(), other.epoch()) == (first, first)
    assert store.batch_put(["ns.1"], [page()]) == [True]
    redis._ask(["DEL", "hicache-epoch:ns"])
    assert (store.epoch(), other.epoch()) == (first, first)
    redis._ask(["SAVE"])
    redis.kill()
    with pytest.raises(OSError, match="redis"):
        store.epoch()
    redis.restart()
    assert store.epoch() == first  # from its own disk
    assert store.batch_get(["ns.1"], [page()]) == [Got.HIT]
    redis._ask(["FLUSHALL"])
    flushed = store.epoch()
    assert flushed != first
    assert other.epoch() == flushed
    redis.kill()
    (redis.root / "redis" / "dump.rdb").unlink()
    redis.restart()
    empty = other.epoch()
    assert empty not in (first, flushed)
    assert store.epoch() == empty
    assert store.batch_get(["ns.1"], [page()]) == [Got.MISS]
    assert store.batch_put(["ns.1"], [page()]) == [True]
    assert store.clear() == 1
    assert other.epoch() != empty  # who shares the namespace sees it too
    for each in (store, other):
        each.close()


def test_a_namespace_of_its_own_has_an_epoch_of_its_own(redis: RedisStand) -> None:
    """F68: another namespace's clear is none of ours."""
    mine, theirs = opened(redis), opened(redis, "other")
    before = mine.epoch()
    assert theirs.epoch() != before
    theirs.clear()
    assert mine.epoch() == before
    mine.close()
    theirs.close()


@pytest.fixture(params=EMPTY, ids=line_id)
def emptied(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Serving]:
    """Each real server that forgets its pages when it is restarted, behind the engine."""
    with ExitStack() as stack:
        stand = started(request.param, tmp_path / "store", stack)
        yield stack.enter_context(serving(stand, tmp_path))


def changes(side: Serving) -> int:
    return side.guard().epoch_changes


def news(side: Serving, after: int) -> list[dict[str, Any]]:
    """Events of the kind that came after number ``after``, from the stream."""
    found = []
    with Client.connect(side.socket) as client:
        last = next(iter(client.watch())).id
    if last > after:
        with Client.connect(side.socket) as client:
            for event in client.watch(last_event_id=after, quiet_timeout_s=EVENT_S):
                found += [event.data] if event.kind == "store_epoch_changed" else []
                if event.id >= last:
                    break
    return found


def now(side: Serving) -> int:
    """Number of the last event."""
    with Client.connect(side.socket) as client:
        return next(iter(client.watch())).id


def filled(side: Serving, text: str, expected: list[int]) -> None:
    """The same output until its pages come from the store."""

    def from_storage() -> bool:
        answer = side.engine.generate(text, 24)
        assert answer["output_ids"] == expected
        stored = answer["meta_info"]["cached_tokens_details"]["storage"]
        side.engine.flush()
        return bool(stored)

    until("hits from the store", from_storage, EVENT_S)


def ready(side: Serving, text: str) -> list[int]:
    """Attached, ``text`` is in the store and in L1; its output."""
    side.attach(**{**guard_knobs(), "guard_epoch_s": 0.5})
    expected: list[int] = side.engine.generate(text, 24)["output_ids"]
    side.engine.flush()
    filled(side, text, expected)
    side.engine.generate(text, 24)
    until("a first look", lambda: side.guard().epoch != "", EVENT_S)
    assert changes(side) == 0
    return expected


def is_filled_again(side: Serving, text: str, expected: list[int]) -> None:
    """What L1 and L2 still have is stored at its next use: else the next eviction would lose it for good."""
    assert side.engine.generate(text, 24)["output_ids"] == expected
    side.engine.flush()
    filled(side, text, expected)
    assert changes(side) == 1
    side.detach()


def test_a_server_that_comes_back_empty_is_told_once_and_filled_again(emptied: Serving) -> None:
    """Mooncake's master, Redis without persistence: the event, equal outputs, hits again, the store still attached."""
    side, text = emptied, prompts(12)[4]
    expected = ready(side, text)
    before = now(side)
    side.stand.kill()
    side.stand.restart()
    until("the change", lambda: changes(side) == 1 and news(side, before), EVENT_S)
    (event,) = news(side, before)
    assert (event["rank"], event["backend"]) == (0, side.stand.backend_name)
    assert event["old"] != event["new"]
    status = side.client.status()
    assert status.state == "attached"
    assert any(text.startswith("store_epoch_changed: rank 0") for text in status.warnings)
    is_filled_again(side, text, expected)


def test_a_flush_under_the_engine_is_no_failure(redis: RedisStand, tmp_path: Path) -> None:
    """F70's check: all keys gone: hits 0, no error, no breaker, no failover although its policy is the quickest."""
    text = prompts(12)[4]
    with serving(redis, tmp_path) as side:
        expected = ready(side, text)
        side.client.set_failover({"redis": FailoverPolicy(action="detach", confirm_s=0.0, min_stay_s=0.0)})
        before, used = now(side), side.client.status(fresh=True).usage
        redis._ask(["FLUSHALL"])
        side.engine.flush()
        answer = side.engine.generate(text, 24)
        assert (answer["output_ids"], answer["meta_info"]["cached_tokens_details"]["storage"]) == (expected, 0)
        until("the event", lambda: news(side, before), EVENT_S)
        assert len(news(side, before)) == changes(side) == 1
        status = side.client.status(fresh=True)
        assert status.usage["get"].hit == used["get"].hit
        for counts in status.usage.values():
            assert (counts.error, counts.timeout, counts.skipped) == (0, 0, 0)
        report = side.guard()
        assert (report.breaker, report.errors, report.timeouts) == ("closed", 0, 0)
        failover = side.client.failover()
        assert (failover.state, failover.transitions) == ("watching", 0)
        is_filled_again(side, text, expected)


def test_an_emptied_bucket_is_noticed_although_exists_answers_from_memory(tmp_path: Path) -> None:
    """NIXL objects: what this process stored is not asked for again, so only ``confirm`` can see that it is gone."""
    text = prompts(12)[4]
    with ExitStack() as stack:
        bucket = started(catalogue.line("nixl-obj"), tmp_path / "store", stack)
        assert isinstance(bucket, WeedStand)
        side = stack.enter_context(serving(bucket, tmp_path))
        expected = ready(side, text)
        before = now(side)
        client = S3Client(bucket.target(), 10.0)
        names = list(client.below(""))
        assert names
        client.delete(names)
        client.close()
        until("the event", lambda: news(side, before), EVENT_S)
        assert len(news(side, before)) == changes(side) == 1
        for counts in side.client.status(fresh=True).usage.values():
            assert (counts.error, counts.timeout, counts.skipped) == (0, 0, 0)
        assert side.guard().breaker == "closed"
        is_filled_again(side, text, expected)
