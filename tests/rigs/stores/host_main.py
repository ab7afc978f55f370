"""The process of ``host.py``: reads commands as JSON lines, answers each with one JSON line.

What vendors print goes to the log: the answers have a pipe of their own.
"""

import json
import mmap
import os
import random
import sys
import time
import traceback
from typing import Any

from tests.rigs.stores import probes

from hicache_hooks.backends import registry
from hicache_hooks.backends.base import Backend, Got, Manifest, StoreContext
from hicache_hooks.backends.options import StoreFacts
from hicache_hooks.cache.config import Running, resolve
from hicache_hooks.cache.knobs import Knobs
from hicache_hooks.cache.pages import PageFormat
from hicache_hooks.guard import Guard
from hicache_proto.model import TargetState

PAYLOAD = 65_472  # with the trailer exactly 64 KiB
SLOTS = 128  # most pages of one call


class Opened:
    """One backend and page buffers, registered where it wants that."""

    def __init__(self, backend: str, config: dict[str, Any], namespace: str, guard: bool, payload: int = PAYLOAD):
        self.format = PageFormat(payload, namespace)
        self.page_bytes = self.format.page_bytes
        self.namespace = namespace
        target = TargetState(backend=backend, extra_config=json.dumps(config))
        running = resolve(target, Running(None, Knobs()), namespace=namespace)
        if running.config is None:
            raise RuntimeError("no config")
        options = running.config.options
        spec = registry.usable(backend)
        self.manifest: Manifest = spec.manifest(options, os.environ)
        layout = self.manifest.layouts[0]
        options.check(StoreFacts(layout=layout, page_bytes=self.page_bytes, l2_pages=SLOTS))
        context = StoreContext(namespace=namespace, page_bytes=self.page_bytes, layout=layout)
        self.memory = memoryview(mmap.mmap(-1, SLOTS * self.page_bytes))
        self.backend: Backend = spec.create(options, context, os.environ)
        try:
            self.backend.open()
            self.register(self.memory)
        except BaseException:
            self.backend.close()
            raise
        self.guard = Guard(self.backend, name=backend) if guard else None
        self.front: Any = self.guard or self.backend

    def register(self, memory: memoryview) -> None:
        """As the attach path does it."""
        if self.manifest.needs_registration:
            self.backend.register(memory)

    def key(self, number: int) -> str:
        """Shaped like a page key (cache/hashing.py)."""
        return f"{self.namespace}.{number:064x}"

    def slot(self, i: int) -> memoryview:
        """Page buffer ``i``."""
        return self.memory[i * self.page_bytes : (i + 1) * self.page_bytes]

    def fill(self, page: memoryview, number: int, version: int) -> None:
        """The sealed page ``number`` in its ``version``."""
        payload = self.format.payload_bytes
        page[:payload] = content(number, version, payload)
        page[payload:] = bytes(page.nbytes - payload)
        self.format.seal(page, self.key(number))

    def spoil(self, page: memoryview) -> None:
        """Bytes that belong to no page, so that a read that does nothing is found out."""
        page[:] = b"\xa5" * page.nbytes

    def judge(self, page: memoryview, number: int) -> str:
        """Which version's sealed bytes ``page`` holds; ``wrong`` when none."""
        if self.format.check(page, self.key(number)) is not None:
            return "wrong"
        payload = self.format.payload_bytes
        for version in range(1, 10):
            if page[:payload] == content(number, version, payload):
                return "hit" if version == 1 else f"hit {version}"
        return "wrong"

    def put(self, numbers: list[int], version: int, first: int = 0) -> list[bool]:
        pages = [self.slot(first + i) for i in range(len(numbers))]
        for page, number in zip(pages, numbers, strict=True):
            self.fill(page, number, version)
        return [bool(item) for item in self.front.batch_put([self.key(n) for n in numbers], pages)]

    def get(self, numbers: list[int], first: int = 0) -> list[str]:
        pages = [self.slot(first + i) for i in range(len(numbers))]
        for page in pages:
            self.spoil(page)
        results = self.front.batch_get([self.key(n) for n in numbers], pages)
        return [
            self.judge(page, number) if Got(result) is Got.HIT else str(Got(result).value)
            for result, page, number in zip(results, pages, numbers, strict=True)
        ]

    def close(self) -> None:
        (self.guard or self.backend).close()


def content(number: int, version: int, length: int) -> bytes:
    """Noise that differs in every block, so that shifted and swapped blocks are seen."""
    return random.Random(number * 1000 + version).randbytes(length)


class Main:
    """Commands by name. One backend at a time; ``close`` leaves it, closed, for calls that must then fail."""

    def __init__(self) -> None:
        self._now: Opened | None = None

    @property
    def now(self) -> Opened:
        if self._now is None:
            raise RuntimeError("nothing was opened")
        return self._now

    def import_backend(self, backend: str) -> None:
        """Import what opening needs, so that a test can time the opening alone."""
        registry.usable(backend)

    def layouts(self) -> list[str]:
        """What the manifest says."""
        return list(self.now.manifest.layouts)

    def open(self, **fields: Any) -> None:
        self._now = None
        self._now = Opened(**fields)

    def put(self, numbers: list[int], version: int) -> list[bool]:
        return self.now.put(numbers, version)

    def get(self, numbers: list[int]) -> list[str]:
        return self.now.get(numbers)

    def exists(self, numbers: list[int]) -> list[bool]:
        return [bool(x) for x in self.now.front.batch_exists([self.now.key(n) for n in numbers])]

    def delete(self, numbers: list[int]) -> int:
        return self.now.backend.delete([self.now.key(n) for n in numbers])

    def set_aside(self, number: int) -> None:
        self.now.front.set_aside(self.now.key(number), "test")

    def clear(self) -> int:
        return self.now.backend.clear()

    def health(self) -> dict[str, Any]:
        return dict(self.now.front.health())

    def close(self) -> None:
        self.now.close()

    def usage(self) -> dict[str, dict[str, int]]:
        """Counters of the guard."""
        if self.now.guard is None:
            raise RuntimeError("opened without the guard")
        return {
            kind: {"hit": u.hit, "miss": u.miss, "error": u.error, "timeout": u.timeout, "skipped": u.skipped}
            for kind, u in self.now.guard.usage().items()
        }

    def probe(self, name: str, **fields: Any) -> Any:
        """A longer check that must run in one piece; see ``probes.py``."""
        return getattr(probes, name)(self.now, **fields)

    def cycles(self, count: int, warm: int, **fields: Any) -> dict[str, list[int]]:
        """Open, use and close again and again; see ``probes.py``."""
        return probes.cycles(lambda: Opened(**fields), count, warm)


def serve(commands: int, answers: int) -> None:
    """Until the commands end."""
    main = Main()
    with open(commands, "rb") as lines, open(answers, "wb") as out:
        for line in lines:
            request = json.loads(line)
            call = getattr(main, request.pop("do"))
            began = time.perf_counter()
            answer: dict[str, Any] = {}
            try:
                answer["result"] = call(**request)
            except Exception as exc:
                traceback.print_exc()
                answer["raised"] = [type(exc).__name__, str(exc)[:500], [cls.__name__ for cls in type(exc).__mro__]]
            answer["took_s"] = time.perf_counter() - began
            out.write(json.dumps(answer).encode() + b"\n")
            out.flush()


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]))
