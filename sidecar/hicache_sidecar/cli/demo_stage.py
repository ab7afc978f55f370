"""The demo's stage: a real sidecar and a real engine in a temporary directory, and the certainty that both go away.

Each program runs in its own process group, is told to end by the kernel if the demo itself is killed, gets SIGTERM at
the end and SIGKILL when that is not enough. Readiness is asked for, never slept for.
"""

import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

READY_TIMEOUT_S = 90.0  # loading torch on a slow machine
STOP_TIMEOUT_S = 15.0
POLL_S = 0.05
_SOCKET_PATH_LIMIT = 107  # sun_path, with its final zero
_LONGEST_NAME = len("/run/control.sock.1234567")
_PR_SET_PDEATHSIG = 1


class StageError(Exception):
    """Something that the demo needs did not happen; the message is for the user."""


class Stage:
    """The two programs. A context manager; leaving it ends both and removes the directory."""

    def __init__(self, keep: bool = False) -> None:
        self.keep = keep
        self._directory = _short_directory()
        self.path = Path(self._directory)
        self.socket = str(self.path / "run" / "control.sock")
        self.engine_url = ""
        self.http = ""
        self._programs: list[tuple[str, subprocess.Popen[bytes], Path]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the programs, youngest first, then remove the directory. A second Ctrl-C does not cut this short."""
        before = signal.signal(signal.SIGINT, signal.SIG_IGN) if _in_main_thread() else None
        try:
            for _, program, _ in reversed(self._programs):
                _end(program)
            self._programs.clear()
        finally:
            if before is not None:
                signal.signal(signal.SIGINT, before)
            if not self.keep:
                shutil.rmtree(self._directory, ignore_errors=True)

    def start_sidecar(self) -> list[str]:
        """Start hicache-sidecar; returns the command a user would type."""
        for name in ("run", "state", "store"):
            (self.path / name).mkdir(mode=0o700)
        self.http = f"127.0.0.1:{_free_port()}"
        flags = ["--runtime-dir", str(self.path / "run"), "--state-dir", str(self.path / "state"), "--http", self.http]
        self._start("hicache-sidecar", "hicache_sidecar.daemon.main", flags)
        self._wait("hicache-sidecar", lambda: _listens(self.socket))
        return ["hicache-sidecar", *flags]

    def start_engine(self, replicas: int) -> list[str]:
        """Start hicache-engine and wait until every rank said hello; returns the command."""
        flags = ["--sidecar", f"ipc://{self.path}/run/hooks.sock", "--dp", str(replicas), "--http", "127.0.0.1:0"]
        log = self._start("hicache-engine", "hicache_hooks.embedded.main", flags)

        def ready() -> bool:
            match = re.search(r"ready on (http://\S+)", log.read_text(errors="replace"))
            self.engine_url = match[1] if match else ""
            return bool(match)

        self._wait("hicache-engine", ready)
        self._wait("hicache-engine", lambda: _answers(f"http://{self.http}/readyz"))
        return ["hicache-engine", *flags]

    def _start(self, name: str, module: str, flags: list[str]) -> Path:
        log = self.path / f"{name}.log"
        with log.open("wb") as output:
            program = subprocess.Popen(
                [sys.executable, "-c", f"from {module} import entry; entry()", *flags],  # as the console script
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                env=clean_environment() | {"XDG_RUNTIME_DIR": self._directory},  # the engine's own sockets go with it
                start_new_session=True, preexec_fn=_end_with_parent,
            )  # fmt: skip
        self._programs.append((name, program, log))
        return log

    def _wait(self, name: str, ready: Callable[[], bool]) -> None:
        program, log = next((p, path) for known, p, path in self._programs if known == name)
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not ready():
            code = program.poll()
            if code is not None or time.monotonic() > deadline:
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
                what = f"ended with {code}" if code is not None else f"was not ready after {READY_TIMEOUT_S:g} s"
                raise StageError(f"{name} {what}:\n{tail}")
            time.sleep(POLL_S)  # pace of a poll

    # ---- the engine's HTTP API

    def generate(self, text: str, tokens: int, dp_rank: int, timeout_s: float = 90.0) -> dict[str, Any]:
        """POST /generate on one replica."""
        body = {"text": text, "sampling_params": {"max_new_tokens": tokens}, "dp_rank": dp_rank}
        return _post(f"{self.engine_url}/generate", body, timeout_s)

    def flush(self) -> dict[str, Any]:
        """POST /flush_cache: empties L1 and L2 once the engine is idle."""
        return _post(f"{self.engine_url}/flush_cache?timeout=30", None, 40.0)


class Background:
    """A request that runs beside the demo, so that the engine is busy."""

    def __init__(self, call: Callable[[], dict[str, Any]]) -> None:
        self._call = call
        self._answer: dict[str, Any] | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._answer = self._call()
        except BaseException as error:  # given to the waiter
            self._error = error

    @property
    def running(self) -> bool:
        """No answer yet."""
        return self._thread.is_alive()

    def wait(self, timeout_s: float) -> dict[str, Any]:
        """The answer.

        Raises:
            StageError: it failed, or took longer than ``timeout_s``.
        """
        self._thread.join(timeout_s)
        if self._answer is None:
            raise StageError(f"the request in the background did not end well: {self._error or 'still running'}")
        return self._answer


def clean_environment() -> dict[str, str]:
    """The caller's environment without settings that would redirect the demo's programs."""
    strange = ("HICACHE_", "SGLANG_HICACHE_", "LISTEN_", "NOTIFY_SOCKET", "WATCHDOG_", "RUNTIME_DIRECTORY",
               "STATE_DIRECTORY", "JOURNAL_STREAM", "CREDENTIALS_DIRECTORY")  # fmt: skip
    kept = {name: value for name, value in os.environ.items() if not name.startswith(strange)}
    return kept | {"PYTHONUNBUFFERED": "1"}


def _short_directory() -> str:
    made = tempfile.mkdtemp(prefix="hicache-demo-")
    if len(made) + _LONGEST_NAME < _SOCKET_PATH_LIMIT:
        return made
    os.rmdir(made)  # a long TMPDIR: no socket would fit below it
    return tempfile.mkdtemp(prefix="hicache-demo-", dir="/tmp")


def _end_with_parent() -> None:
    # In the child, before exec: SIGTERM when the demo dies, even by SIGKILL.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _end(program: subprocess.Popen[bytes]) -> None:
    if program.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(program.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            program.wait(STOP_TIMEOUT_S)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(program.pid, signal.SIGKILL)  # whatever of its group is left
    with contextlib.suppress(subprocess.TimeoutExpired):
        program.wait(STOP_TIMEOUT_S)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _listens(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(path) == 0


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2.0) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _post(url: str, body: Any, timeout_s: float) -> dict[str, Any]:
    data = b"" if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            raw = answer.read()
    except urllib.error.HTTPError as error:
        with error:
            raise StageError(f"{url}: {error.code} {error.read()[:500].decode(errors='replace')}") from None
    except OSError as error:
        raise StageError(f"{url}: {error}") from None
    try:
        decoded = json.loads(raw)
    except ValueError:
        decoded = {"text": raw.decode(errors="replace")}
    return decoded if isinstance(decoded, dict) else {"answer": decoded}
