"""A real daemon on a journal that is torn, damaged, or damaged and given up: what its log and its client are told."""

from pathlib import Path

from tests.e2e.daemon.helpers import Client, start_and_fail
from tests.rigs.procs import Processes

from hicache_proto import api, control
from hicache_proto.model import TargetState
from hicache_sidecar.store.journal import JOURNAL_NAME, Journal


def written(root: Path) -> Path:
    """A journal of three attaches in ``root/state``; the path of its file."""
    none = TargetState(prefetch_policy="best_effort", write_policy="write_through")
    journal = Journal.open(root / "state")
    for n in (1, 2, 3):
        target = TargetState(backend="file", extra_config=f'{{"file_storage_path": "/srv/{n}"}}')
        journal.begin(n=n, operation_id=f"op-{n}", kind="attach", a=none, b=target, participants=[0])
        journal.outcome_b(n)
    journal.close()
    return root / "state" / JOURNAL_NAME


def revisions(path: str) -> list[int]:
    with Client(path) as client:
        answer = client.ask(api.HistoryRequest())
    assert isinstance(answer, control.Result)
    return [row["revision"] for row in answer.document["revisions"]]


def test_damage_stops_the_start_and_names_the_way_out(processes: Processes) -> None:
    """A record in the middle does not verify: no start, the reason, and the flag that goes on without it."""
    file = written(processes.root)
    data = bytearray(file.read_bytes())
    data[len(data.rstrip(b"\0")) // 2] ^= 1
    file.write_bytes(data)
    flags = ["--runtime-dir", str(processes.root / "run"), "--state-dir", str(processes.root / "state"), "--http", ""]
    refused = start_and_fail(processes.root, *flags)
    assert refused.returncode == 1
    assert f"journal {file} is damaged at byte" in refused.stderr
    assert "--recover" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert file.read_bytes() == data, "a refused start leaves the file as it was"

    sidecar = processes.sidecar("--recover")
    assert "damage at byte" in sidecar.process.text()
    assert len(list((processes.root / "state").glob(f"{JOURNAL_NAME}.damaged-*"))) == 1
    assert revisions(sidecar.socket) in ([1], [1, 2]), "what was before the damage is known, nothing after it"


def test_a_torn_last_record_is_cut_and_said(processes: Processes) -> None:
    """The power went while the last outcome was written: the rest holds, and the log says what was cut."""
    file = written(processes.root)
    data = file.read_bytes()
    end = len(data.rstrip(b"\0"))
    file.write_bytes(data[: end - 9] + bytes(len(data) - end + 9))
    sidecar = processes.sidecar()
    assert "torn last record" in sidecar.process.text()
    assert revisions(sidecar.socket) == [1, 2]
