"""``check`` for a stand with the embedded engine: the sidecar's word, the journal, generation, threads, descriptors."""

import os
import time
from pathlib import Path
from typing import Any

from tests.crash.check import REST_S, files_of, journal_says
from tests.crash.engine_stand import DP, EngineStand

from hicache_hooks.helpers import IDLE_S

HELPERS_GONE_S = IDLE_S + 1.0
RECOVERY_S = 90.0  # a scheduler process starts torch


def remember(stand: EngineStand) -> None:
    """Counts at rest, detached and attached, after one cycle of each: what is made once is made by then."""
    for cycle in range(2):
        for name, body in (("attached", True), ("detached", False)):
            if body:
                fields = {
                    "hicache_storage_backend": "file",
                    "hicache_storage_backend_extra_config_json": stand.config(),
                }
                code, answer = stand.admin("PUT", "/hicache/storage-backend", fields)
            else:
                code, answer = stand.admin("DELETE", "/hicache/storage-backend")
            assert code == 200, answer
            assert stand.generate() == stand.reference
            if cycle:
                stand.base[name] = _stable(stand)
    stand.base["files"] = files_of(stand.root)


def _stable(stand: EngineStand) -> set[tuple[int, int]]:
    """Threads and descriptors of the ranks, once they stay the same for longer than an idle helper thread stays."""
    deadline = time.monotonic() + REST_S
    last, since = _counts(stand), time.monotonic()
    while time.monotonic() < min(since + HELPERS_GONE_S, deadline):
        time.sleep(0.1)
        if (now := _counts(stand)) != last:
            last, since = now, time.monotonic()
    return set(last)


def _counts(stand: EngineStand) -> list[tuple[int, int]]:
    return [(len(os.listdir(f"/proc/{pid}/task")), len(os.listdir(f"/proc/{pid}/fd"))) for pid in stand.pids()]


def settle(stand: EngineStand) -> tuple[str, dict[str, Any]]:
    """As ``check.settle``: ready, nothing runs, one state on both ranks, the engine answers."""
    deadline = time.monotonic() + RECOVERY_S
    while True:
        document = stand.status() if stand.is_ready() and stand.serves() else {}
        ranks = document.get("ranks", [])
        states = {(rank["hicache_storage_backend"], rank["hicache_storage_backend_extra_config"]) for rank in ranks}
        if (
            document.get("state") in ("attached", "detached")
            and not document["drift"]
            and (len(ranks), len(states)) == (DP, 1)
            and not stand.phase()
        ):
            return "", document
        if time.monotonic() > deadline:
            return f"status {document}, phase {stand.phase()!r}", document
        time.sleep(0.1)


def problems(stand: EngineStand, document: dict[str, Any], wanted: dict[str, str | None]) -> tuple[str, list[str]]:
    """As ``check.problems``; generation gives the reference's tokens on both replicas."""
    letter, found = journal_says(stand, wanted)
    config = document["ranks"][0]["hicache_storage_backend_extra_config"]
    if config != wanted.get(letter):
        found.append(f"ranks run {config}, the journal says {letter}: {wanted.get(letter)}")
    if (outputs := stand.generate()) != stand.reference:
        found.append(f"generation differs: {outputs}, before {stand.reference}")
    deadline = time.monotonic() + REST_S
    base = stand.base[document["state"]]
    while not set(_counts(stand)) <= base and time.monotonic() < deadline:
        time.sleep(0.1)
    if not set(counts := _counts(stand)) <= base:
        found.append(f"threads, descriptors by rank: {counts}, expected {base}")
    if (files := files_of(stand.root)) != stand.base["files"]:
        found.append(f"files {files}, expected {stand.base['files']}")
    parts = [str(path) for path in Path(stand.root / "stores").rglob("*") if path.is_file() and "tmp" in path.name]
    return letter, found + [f"temporary files: {parts}" for _ in parts[:1]]
