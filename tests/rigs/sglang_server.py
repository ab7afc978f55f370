"""The real SGLang server with the hooks in it, beside a real sidecar: started once per topology, shared by many tests.

The project is installed with ``pip install --no-deps --target`` into a directory of the run and put on the server's
path: the same wheel and entry point as in an engine's environment, and the rig's environment stays as it is.
"""

import os
import random
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.rigs.procs import POLL_S, Process, Processes, ProcessFailed, Sidecar, free_port, http_json, http_ok

ROOT = Path(__file__).resolve().parent.parent.parent
RIG = ROOT / "tests" / "rigs" / "sglang"
START_S = 600.0  # 35 s on an idle machine with two cores; a bound, not an expectation
CALL_S = 120.0
TOKEN = "token-of-the-test-rig"
ENGINE_KEY = {"Authorization": "Bearer adm"}
FLAGS = {
    "tp1": ["--sleep-on-idle"],
    "tp2": ["--tp", "2", "--sleep-on-idle"],
    "dp2": ["--dp", "2", "--sleep-on-idle"],
    # Starts here, but cannot generate on a CPU.
    "dpattention": ["--tp", "2", "--dp", "2", "--enable-dp-attention", "--sleep-on-idle"],
    # A spinning scheduler with the Python tree, and storage from its own command line.
    "startup": ["--hicache-storage-backend", "file", "--hicache-storage-prefetch-policy", "wait_complete"],
}
STORES = ("PlainStore", "OneRankFails", "SlowStart", "FailingStore", "HangingGet", "HangingPages", "OddStore")
RANKS = {"tp1": 1, "tp2": 2, "dp2": 2, "dpattention": 2, "startup": 1}
HIT = 1984  # of a prompt of 2048 tokens: its last page is always computed

# Where the sidecar dies when its file is armed (``Stack.arm``); grammar: hicache_proto.faults.
SIDECAR_POINTS = {
    "frozen": "freeze.after_apply",  # every rank is frozen, no COMMIT was sent
    "first-commit": "commit.after_send",  # one rank has its COMMIT
}


def rig_python() -> Path:
    """The interpreter of the environment in which SGLang is installed.

    Raises:
        ProcessFailed: it is not there; ``make test-sglang`` makes it.
    """
    python = Path(os.environ.get("SGLANG_VENV", ROOT / ".venv-sglang")) / "bin" / "python"
    if not python.exists():
        raise ProcessFailed(f"{python} is missing: make test-sglang builds the rig's environment")
    return python


def install_hooks(target: Path) -> Path:
    """The project as an operator installs it beside SGLang, in ``target``; nothing of SGLang's is touched."""
    subprocess.run(
        [str(rig_python()), "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps",
         "--target", str(target), str(ROOT)],
        check=True, timeout=CALL_S,
    )  # fmt: skip
    return target


class Server:
    """One running SGLang."""

    def __init__(self, process: Process, port: int) -> None:
        self.process, self.port = process, port
        self.url = f"http://127.0.0.1:{port}"

    def generate(self, ids: list[int], tokens: int = 8, timeout_s: float = CALL_S, **fields: Any) -> dict[str, Any]:
        """POST /generate, greedy. Raises ProcessFailed for anything but 200."""
        sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": ids, "sampling_params": sampling, **fields}
        status, answer = http_json("POST", f"{self.url}/generate", body, timeout_s)
        if status != 200:
            raise ProcessFailed(f"generate: {status} {answer}\n{self.process.tail()}")
        return dict(answer)

    def flush(self, timeout_s: float = 30.0) -> None:
        """Empty L1 and L2. Raises ProcessFailed when it is not idle in time."""
        status, answer = http_json("POST", f"{self.url}/flush_cache?timeout={timeout_s:g}", None, timeout_s + 20,
                                   ENGINE_KEY)  # fmt: skip
        if status != 200:
            raise ProcessFailed(f"flush_cache: {status} {answer}\n{self.process.tail()}")

    def storage(self, method: str = "GET", body: Any = None, timeout_s: float = CALL_S, path: str = "") -> Any:
        """The engine's own admin call: status and answer."""
        return http_json(method, f"{self.url}/hicache/storage-backend{path}", body, timeout_s, ENGINE_KEY)

    def shown(self) -> Any:
        """The backend that the engine's own GET shows."""
        return self.storage()[1]["hicache_storage_backend"]

    def metrics(self) -> str:
        """GET /metrics."""
        return str(http_json("GET", f"{self.url}/metrics", timeout_s=CALL_S)[1])


