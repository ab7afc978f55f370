"""Continuous load on an engine, with every answer compared to a reference, and the processes' size while it runs."""

import json
import os
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.rigs.procs import Engine

WORDS = (
    "In the beginning the store was attached, and the pages were without form; and the scheduler moved upon the face "
    "of the host pool. And it said, let there be a second store: and there was a second store, and the first was "
)
NEW_TOKENS = 4
WAIT_S = 120.0  # one request, on the busiest machine; never reached in a passing run


def prompts(count: int, seed: int = 3) -> list[str]:
    """Texts of 300 to 500 tokens (bytes), each with a start of its own so that no two share a page."""
    rng = random.Random(seed)
    return [(f"[{seed}.{i:03d}] " + WORDS * 3)[: rng.randrange(300, 500)] for i in range(count)]


def reference(engine: Engine, texts: list[str]) -> dict[str, list[int]]:
    """Each text's tokens, asked one at a time while nothing is attached."""
    return {text: engine.generate(text, NEW_TOKENS, WAIT_S)["output_ids"] for text in texts}


class Load:
    """Threads that ask for random texts until stopped. ``failed`` and ``wrong`` must stay empty."""

    def __init__(self, engine: Engine, expected: dict[str, list[int]], clients: int = 3) -> None:
        self._engine, self._expected = engine, expected
        self._texts = list(expected)
        self._stop = threading.Event()
        self._news = threading.Condition()
        self._threads = [threading.Thread(target=self._ask, args=(i,), name=f"load-{i}") for i in range(clients)]
        self.done = 0
        self.from_storage = 0  # requests that read pages of L3
        self.storage_tokens = 0
        self.failed: list[str] = []
        self.wrong: list[str] = []

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(WAIT_S)

    def wait_for(self, requests: int) -> None:
        """Until so many more requests have ended.

        Raises:
            AssertionError: they do not end.
        """
        with self._news:
            until = self.done + requests
            assert self._news.wait_for(lambda: self.done >= until, WAIT_S), "the load stands still"

    def _ask(self, seed: int) -> None:
        rng = random.Random(seed)
        while not self._stop.is_set():
            text = rng.choice(self._texts)
            try:
                answer = self._engine.generate(text, NEW_TOKENS, WAIT_S)
            except Exception as error:
                self._note(lambda error=error: self.failed.append(f"{type(error).__name__}: {error}"))  # type: ignore[misc]
                continue
            self._note(lambda text=text, answer=answer: self._judge(text, answer))  # type: ignore[misc]

    def _judge(self, text: str, answer: dict[str, Any]) -> None:
        if answer["output_ids"] != self._expected[text]:
            self.wrong.append(text[:12])
        stored = answer["meta_info"]["cached_tokens_details"]["storage"]
        self.storage_tokens += stored
        self.from_storage += stored > 0

    def _note(self, what: Callable[[], None]) -> None:
        with self._news:
            what()
            self.done += 1
            self._news.notify_all()


@dataclass
class Sizes:
    """Series of one process: one value per sample."""

    pid: int
    threads: list[float] = field(default_factory=list)
    descriptors: list[float] = field(default_factory=list)
    resident_mib: list[float] = field(default_factory=list)

    def sample(self) -> None:
        """Look now."""
        status = dict(
            line.split(":", 1) for line in Path(f"/proc/{self.pid}/status").read_text().splitlines() if ":" in line
        )
        self.threads.append(float(status["Threads"]))
        self.descriptors.append(float(len(os.listdir(f"/proc/{self.pid}/fd"))))
        self.resident_mib.append(int(status["VmRSS"].split()[0]) / 1024)


def slope(values: list[float]) -> float:
    """Slope of the least-squares line through ``values``, per sample."""
    n = len(values)
    middle, mean = (n - 1) / 2, sum(values) / n
    spread = sum((i - middle) ** 2 for i in range(n))
    return sum((i - middle) * (value - mean) for i, value in enumerate(values)) / spread


def growth(values: list[float], last: int) -> float:
    """What the line through the last ``last`` values rises from its first to its last point."""
    return slope(values[-last:]) * (last - 1)


def store_config(folder: Path) -> str:
    """Options of a ``file`` store that is read for every hit of two pages or more."""
    return json.dumps({"file_storage_path": str(folder), "prefetch_threshold": 32})
