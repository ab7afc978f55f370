"""A light rank as a child process: commands and facts over pipes, every wait with a deadline, always gone after."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from tests.rigs.procs import send_signal

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 20.0  # an interpreter start on a busy machine; never reached in a passing run


class RankProcess:
    """``python -m tests.rigs.light_rank`` with the given flags; ready when the constructor returns."""

    def __init__(self, endpoint: str, *flags: str, faults: str = "", log: Path | None = None) -> None:
        """``log``: where its standard error goes; by default to ours."""
        with log.open("ab") if log is not None else contextlib.nullcontext() as stderr:
            self.popen = self._start(endpoint, flags, faults, stderr)
        self._buffer = b""
        self.pid = self._line()["ready"]

    @staticmethod
    def _start(endpoint: str, flags: tuple[str, ...], faults: str, stderr: IO[bytes] | None) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.rigs.light_rank", "--endpoint", endpoint, *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            cwd=ROOT,
            env={**os.environ, "HICACHE_FAULTS": faults},
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def command(self, **command: Any) -> list[dict[str, Any]]:
        """Send one command of the rig; the facts of every rank in the process."""
        assert self.popen.stdin is not None
        self.popen.stdin.write(json.dumps(command).encode() + b"\n")
        self.popen.stdin.flush()
        answer = self._line()
        assert isinstance(answer, list)
        return answer

    def facts(self) -> dict[str, Any]:
        """Facts of the first rank."""
        return self.command(report=True)[0]

    def signal(self, number: signal.Signals) -> None:
        """Send it; see ``procs.send_signal``."""
        send_signal(self.popen.pid, number)

    def wait_end(self) -> int:
        """Wait until it is dead; its exit status (negative: signal)."""
        return self.popen.wait(DEADLINE_S)

    def kill(self) -> None:
        """End it, whatever it does."""
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait(DEADLINE_S)
        for pipe in (self.popen.stdin, self.popen.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _line(self) -> Any:
        assert self.popen.stdout is not None
        limit = time.monotonic() + DEADLINE_S
        while b"\n" not in self._buffer:
            left = limit - time.monotonic()
            assert left > 0, "the rank process does not answer"
            if select.select([self.popen.stdout], [], [], left)[0]:
                data = os.read(self.popen.stdout.fileno(), 65536)
                assert data, f"the rank process ended with {self.popen.wait(DEADLINE_S)}"
                self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)
