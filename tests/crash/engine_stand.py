"""A stand with the embedded engine: a sidecar and ``hicache-engine --dp 2``; its supervisor restarts what dies."""

import os
import re
import signal
from pathlib import Path

from tests.crash.cells import VICTIM, Act, Point
from tests.crash.stand import Stand
from tests.rigs.procs import Engine, Processes, http_ok

DP = 2
PROMPTS = [f"{topic}: " + "the quick brown fox jumps over the lazy dog, again and again. " * 4 for topic in "abc"]
# A small model and small pools: a prompt spans many pages, and what is flushed is read from the store.
SMALL = ("--layers", "2", "--hidden", "64", "--head-dim", "16", "--seed", "7", "--context", "1024")
POOLS = ("--l1-tokens", "2048", "--l2-tokens", "4096")


class EngineStand(Stand):
    """Made by ``make_engine``."""

    engine: Engine
    reference: list[list[int]]
    backends = ("file", "file")

    @classmethod
    def make_engine(cls, root: Path, points: list[Point], processes: Processes) -> "EngineStand":
        """Start both, and generate the reference."""
        stand = cls(root, points, processes)
        for name in ("arm", "stores"):
            (root / name).mkdir()
        stand.start_sidecar()
        stand.engine = processes.engine(
            stand.sidecar, "--dp", str(DP), *SMALL, *POOLS, HICACHE_FAULTS=stand.spec("rank")
        )
        stand.reference = stand.generate()
        return stand

    def generate(self) -> list[list[int]]:
        """Every prompt on every replica, with empty caches first: what the store has is read from it."""
        self.engine.flush()
        return [
            self.engine.generate(prompt, tokens=6, dp_rank=rank)["output_ids"]
            for rank in range(DP)
            for prompt in PROMPTS
        ]

    def pids(self) -> list[int]:
        """The scheduler processes, in rank order; empty when the sidecar does not know them."""
        return [rank["pid"] for rank in self.status().get("ranks", [])]

    def serves(self) -> bool:
        return http_ok(f"{self.engine.url}/health")

    def hellos(self) -> int:
        """That the sidecar took, of any rank."""
        text = str(self.admin("GET", "/metrics")[1])
        return int(float(re.search(r'what="hello_accepted"\} (\S+)', text)[1]))

    # ---- what the light stand does over pipes

    def requests(self, count: int, *, but: int = -1) -> None:
        """Generation is checked between the cells: a running request would make the operation a busy one."""

    def load(self, running: int) -> None:
        raise NotImplementedError("cells that wait for a busy rank run on light ranks")

    def restart_rank(self, number: int) -> None:
        """The engine's supervisor does it."""

    def strike(self, act: Act) -> None:
        if act is Act.KILL_RANK:
            os.kill(self.victim, signal.SIGKILL)
        elif act in (Act.KILL_SIDECAR, Act.STOP_SIDECAR):
            super().strike(act)
        elif act is not Act.NONE:
            raise NotImplementedError(act)

    def config(self) -> str:
        self.configs += 1
        return f'{{"file_storage_path": "{self.root}/stores/{self.configs}", "prefetch_threshold": 16}}'

    def know_victim(self) -> None:
        """Before a cell: who is struck from outside, since a held sidecar cannot be asked."""
        self.victim = self.pids()[VICTIM]
