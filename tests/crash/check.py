"""What must be true after recovery: one state, the journal's, everywhere; admission open; nothing left behind."""

import os
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.crash.stand import DP, Stand

from hicache_hooks.helpers import IDLE_NAME
from hicache_proto.errors import HicacheError
from hicache_sidecar.store.journal import Journal

RECOVERY_S = 60.0  # one in-doubt lease, a convergence and its pause, on a busy machine
REST_S = 15.0  # for threads and sockets of what ended; libzmq reaps in the background
SIDECAR_THREADS = 3  # the loop, and libzmq's two; trio ends a worker thread that had no work for 10 s
PAGES_PER_SET = 8


def remember(stand: Stand) -> None:
    """The stand at rest and detached: what every later count is compared with."""
    deadline = time.monotonic() + REST_S
    facts = [rank.process.facts() for rank in stand.ranks]
    while len({(f["fds"], f["tasks"], tuple(f["threads"])) for f in facts}) > 1 and time.monotonic() < deadline:
        time.sleep(0.1)
        facts = [rank.process.facts() for rank in stand.ranks]
    stand.base = {name: facts[0][name] for name in ("fds", "tasks", "threads")}
    stand.base["sidecar_fds"] = min((_paced_descriptors(stand) for _ in range(5)), key=len)  # without our own requests
    stand.base["files"] = files_of(stand.root)


def settle(stand: Stand) -> tuple[str, dict[str, Any]]:
    """Wait until nothing runs, all ranks report one state without drift, and all admit.

    Returns:
        Problems as text (empty when settled), and the last status.
    """
    deadline = time.monotonic() + RECOVERY_S
    while True:
        why, document = _unsettled(stand)
        if not why or time.monotonic() > deadline:
            return why, document
        time.sleep(0.05)


def _unsettled(stand: Stand) -> tuple[str, dict[str, Any]]:
    code, ready = stand.admin("GET", "/readyz", timeout_s=5)
    if code != 200:
        return f"not ready: {ready}", {}
    if phase := stand.phase():
        return f"an operation is in {phase}", {}
    document = stand.status()
    ranks = document.get("ranks", [])
    if document.get("state") not in ("attached", "detached") or document["drift"] or len(ranks) != DP:
        return f"status: {document}", document
    seen = {(r["hicache_storage_backend"], r["state"]) for r in ranks}
    if len(seen) > 1:
        return f"ranks differ: {seen}", document
    for number, rank in enumerate(stand.ranks):
        facts = rank.process.facts()
        report = facts["report"]
        if not facts["connected"]:
            return f"rank {number} is not connected", document
        if report["op_phase"] not in ("", "none") or not facts["open"] or facts["held"] or report["state"]["bypass"]:
            return f"rank {number} is in {report['op_phase']}, open {facts['open']}, held {facts['held']}", document
    return "", document


def problems(stand: Stand, document: dict[str, Any], wanted: dict[str, str | None]) -> tuple[str, list[str]]:
    """The outcome's letter and everything that is wrong, after ``settle``.

    Args:
        wanted: the extra config of A and of B (None: detached).
    """
    letter, found = journal_says(stand, wanted)
    configs = set()
    for number, rank in enumerate(stand.ranks):
        facts = rank.process.facts()
        state = facts["report"]["state"]
        configs.add((state["backend"], state["extra_config"]))
        if facts["admitted"] != rank.sent:
            found.append(f"rank {number} admitted {facts['admitted']} of {rank.sent} requests")
    expected = wanted.get(letter)
    if {config for _, config in configs} != {expected} or len(configs) != 1:
        found.append(f"ranks run {configs}, the journal says {letter}: {expected}")
    return letter, found + _leaks(stand, attached=document["state"] == "attached")


def journal_says(stand: Stand, wanted: dict[str, str | None]) -> tuple[str, list[str]]:
    """Read a copy of the journal: the letter of the desired state, and what is wrong with it."""
    with tempfile.TemporaryDirectory(dir=stand.root) as folder:
        try:
            journal = Journal.open(stand.journal_copy(Path(folder) / "state"))
        except HicacheError as error:
            return "", [f"the journal cannot be read: {error.message}"]
        return _judge(journal, wanted)


def _judge(journal: Journal, wanted: dict[str, str | None]) -> tuple[str, list[str]]:
    try:
        found = [] if journal.pending is None else [f"operation {journal.pending.n} is pending in the journal"]
        desired = journal.desired
        config = desired[0].extra_config if desired is not None and desired[0].backend is not None else None
        letters = [letter for letter, one in wanted.items() if one == config]
        return (letters[0], found) if letters else ("", [*found, f"the journal desires {desired}"])
    finally:
        journal.close()


def _leaks(stand: Stand, *, attached: bool) -> list[str]:
    """Poll until nothing is left over, or the time is up: then say what is."""
    deadline = time.monotonic() + REST_S
    while True:
        found = _left(stand, attached)
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


def _left(stand: Stand, attached: bool) -> list[str]:
    found = []
    base, more = stand.base, int(attached)
    for number, rank in enumerate(stand.ranks):
        facts = rank.process.facts()
        idle = facts["threads"].count(IDLE_NAME)  # ends by itself, after a time that no cell waits for
        threads = [name for name in facts["threads"] if name != IDLE_NAME and not name.startswith("light-worker-")]
        workers = len(facts["threads"]) - idle - len(threads)
        parts = len(list((stand.root / "scratch").glob(f"{rank.process.pid}-*")))
        for what, have, want in (
            ("threads", threads, base["threads"]),
            ("workers", workers, more),
            ("kernel threads", facts["tasks"] - idle, base["tasks"] + more),
            ("descriptors", facts["fds"], base["fds"] + more),
            ("temporary files", parts, more),
            ("pages", sum(facts["pages"].values()), PAGES_PER_SET * more),
        ):
            if have != want:
                found.append(f"rank {number}: {what}: {have}, expected {want}")
    have_fds = _descriptors(stand.sidecar.process.pid)
    if len(have_fds) > len(base["sidecar_fds"]):
        found.append(f"sidecar: {len(have_fds)} descriptors, expected {len(base['sidecar_fds'])}: {have_fds}")
    if (files := files_of(stand.root)) != base["files"]:
        found.append(f"files {files}, expected {base['files']}")
    return found


def threads_at_rest(stand: Stand) -> str:
    """The sidecar's threads once it had nothing to do for a while: what is wrong, or nothing. Takes some 10 s."""
    tasks = Path(f"/proc/{stand.sidecar.process.pid}/task")
    deadline = time.monotonic() + 2 * REST_S
    while (have := len(os.listdir(tasks))) > SIDECAR_THREADS and time.monotonic() < deadline:
        time.sleep(0.1)
    return "" if have <= SIDECAR_THREADS else f"sidecar: {have} threads at rest, expected {SIDECAR_THREADS}"


def _paced_descriptors(stand: Stand) -> list[str]:
    time.sleep(0.05)  # a closed connection leaves in its own time; the smallest of several looks counts
    return _descriptors(stand.sidecar.process.pid)


def _descriptors(pid: int) -> list[str]:
    folder = Path(f"/proc/{pid}/fd")
    found = []
    for entry in os.listdir(folder):
        try:
            found.append(os.readlink(folder / entry).partition(":")[0])
        except FileNotFoundError:
            continue
    return sorted(found)


def files_of(root: Path) -> list[str]:
    """What lies in the sidecar's runtime and state directories."""
    return sorted(f"{name}/{entry}" for name in ("run", "state") for entry in os.listdir(root / name))
