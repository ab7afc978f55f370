"""Real processes for tests and benchmarks: started in their own group, ready when they answer, always gone after.

Nothing here sleeps for a guess: readiness is a connection that is accepted or an HTTP answer, polled with a deadline,
and the end of a process is waited for. ``Processes`` is a context manager; on the way out it terminates, then kills
every process group that it started, and fails if anything of it is left.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

POLL_S = 0.02  # between two looks at a readiness condition
STOP_S = 15.0  # grace between SIGTERM and SIGKILL
LOG_TAIL_LINES = 40


class ProcessFailed(AssertionError):
    """A process ended too early, did not get ready, or left something behind; the message has its log's tail."""


def send_signal(pid: int, number: int) -> None:
    """Send it; return from SIGSTOP when every thread of the process stands still, which takes its time under load.

    Raises:
        ProcessFailed: one still runs after STOP_S.
    """
    os.kill(pid, number)
    deadline = time.monotonic() + STOP_S
    while number == signal.SIGSTOP and not all(state in "tTZX" for state in thread_states(pid)):
        if time.monotonic() > deadline:
            raise ProcessFailed(f"process {pid} does not stop")
        time.sleep(POLL_S)


def thread_states(pid: int) -> list[str]:
    """The state letter of every thread (proc(5)); empty when the process is gone."""
    states = []
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):
            states.append(stat.read_text().rpartition(")")[2].split()[0])
    return states


class Process:
    """One started program with its log file."""

    def __init__(
        self, name: str, argv: list[str], log: Path, env: dict[str, str] | None = None, *, pass_fds: Sequence[int] = ()
    ) -> None:
        self.name = name
        self.log = log
        with log.open("ab") as output:
            self.popen = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
                start_new_session=True,  # its own group: its children die with it
                pass_fds=pass_fds,
            )

    @property
    def pid(self) -> int:
        return self.popen.pid

    def text(self) -> str:
        """Everything it wrote so far."""
        return self.log.read_text(errors="replace")

    def tail(self) -> str:
        return "\n".join(self.text().splitlines()[-LOG_TAIL_LINES:])

    def wait_until(self, what: str, ready: Callable[[], bool], timeout_s: float) -> None:
        """Poll ``ready`` until true.

        Raises:
            ProcessFailed: the process ended, or ``timeout_s`` ran out.
        """
        deadline = time.monotonic() + timeout_s
        while not ready():
            code = self.popen.poll()
            if code is not None:
                raise ProcessFailed(f"{self.name} ended with {code} before {what}:\n{self.tail()}")
            if time.monotonic() > deadline:
                raise ProcessFailed(f"{self.name}: no {what} within {timeout_s:g} s:\n{self.tail()}")
            time.sleep(POLL_S)  # pace of a poll, not a wait for a guess

    def wait(self, timeout_s: float = STOP_S) -> int:
        """Exit code.

        Raises:
            ProcessFailed: still running after ``timeout_s``.
        """
        try:
            return self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise ProcessFailed(f"{self.name} still runs after {timeout_s:g} s:\n{self.tail()}") from error

    def signal(self, number: signal.Signals) -> None:
        """Send to the process alone, not its group."""
        send_signal(self.pid, number)

    def stop(self, timeout_s: float = STOP_S) -> int:
        """SIGTERM and its exit code; SIGKILL to the whole group when it does not end in time."""
        if self.popen.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self.signal(signal.SIGTERM)
                self.signal(signal.SIGCONT)  # a stopped process takes no SIGTERM
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(timeout_s)
        return self.kill()

    def kill(self) -> int:
        """SIGKILL to the whole group; returns the exit code."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        code = self.popen.wait(STOP_S)
        deadline = time.monotonic() + STOP_S
        while self.leftovers() and time.monotonic() < deadline:  # a killed child is listed until the kernel is done
            time.sleep(POLL_S)
        return code

    def leftovers(self) -> list[str]:
        """Command lines of live processes of its group (zombies do not count)."""
        return [f"{pid}: {command}" for pid, group, command in _live_processes() if group == self.pid]


def _live_processes() -> Iterator[tuple[int, int, str]]:
    """``(pid, process group, command line)`` of every process that is not a zombie."""
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError, IndexError, ValueError):
            fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            if fields[0] in ("Z", "X"):
                continue
            command = Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            yield int(entry), int(fields[2]), command.strip()


class Processes:
    """Starts programs in ``root`` and sees them all dead at the end."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.started: list[Process] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for process in reversed(self.started):
            process.stop()
        left = [line for process in self.started for line in process.leftovers()]
        if left and error is None:
            raise ProcessFailed("processes left behind: " + "; ".join(left))
        if error is not None:
            for process in self.started:
                error.add_note(f"--- {process.name}, last lines of {process.log}\n{process.tail()}")

    def start(self, name: str, argv: list[str], env: dict[str, str] | None = None) -> Process:
        """Start ``argv``; its output goes to ``root/name.log``."""
        process = Process(name, argv, self.root / f"{name}.log", env)
        self.started.append(process)
        return process

    def sidecar(self, *flags: str, http: int | None = None, timeout_s: float = 20.0, **env: str) -> "Sidecar":
        """A real hicache-sidecar, ready when its control socket accepts and HTTP answers."""
        port = http or free_port()
        runtime, state = self.root / "run", self.root / "state"
        runtime.mkdir(exist_ok=True)
        state.mkdir(exist_ok=True)
        argv = [*program("hicache_sidecar.daemon.main"), "--runtime-dir", str(runtime), "--state-dir",
                str(state), "--http", f"127.0.0.1:{port}", *flags]  # fmt: skip
        process = self.start(f"sidecar-{len(self.started)}", argv, env)
        sidecar = Sidecar(process, runtime, state, port)
        process.wait_until("control socket", lambda: accepts(sidecar.socket), timeout_s)
        process.wait_until("/healthz", lambda: http_ok(f"{sidecar.url}/healthz"), timeout_s)
        return sidecar

    def engine(
        self, sidecar: "Sidecar | None", *flags: str, http: int | None = None, timeout_s: float = 90.0, **env: str
    ) -> "Engine":
        """A real hicache-engine, ready when /health answers (and, with a sidecar, /readyz too)."""
        port = http or free_port()
        argv = [*program("hicache_hooks.embedded.main"), "--http", f"127.0.0.1:{port}", *flags]
        if sidecar is not None:
            argv += ["--sidecar", sidecar.endpoint]
        process = self.start(f"engine-{len(self.started)}", argv, env)
        engine = Engine(process, port)
        process.wait_until("/health", lambda: http_ok(f"{engine.url}/health"), timeout_s)
        if sidecar is not None:
            process.wait_until("/readyz of the sidecar", lambda: http_ok(f"{sidecar.url}/readyz"), timeout_s)
        return engine


