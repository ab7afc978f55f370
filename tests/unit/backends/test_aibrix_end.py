"""AIBrix's manager is ended within a deadline, whatever its connector does (F23). No package needed."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hicache_hooks.backends import aibrix_manager
from hicache_hooks.backends.aibrix import AibrixStore
from hicache_hooks.backends.aibrix_manager import end
from hicache_hooks.backends.aibrix_options import AibrixOptions
from hicache_hooks.backends.base import StoreContext
from hicache_hooks.backends.slots import claim

WAIT_S = 0.05
JOIN_S = 10.0  # of a test that would hang


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """What hangs, hangs on this."""
    event = threading.Event()
    yield event
    event.set()


def in_time(work: Callable[[], None]) -> BaseException | None:
    """What ``work`` raised, if anything; it must return."""
    raised: list[BaseException | None] = []

    def run() -> None:
        try:
            work()
            raised.append(None)
        except BaseException as exc:
            raised.append(exc)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(JOIN_S)
    assert raised, "it waits without a limit"
    return raised[0]


def manager(close: Callable[[], object], **parts: Any) -> Any:
    """A manager that was built whole."""
    return SimpleNamespace(_infight_cv=threading.Condition(), close=close, **parts)


def test_a_close_that_hangs_is_left_alone_and_named(release: threading.Event, caplog: pytest.LogCaptureFixture) -> None:
    hung = manager(release.wait)
    failed = in_time(lambda: end(hung, WAIT_S))
    assert isinstance(failed, TimeoutError)
    assert "its close" in str(failed)
    assert "left alone" in caplog.text


def test_a_call_of_the_connector_that_hangs_is_left_alone(release: threading.Event) -> None:
    executor = ThreadPoolExecutor(1)
    done = executor.submit(release.wait)
    failed = in_time(lambda: end(SimpleNamespace(_executor=executor), WAIT_S))
    assert isinstance(failed, TimeoutError)
    assert "a call of its connector" in str(failed)
    release.set()
    assert done.result(JOIN_S)


def test_an_event_loop_that_hangs_is_left_alone(release: threading.Event) -> None:
    loop = asyncio.new_event_loop()
    loop.call_soon(release.wait)
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    failed = in_time(lambda: end(SimpleNamespace(_event_loop=loop, _thread=thread), WAIT_S))
    assert isinstance(failed, TimeoutError)
    assert "its event loop" in str(failed)
    release.set()
    thread.join(JOIN_S)
    loop.close()


def test_a_healthy_one_is_ended_whole_and_says_what_its_close_said() -> None:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    executor = ThreadPoolExecutor(1)
    executor.submit(int).result(JOIN_S)

    def refuse() -> None:
        raise ValueError("planted")

    failed = in_time(lambda: end(manager(refuse, _event_loop=loop, _thread=thread, _executor=executor)))
    assert isinstance(failed, ValueError)
    assert loop.is_closed()
    assert not thread.is_alive()
    assert not any(worker.is_alive() for worker in executor._threads)


def test_a_store_whose_manager_lives_on_keeps_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, release: threading.Event
) -> None:
    """RocksDB belongs to one owner: the next attach must get another directory."""
    monkeypatch.setattr(aibrix_manager.end, "__defaults__", (WAIT_S,))
    store = AibrixStore(
        AibrixOptions(l1_capacity_gb=0.0, l2_backend="ROCKSDB"),
        StoreContext(namespace="ns", page_bytes=8192, layout="page_first"),
    )
    store._slot = claim(str(tmp_path / "db"))
    store._manager = manager(release.wait)
    store._state.opened()
    assert isinstance(in_time(store.close), TimeoutError)
    other = claim(str(tmp_path / "db"))
    assert other.path != store._slot.path
    other.release()
    store._slot.release()
