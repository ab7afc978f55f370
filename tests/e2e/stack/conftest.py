"""A running sidecar and a dp=2 engine, shared by the tests of one module; each test starts and ends detached."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.rigs.procs import Engine, Processes, Sidecar, http_json


@dataclass
class Stack:
    """Sidecar, engine, and a directory for stores."""

    sidecar: Sidecar
    engine: Engine
    root: Path

    def admin(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """One request to the HTTP admin API."""
        return http_json(
            method, self.sidecar.url + path, body, 60.0, {k.replace("_", "-"): v for k, v in headers.items()}
        )

    def status(self) -> dict[str, Any]:
        """Status, asked of the ranks now."""
        code, document = self.admin("GET", "/hicache/storage-backend?fresh=1")
        assert code == 200, document
        return dict(document)

    def attach(self, store: str = "store", config: dict[str, Any] | None = None, **fields: Any) -> tuple[int, Any]:
        """PUT of the file backend in ``root/store``."""
        import json

        extra = {"file_storage_path": str(self.root / store), "prefetch_threshold": 64, **(config or {})}
        body = {
            "hicache_storage_backend": "file",
            "hicache_storage_backend_extra_config_json": json.dumps(extra),
            **fields,
        }
        return self.admin("PUT", "/hicache/storage-backend", body)

    def detach(self) -> tuple[int, Any]:
        """DELETE."""
        return self.admin("DELETE", "/hicache/storage-backend")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two replicas with small pools, so that a prompt of some hundred tokens spans many pages."""
    root = tmp_path_factory.mktemp("stack")
    with Processes(root) as processes:
        sidecar = processes.sidecar()
        engine = processes.engine(sidecar, "--dp", "2", "--l1-tokens", "4096", "--l2-tokens", "8192")
        yield Stack(sidecar, engine, root)


@pytest.fixture
def stack(running: Stack) -> Iterator[Stack]:
    """The running stack, detached before and after; what the test's last request left behind may still end."""
    quiet = ("DELETE", "/hicache/storage-backend?wait_timeout_s=10")
    assert running.admin(*quiet)[0] == 200
    yield running
    assert running.admin(*quiet)[0] == 200
