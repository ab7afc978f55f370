"""A process that opens one backend and does calls on command: a crash or a hang inside a vendor's client ends it, not
the test run.

``Host`` is the test's side: ``host.put([1, 2])`` writes pages 1 and 2, ``host.get([1, 9])`` says ``["hit", "miss"]``.
Pages are made from their number and version, so the process can tell every byte. Every call has a deadline; what does
not answer is killed, and the error shows its last output.
"""

import json
import os
import select
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.rigs.procs import STOP_S, Process
from tests.rigs.stores.base import Stand

ROOT = Path(__file__).resolve().parents[3]


class HostFailed(AssertionError):
    """The process died, or did not answer in time."""


class CallFailed(AssertionError):
    """The backend raised; ``kind`` is the exception's type, ``kinds`` all that it is."""

    def __init__(self, kind: str, text: str, kinds: list[str]) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind
        self.kinds = kinds


class Host:
    """See the module's text. A context manager; leaves no process."""

    _count = 0

    def __init__(self, stand: Stand, *, threads: str = "1") -> None:
        Host._count += 1
        self._stand = stand
        to_child, self._out = os.pipe()
        self._in, from_child = os.pipe()
        argv = [sys.executable, "-m", "tests.rigs.stores.host_main", str(to_child), str(from_child)]
        env = {"OMP_NUM_THREADS": threads, "PYTHONPATH": str(ROOT), **stand.env()}
        log = stand.root / f"host-{Host._count}.log"
        self.process = Process(f"host of {stand.name}", argv, log, env, pass_fds=(to_child, from_child))
        os.close(to_child)
        os.close(from_child)
        self._buffer = b""
        self.took_s = 0.0  # of the last call, inside the process

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        os.close(self._out)  # end of its commands
        try:
            if error is None:
                self.process.wait(STOP_S)
        finally:
            self.process.kill()
            os.close(self._in)

    @property
    def pid(self) -> int:
        return self.process.pid

    def call(self, do: str, timeout_s: float = 30.0, **fields: Any) -> Any:
        """One command.

        Raises:
            CallFailed: the backend raised.
            HostFailed: no answer within ``timeout_s``, or the process is gone.
        """
        try:
            os.write(self._out, json.dumps({"do": do, **fields}).encode() + b"\n")
        except BrokenPipeError:
            raise self._failed(f"{do}: the process is gone") from None
        answer = json.loads(self._line(do, time.monotonic() + timeout_s))
        self.took_s = answer["took_s"]
        if "raised" in answer:
            raise CallFailed(*answer["raised"])
        return answer["result"]

    def _line(self, do: str, deadline: float) -> bytes:
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._in], [], [], left)[0]:
                raise self._failed(f"{do}: no answer in time")
            read = os.read(self._in, 1 << 16)
            if not read:
                raise self._failed(f"{do}: the process ended")
            self._buffer += read
        found, _, self._buffer = self._buffer.partition(b"\n")
        return found

    def _failed(self, why: str) -> HostFailed:
        self.process.kill()
        return HostFailed(f"{self._stand.name}: {why} (exit code {self.process.popen.poll()})\n{self.process.tail()}")

    # ------------------------------------------------------------ short names

    def open(self, *, guard: bool = False, namespace: str = "ns", **options: Any) -> None:
        """Open the stand's backend, directly or behind the guard."""
        self.call(
            "open", self._stand.open_s, backend=self._stand.backend_name, config={**self._stand.config(), **options},
            guard=guard, namespace=namespace,
        )  # fmt: skip

    def put(self, numbers: list[int], version: int = 1, timeout_s: float = 30.0) -> list[bool]:
        """Write pages."""
        return list(self.call("put", timeout_s, numbers=numbers, version=version))

    def get(self, numbers: list[int], timeout_s: float = 30.0) -> list[str]:
        """``hit`` (right bytes of version 1), ``hit 2``, ``miss``, ``error``; ``wrong``: a hit with other bytes."""
        return list(self.call("get", timeout_s, numbers=numbers))

    def exists(self, numbers: list[int], timeout_s: float = 30.0) -> list[bool]:
        """Ask for pages."""
        return list(self.call("exists", timeout_s, numbers=numbers))

    def delete(self, numbers: list[int], timeout_s: float = 30.0) -> int:
        """Remove pages."""
        return int(self.call("delete", timeout_s, numbers=numbers))

    def health(self, timeout_s: float = 30.0) -> dict[str, Any]:
        """What the backend says about itself."""
        return dict(self.call("health", timeout_s))

    def close(self, timeout_s: float = 30.0) -> None:
        """Close the backend."""
        self.call("close", timeout_s)
