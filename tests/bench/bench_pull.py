"""What a quiet iteration of a spinning SGLang scheduler pays: the engine's AFTER wrapper and our hook around a pull.

The engine's own wrapper is rebuilt here line by line (``plugins/hook_registry.py``), so that no SGLang is needed.
CPU time of the thread, in turns with the bare function, so that both see the same machine.
"""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

from tests.unit.sglang.test_pull import Scheduler

from hicache_hooks.sglang import pull

PASSES = 100_000
ROUNDS = 9


def _pull(receiver: Any) -> list[Any]:
    return []


def _after(original: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        modified = hook(result, *args, **kwargs)
        return modified if modified is not None else result

    return wrapper


def _each_us(function: Callable[..., Any]) -> float:
    started = time.thread_time_ns()
    for _ in range(PASSES):
        function(None)
    return (time.thread_time_ns() - started) / PASSES / 1000


def run() -> list[dict[str, Any]]:
    """Rows for ``make bench``."""
    scheduler = Scheduler()
    hooked = _after(_pull, pull.on_pull)
    try:
        pairs = [(_each_us(_pull), _each_us(hooked)) for _ in range(ROUNDS)]
    finally:
        scheduler.hook.close()
        pull.install(None)
    extra = statistics.median(with_us - without_us for without_us, with_us in pairs)
    return [
        {
            "name": "SGLang: a quiet iteration's price for the hooks",
            "value": round(extra, 3),
            "unit": "us",
            "comparison": round(statistics.median(without for without, _ in pairs), 3),
            "compared_with": "the pull without hooks",
            "target": "<= 3",
        }
    ]