def ids_of(answer: dict[str, Any]) -> list[int]:
    """The output ids of an answer."""
    return list(answer["output_ids"])


def from_storage(answer: dict[str, Any]) -> int:
    """Tokens of the prompt that came from L3."""
    return int((answer["meta_info"].get("cached_tokens_details") or {}).get("storage", 0))


def prompt(tokens: int = 2048) -> list[int]:
    """A prompt that nobody used before."""
    draw = random.SystemRandom()
    return [draw.randrange(3, 500) for _ in range(tokens)]


class Stack:
    """Sidecar and SGLang of one topology, and directories for stores."""

    def __init__(self, processes: Processes, topology: str, hooks: Path, **env: str) -> None:
        """``env``: more of the server's environment."""
        self.processes, self.topology, self.root = processes, topology, processes.root
        self.ranks = RANKS[topology]
        self._hooks, self._env = hooks, env
        self._restarts = 0
        self.lost = False  # a test sacrificed the server
        (self.root / "token").write_text(TOKEN)
        faults = [f"{point}=kill@{self.root}/{name}" for name, point in SIDECAR_POINTS.items()]
        (self.root / "sidecar.toml").write_text(
            f"faults = {faults}\n[http]\ntoken_file = '{self.root}/token'\n".replace('"', "'")
        )
        self.sidecar = self.start_sidecar()
        self.server = self.start_server()

    # ---- processes

    def start_sidecar(self) -> Sidecar:
        """The first, or the next one on the same directories."""
        (self.root / "token").chmod(0o600)
        return self.processes.sidecar("--config", str(self.root / "sidecar.toml"))

    def start_server(self) -> Server:
        """SGLang with the hooks, ready when all its ranks are known to the sidecar."""
        port = free_port()
        argv = [str(RIG / "launch.sh"), str(rig_python().parent.parent), str(port), *FLAGS[self.topology],
                "--enable-cache-report", "--enable-metrics"]  # fmt: skip
        self._restarts += 1
        process = self.processes.start(f"sglang-{self.topology}-{self._restarts}", argv, {
            "HICACHE_SIDECAR": self.sidecar.endpoint,
            "HICACHE_DYNAMIC_BACKENDS": ",".join(f"rig_stores:{name}" for name in STORES),
            "PYTHONPATH": f"{self._hooks}:{RIG / 'stores'}",
            "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": "",
            **(self._startup_env() if self.topology == "startup" else {}),
            **self._env,
        })  # fmt: skip
        server = Server(process, port)
        process.wait_until("the server", lambda: "fired up and ready to roll" in process.text(), START_S)
        process.wait_until("/readyz of the sidecar", self.ready, 30.0)
        return server

    def _startup_env(self) -> dict[str, str]:
        return {
            "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(self.root / "startup"),
            "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",
        }

    def lose_server(self) -> None:
        """It hangs: killed; the next test of this topology starts another."""
        self.server.process.kill()
        self.lost = True

    def kill_sidecar(self) -> None:
        """SIGKILL."""
        self.sidecar.process.kill()

    def restart_sidecar(self) -> None:
        """After it died: ready again with all ranks."""
        self.sidecar = self.start_sidecar()
        self.sidecar.process.wait_until("/readyz", self.ready, 60.0)

    def ready(self) -> bool:
        """The sidecar knows all ranks and recovery is over."""
        return http_ok(f"{self.sidecar.url}/readyz")

    def arm(self, name: str) -> Path:
        """The sidecar dies when it next passes the point; the returned path exists once it did."""
        (self.root / name).touch()
        fired = self.root / f"{name}.fired"
        fired.unlink(missing_ok=True)
        return fired

    # ---- the sidecar's API

    def admin(self, method: str, path: str, body: Any = None, timeout_s: float = CALL_S) -> tuple[int, Any]:
        """One request to the sidecar's HTTP admin API."""
        return http_json(method, self.sidecar.url + path, body, timeout_s, {"Authorization": f"Bearer {TOKEN}"})

    def status(self) -> dict[str, Any]:
        """Status, asked of the ranks now."""
        code, document = self.admin("GET", "/hicache/storage-backend?fresh=1")
        if code != 200:
            raise ProcessFailed(f"status: {code} {document}")
        return dict(document)

    def body(self, store: str, backend: str = "file", config: Any = None, **fields: Any) -> dict[str, Any]:
        """A PUT body: the backend with its pages in ``root/store``."""
        import json

        extra = {"file_storage_path": str(self.root / store), "prefetch_threshold": 64, **(config or {})}
        return {
            "hicache_storage_backend": backend,
            "hicache_storage_backend_extra_config_json": json.dumps(extra),
            "hicache_storage_prefetch_policy": "wait_complete",
            **fields,
        }

    def dynamic(self, class_name: str, store: str, config: Any = None, **fields: Any) -> dict[str, Any]:
        """A PUT body of a class of ``rig_stores``."""
        names = {"backend_name": class_name.lower(), "module_path": "rig_stores", "class_name": class_name}
        return self.body(store, "dynamic", {**names, **(config or {})}, **fields)

    def put(self, body: dict[str, Any], timeout_s: float = CALL_S) -> tuple[int, Any]:
        """PUT to the sidecar."""
        return self.admin("PUT", "/hicache/storage-backend", body, timeout_s)

    def attach(self, store: str, **fields: Any) -> Any:
        """PUT of the file backend. Raises ProcessFailed unless it is done."""
        return self._done(self.put(self.body(store, **fields)))

    def detach(self, query: str = "") -> Any:
        """DELETE. Raises ProcessFailed unless it is done."""
        return self._done(self.admin("DELETE", f"/hicache/storage-backend{query}"))

    def _done(self, result: tuple[int, Any]) -> Any:
        code, document = result
        if code != 200:
            raise ProcessFailed(f"{code} {document}\n{self.server.process.tail()}")
        return document

    def clean(self) -> None:
        """Detached, nothing cached, nothing armed: where every test begins."""
        for name in SIDECAR_POINTS:
            (self.root / name).unlink(missing_ok=True)
        until(lambda: self.status()["state"] in ("attached", "detached", "bypassed"), "a settled state", 60.0)
        self.admin("POST", "/hicache/storage-backend/bypass", {"enabled": False})
        self.detach("?wait_timeout_s=30")
        self.server.flush()

    def pages(self, store: str) -> set[str]:
        """Names of the pages in a store's directory."""
        return {path.name for path in (self.root / store).glob("*.bin")}


