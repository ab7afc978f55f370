"""Stands of ``mooncake``: a real ``mooncake_master`` on loopback, tcp.

Plain: the engine contributes the memory, so pages end with it. ``peer``: a second process contributes it and the
engine none, so every page crosses a socket and outlives the engine.
"""

import ctypes.util
import importlib.util
import json
import socket
import sys
from pathlib import Path
from typing import Any

from tests.rigs.procs import Process, free_port
from tests.rigs.stores.base import START_S, ServerStand, Stand

ROOT = Path(__file__).resolve().parents[3]
MASTER = Path(sys.executable).with_name("mooncake_master")
LEASE_MS = 5000  # 10 s by default; shorter than a transfer takes under load, and reads fail (-707)
SEGMENT = "64mb"
SMALL_SEGMENT = "16mb"


class MooncakeStand(ServerStand):
    """See the module's text."""

    backend_name = "mooncake"
    outlives_client = False
    outlives_server = False  # a master keeps its keys in memory
    can_be_small = True
    small_pages = 256
    evicts_when_full = True  # leased pages survive, and a put beside them is refused
    warm_cycles = 20  # its own memory grows by 20 to 30 MB in the first sixteen, and not in the sixty after them

    def __init__(self, name: str, root: Path, *, small: bool = False) -> None:
        super().__init__(name, root, small=small)
        self.port, self.metrics_port = free_port(), free_port()

    @staticmethod
    def missing() -> str | None:
        if importlib.util.find_spec("mooncake") is None or not MASTER.exists():
            return "the package mooncake-transfer-engine-non-cuda is not installed"
        if ctypes.util.find_library("ibverbs") is None:
            return "libibverbs1 is not installed"
        return None

    def argv(self) -> list[str]:
        return [
            str(MASTER), "-rpc_address=127.0.0.1", f"-rpc_port={self.port}", "-metrics_host=127.0.0.1",
            f"-metrics_port={self.metrics_port}", f"-default_kv_lease_ttl={LEASE_MS}", "-logtostderr",
            *self.more_flags(),
        ]  # fmt: skip

    def more_flags(self) -> list[str]:
        """Of a subclass."""
        return []

    def ready(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), 1.0).close()
        except OSError:
            return False
        return True

    def segment(self) -> str | int:
        """What the engine contributes."""
        return SMALL_SEGMENT if self.small else SEGMENT

    def config(self) -> dict[str, Any]:
        return {
            "master_server_address": f"127.0.0.1:{self.port}", "local_hostname": "127.0.0.1", "protocol": "tcp",
            "metadata_server": "P2PHANDSHAKE", "global_segment_size": self.segment(), "rpc_timeout_ms": 1000,
        }  # fmt: skip

    def env(self) -> dict[str, str]:
        # Mooncake starts and ends threads in every cycle; an arena of glibc's for each looks like a leak of megabytes.
        return {"MALLOC_ARENA_MAX": "1"}

    def tool(self, do: str, **fields: Any) -> Process:
        """Another client of this master (``mooncake_tool.py``)."""
        argv = [sys.executable, "-m", "tests.rigs.stores.mooncake_tool", do]
        argv.append(json.dumps({"master": f"127.0.0.1:{self.port}", **fields}))
        return Process(f"mooncake-{do}", argv, self.root / f"{do}.log", {"PYTHONPATH": str(ROOT)})

    def replace(self, key: str, percent: int) -> bool:
        """Another client stores the object anew with another length."""
        process = self.tool("replace", key=key, percent=percent)
        try:
            return process.wait(30) == 0
        finally:
            process.kill()

    def shorten(self, key: str, namespace: str) -> bool:
        return self.replace(key, 50)


class MooncakePeerStand(MooncakeStand):
    """See the module's text."""

    outlives_client = True

    def __init__(self, name: str, root: Path, *, small: bool = False) -> None:
        super().__init__(name, root, small=small)
        self.peer: Process | None = None

    def start(self) -> None:
        super().start()
        if self.peer is None:
            self.peer = self.tool("contribute", nbytes=(16 if self.small else 2048) << 20)
            self.peer.wait_until("its segment", lambda: "mounted" in ((self.peer and self.peer.text()) or ""), START_S)

    def stop(self) -> None:
        if self.peer is not None:
            self.peer.kill()
        super().stop()

    def segment(self) -> str | int:
        return 0


def stand_class(variant: str) -> type[Stand]:
    """``peer`` or the plain one."""
    return MooncakePeerStand if variant == "peer" else MooncakeStand