class Sidecar:
    """Where a started sidecar listens."""

    def __init__(self, process: Process, runtime: Path, state: Path, port: int) -> None:
        self.process = process
        self.runtime, self.state = runtime, state
        self.socket = str(runtime / "control.sock")
        self.endpoint = f"ipc://{runtime}/hooks.sock"
        self.url = f"http://127.0.0.1:{port}"
        self.port = port


class Engine:
    """A started engine."""

    def __init__(self, process: Process, port: int) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"
        self.port = port

    def generate(self, text: str, tokens: int = 16, timeout_s: float = 60.0, **fields: Any) -> dict[str, Any]:
        """POST /generate."""
        body = {"text": text, "sampling_params": {"max_new_tokens": tokens}, **fields}
        status, answer = http_json("POST", f"{self.url}/generate", body, timeout_s)
        if status != 200:
            raise ProcessFailed(f"generate: {status} {answer}\n{self.process.tail()}")
        return dict(answer)

    def flush(self, timeout_s: float = 30.0) -> None:
        """POST /flush_cache: L1 and L2 are empty afterwards."""
        status, answer = http_json("POST", f"{self.url}/flush_cache?timeout={timeout_s:g}", None, timeout_s + 10)
        if status != 200:
            raise ProcessFailed(f"flush_cache: {status} {answer}\n{self.process.tail()}")


def program(module: str) -> list[str]:
    """What the console script of ``module`` runs, from this very environment."""
    return [sys.executable, "-c", f"from {module} import entry; entry()"]


def free_port() -> int:
    """A TCP port that was free on loopback a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def accepts(path: str) -> bool:
    """Somebody listens on the Unix socket ``path``."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1)
        try:
            probe.connect(path)
        except OSError:
            return False
    return True


def http_ok(url: str) -> bool:
    """GET answers 200."""
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:  # URLError is one
        return False


def http_json(
    method: str, url: str, body: Any = None, timeout_s: float = 30.0, headers: dict[str, str] | None = None
) -> tuple[int, Any]:
    """Status and decoded JSON (or text) of one request; error statuses are returned, not raised."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **(headers or {})}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            status, raw = answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            status, raw = error.code, error.read()
    try:
        return status, json.loads(raw)
    except ValueError:
        return status, raw.decode(errors="replace")
