"""Mooncake's reaper: a client that raises, or a thread that cannot start, keeps no other client from its end."""

import threading
import time
from collections.abc import Callable

import pytest

from hicache_hooks.backends.mooncake_client import Reaper

DEADLINE_S = 10.0


def until(condition: Callable[[], bool]) -> None:
    """Poll; the reaper has nothing to wait on."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def failing() -> bool:
    raise RuntimeError("planted")


def fails_to_end() -> None:
    raise RuntimeError("planted")


def test_a_client_that_raises_does_not_keep_the_others_open() -> None:
    """F23: one that cannot be asked is asked again; one whose close raised is never called again."""
    reaper = Reaper(every_s=0.001)
    asked: list[bool] = []
    ended: list[str] = []

    def asleep_at_first() -> bool:
        asked.append(True)
        return failing() if len(asked) < 3 else True

    reaper.add(fails_to_end, lambda: True)
    reaper.add(lambda: ended.append("asked again"), asleep_at_first)
    reaper.add(lambda: ended.append("other"), lambda: True)
    until(lambda: sorted(ended) == ["asked again", "other"])
    until(lambda: reaper.waiting == 0)
    assert len(asked) == 3


def test_a_thread_that_cannot_start_is_started_with_the_next_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """F28: the engine is at its limit of threads for a moment; the segments of both clients must go."""
    reaper = Reaper(every_s=0.001)
    ended: list[int] = []

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        reaper.add(lambda: ended.append(1), lambda: True)
    assert reaper.waiting == 1
    reaper.add(lambda: ended.append(2), lambda: True)
    until(lambda: sorted(ended) == [1, 2])
