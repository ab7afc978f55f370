"""A stand: one real sidecar and three light ranks, each its own process, with fault points that a file arms.

A stand outlives many cells. Whatever a cell killed is started again on the same directories, as systemd and the
engine's supervisor do; a cell that failed costs the stand (``play``).
"""

import contextlib
import os
import secrets
import shutil
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.crash.cells import VICTIM, Act, Fault, Point, Script, plan, ruled_out
from tests.rigs.procs import Processes, ProcessFailed, Sidecar, http_json
from tests.rigs.rank_process import RankProcess

from hicache_proto.faults import FIRED

DP = 3
PRIMER = "primer"
PRIMER_RANK = 2
CUT_S = 5.0  # the agent's thread takes the cut as its next job; milliseconds
HTTP_S = 100.0  # longer than any operation here


@dataclass
class Rank:
    """One replica's process. ``sent``: requests that it was given."""

    process: RankProcess
    epoch: int
    sent: int = 0
    stopped: bool = False


@dataclass
class Stand:
    """Made by ``make``, for cells at ``points``; ``processes`` ends everything."""

    root: Path
    points: list[Point]
    processes: Processes
    sidecar: Sidecar = field(init=False)
    ranks: list[Rank] = field(default_factory=list)
    incarnation: str = field(default_factory=lambda: secrets.token_hex(4))
    base: dict[str, Any] = field(default_factory=dict)  # facts of a rank at rest, and of the directories
    configs: int = 0
    backends = ("light", "nixl")  # what an attach and a swap ask for

    @classmethod
    def make(cls, root: Path, points: list[Point], processes: Processes) -> "Stand":
        """Start it, and wait until the sidecar is ready."""
        stand = cls(root, points, processes)
        for name in ("arm", "scratch"):
            (root / name).mkdir()
        stand.start_sidecar()
        stand.ranks = [Rank(stand._rank(number, 0), 0) for number in range(DP)]
        stand.sidecar.process.wait_until("/readyz", stand.is_ready, 60)
        return stand

    # ---- fault points

    def spec(self, side: str, rank: int = -1) -> str:
        """What one process is started with: all actions of the points, each armed by a file of its own.

        ``rank`` -1 stands for all of an engine: then it is struck who comes first.
        """
        items = []
        for point in self.points:
            if side == point.side and (side == "sidecar" or rank in (VICTIM, -1)):
                kinds = {plan(point, fault)[0] for fault in Fault if not ruled_out(point, fault)}
                items += [f"{point.name}={action}@{self._arm(action, point)}" for action in sorted(kinds)]
        scripts = {point.script for point in self.points}
        if Script.UNDO in scripts and side == "rank" and rank in (PRIMER_RANK, -1):
            items.append(f"commit.before_apply=error@{self._arm(PRIMER)}")
        if Script.LEASE in scripts and side == "sidecar":
            items.append(f"commit.recv=stop@{self._arm(PRIMER)}")
        return ",".join(items)

    def _arm(self, action: str, point: Point | None = None) -> Path:
        kind = action.partition(":")[0]
        return self.root / "arm" / (f"{point.side}.{point.name}.{kind}" if point is not None else kind)

    def arm(self, action: str, point: Point | None = None) -> None:
        """The next process that reaches the point does ``action``; without a point: the primer."""
        self._arm(action, point).touch()

    def fired(self, action: str, point: Point | None = None) -> bool:
        """It has."""
        return Path(f"{self._arm(action, point)}{FIRED}").exists()

    def release(self) -> None:
        """Disarm everything; a process that is held goes on."""
        for path in (self.root / "arm").iterdir():
            with contextlib.suppress(FileNotFoundError):
                path.unlink()

    # ---- processes

    def start_sidecar(self) -> None:
        """Start it, or start it again."""
        try:
            self.sidecar = self.processes.sidecar(timeout_s=60, HICACHE_SIDECAR_FAULTS=self.spec("sidecar"))
        except ProcessFailed as error:
            if "in use" not in str(error):  # another stand took the port that was free a moment ago
                raise
            self.sidecar = self.processes.sidecar(timeout_s=60, HICACHE_SIDECAR_FAULTS=self.spec("sidecar"))

    def _rank(self, number: int, epoch: int) -> RankProcess:
        return RankProcess(
            f"ipc://{self.root}/run/hooks.sock",
            *("--incarnation", self.incarnation, "--epoch", str(epoch)),
            *("--dp-rank", str(number), "--dp-size", str(DP)),
            faults=self.spec("rank", number),
            log=self.root / f"rank-{number}.log",
        )

    def restart_rank(self, number: int) -> None:
        """A new process in the place of a dead one."""
        rank = self.ranks[number]
        rank.process.kill()
        self.ranks[number] = Rank(self._rank(number, rank.epoch + 1), rank.epoch + 1)

    def restart_sidecar(self) -> None:
        self.sidecar.process.kill()
        self.start_sidecar()

    def strike(self, act: Act) -> None:
        """Do ``act`` while a process is held at the point."""
        rank = self.ranks[VICTIM]
        match act:
            case Act.KILL_SIDECAR:
                self.sidecar.process.kill()
            case Act.STOP_SIDECAR:
                self.sidecar.process.signal(signal.SIGSTOP)
            case Act.KILL_RANK:
                rank.process.kill()
            case Act.STOP_RANK:
                rank.process.signal(signal.SIGSTOP)
                rank.stopped = True
            case Act.CUT_LINK:
                before = rank.process.facts()["link"].get("cuts", 0)
                rank.process.command(cut=True)
                limit = time.monotonic() + CUT_S
                while rank.process.facts()["link"].get("cuts", 0) == before and time.monotonic() < limit:
                    time.sleep(0.002)
            case Act.NONE:
                pass

    def resume(self) -> None:
        """SIGCONT to all that were stopped."""
        self.sidecar.process.signal(signal.SIGCONT)
        for rank in self.ranks:
            if rank.stopped:
                rank.process.signal(signal.SIGCONT)
                rank.stopped = False

    def hellos(self) -> int:
        """How often the victim has said hello."""
        return int(self.ranks[VICTIM].process.facts()["link"].get("hellos", 0))

    def sidecar_stopped(self) -> bool:
        """The kernel says that it is stopped."""
        stat = Path(f"/proc/{self.sidecar.process.pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] == "T"

    # ---- the engine

    def requests(self, count: int, *, but: int = -1) -> None:
        """``count`` requests arrive at every rank that can take them, ``but`` one that dies."""
        for number, rank in enumerate(self.ranks):
            if not rank.stopped and number != but:
                rank.process.command(request=count)
                rank.sent += count

    def load(self, running: int) -> None:
        """Rank 0 has so many running requests."""
        self.ranks[0].process.command(counters={"running_batch": running})

    def config(self) -> str:
        """Options of a store that was never attached before: a config that killed an engine is quarantined (F19)."""
        self.configs += 1
        return f'{{"scratch": "{self.root / "scratch"}", "number": {self.configs}}}'

    # ---- the sidecar

    def admin(self, method: str, path: str, body: Any = None, timeout_s: float = HTTP_S) -> tuple[int, Any]:
        """One request; (0, why) when the sidecar went away."""
        try:
            return http_json(method, f"{self.sidecar.url}{path}", body, timeout_s)
        except OSError as error:  # HTTPException of a cut answer is handled by the caller's retry
            return 0, {"error": {"code": "lost", "message": str(error), "details": {}}}

    def is_ready(self) -> bool:
        return self.admin("GET", "/readyz", timeout_s=5)[0] == 200

    def status(self) -> dict[str, Any]:
        """Fresh from the ranks."""
        code, document = self.admin("GET", "/hicache/storage-backend?fresh=1", timeout_s=10)
        return dict(document) if code == 200 else {}

    def phase(self) -> str:
        """Of the running operation; empty when none runs."""
        code, document = self.admin("GET", "/hicache/operations", timeout_s=5)
        rows = document.get("operations", []) if code == 200 else []
        return next((str(row["phase"]) for row in rows if not row["done"]), "")

    def journal_copy(self, into: Path) -> Path:
        """A copy of the state directory's journal, to be opened while the sidecar runs."""
        into.mkdir(mode=0o700)
        shutil.copy(self.root / "state" / "journal", into / "journal")
        os.chmod(into / "journal", 0o600)
        return into

    def close(self) -> None:
        """End the ranks; ``processes`` ends the sidecar."""
        self.release()
        if self.sidecar.process.popen.poll() is None:
            self.sidecar.process.signal(signal.SIGCONT)
        for rank in self.ranks:
            rank.process.kill()