class Fleet:
    """At most one stack at a time: the machine has two cores, and the tests of a topology run together."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.hooks = install_hooks(root / "hooks")
        self._started = 0
        self._stack: Stack | None = None
        self._processes: Processes | None = None

    def get(self, topology: str) -> Stack:
        """The running stack of ``topology``, or a new one instead of what runs."""
        if self._stack is None or self._stack.topology != topology or self._stack.lost:
            self.stop()
            self._started += 1
            root = self._root / f"{topology}-{self._started}"
            root.mkdir()
            self._processes = Processes(root)
            try:
                self._stack = Stack(self._processes, topology, self.hooks)
            except BaseException:
                self.stop()
                raise
        return self._stack

    def stop(self) -> None:
        """End what runs."""
        processes, stack, self._processes, self._stack = self._processes, self._stack, None, None
        if stack is not None:
            stack.server.process.kill()  # its own way out drains for 12 s
        if processes is not None:
            processes.__exit__(None, None, None)


def until(condition: Callable[[], Any], what: str, timeout_s: float = 30.0) -> Any:
    """Poll ``condition`` until it is true, and return it.

    Raises:
        ProcessFailed: not within ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise ProcessFailed(f"no {what} within {timeout_s:g} s")
        time.sleep(POLL_S)  # pace of a poll, not a wait for a guess
