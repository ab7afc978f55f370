"""Every storage backend beside the store's own client loop, in the same process and run, on the same pages.

256 pages of 1 MiB. Targets (issue 5): at least 0.6 of the client's own rate with the checksum on, 0.85 with it off. A
store that this machine lacks is left out by name. ``HICACHE_BENCH_STORES=NAME,NAME`` measures these alone.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.bench.bench_storage import MEMORY, NEEDED_BYTES
from tests.rigs.stores.base import Stand
from tests.rigs.stores.catalogue import CATALOGUE

TARGETS = {"checksum": ">= 0.6x", "no checksum": ">= 0.85x"}
TIMEOUT_S = 300.0
ROOT = Path(__file__).resolve().parents[2]
# Stands of the conformance suite are small; emulated ones and those in the engine's memory say nothing about a rate.
STANDS = ("aibrix-l1", "aibrix-rocksdb", "file", "mooncake", "mooncake-peer", "nixl-obj", "nixl-posix-aio",
          "nixl-posix-uring", "redis")  # fmt: skip
LARGER: dict[str, dict[str, Any]] = {"aibrix-l1": {"l1_capacity_gb": 3}, "mooncake": {"global_segment_size": "2gb"}}
BUFFERED = ("nixl-posix-aio", "nixl-posix-uring")  # as the loops of file: the page cache, not this disk


def place() -> str | None:
    """Memory where there is room: the rates are about the code (``bench_storage.py`` says what ext4 does to them)."""
    return MEMORY if os.path.isdir(MEMORY) and shutil.disk_usage(MEMORY).free > NEEDED_BYTES else None


def measured(stand: Stand, root: Path) -> dict[str, dict[str, float]]:
    """What ``store_run.py`` found."""
    config = {**stand.config(), **LARGER.get(stand.name, {})}
    if stand.name in BUFFERED:
        config["use_direct_io"] = False
    root.mkdir()
    asked = json.dumps({"backend": stand.backend_name, "config": config, "root": str(root)})
    env = {**os.environ, **stand.env(), "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-m", "tests.bench.store_run", asked]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{stand.name}: {done.stderr[-2000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def rows_of(name: str, found: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """Four rows of the table."""
    return [
        {
            "name": f"{name} {kind} ({mode})",
            "value": round(rates[kind], 3),
            "unit": "GB/s",
            "comparison": round(rates[f"their {kind}"], 3),
            "paired_ratio": rates[f"{kind} ratio"],
            "compared_with": "its client's loop",
            "target": TARGETS[mode],
        }
        for mode, rates in found.items()
        for kind in ("put", "get")
    ]


def run() -> list[dict[str, Any]]:
    """Rates in GB/s."""
    wanted = os.environ.get("HICACHE_BENCH_STORES", ",".join(STANDS)).split(",")
    rows: list[dict[str, Any]] = []
    for line in CATALOGUE:
        if line.name not in wanted:
            continue
        try:
            missing = line.stand_class().missing()
        except ImportError as exc:
            missing = f"{exc.name} is not installed"
        if missing:
            print(f"    {line.name} left out: {missing}", file=sys.stderr)
            continue
        with tempfile.TemporaryDirectory(prefix="hicache-bench-", dir=place()) as root:
            print(f"    {line.name}", file=sys.stderr, flush=True)
            try:
                with line.make(Path(root) / "stand") as stand:
                    rows += rows_of(line.name, measured(stand, Path(root) / "run"))
            except Exception as exc:  # one broken store must not hide the others; it is a missed target
                print(f"    {line.name} failed: {exc}", file=sys.stderr)
                rows.append({"name": f"{line.name} FAILED", "value": 0.0, "unit": "GB/s", "target": "> 0"})
    return rows
