"""Crashes and failing disks at every call that the journal makes."""

import errno
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.unit.store.disks import DETACHED, FILE, NIXL, PowerDisk, Stopped, StoppingDisk, begin, commit

from hicache_sidecar.store import frames, ledger
from hicache_sidecar.store import journal as journal_module
from hicache_sidecar.store.errors import JournalFailed, JournalFull
from hicache_sidecar.store.journal import Journal


def abandon(journal: Journal) -> None:
    """What the kernel does for a dead process: descriptor and lock are gone, nothing is written."""
    journal._failed = None
    journal.close()


def open_dead(root: Path, disk: StoppingDisk) -> None:
    with pytest.raises(Stopped):
        Journal.open(root, disk=disk)


@pytest.mark.parametrize("partly", [False, True])
def test_a_crash_at_any_step_of_a_snapshot_loses_nothing(tmp_path: Path, partly: bool) -> None:
    """New file, write, fsync, rename, fsync of the directory: whichever is the last, the journal says the same."""
    journal = Journal.open(tmp_path)
    commit(journal, 1, FILE)
    begin(journal, 2, NIXL)
    before = journal._ledger.copy()
    journal.close()
    counting = StoppingDisk(None)
    Journal.open(tmp_path, disk=counting).close()
    assert counting.calls == ["create", "reserve", "write", "sync", "rename", "sync_dir"]
    for step in range(len(counting.calls)):
        open_dead(tmp_path, StoppingDisk(step, partly=partly))
        again = Journal.open(tmp_path)
        assert ledger.same(again._ledger, before), counting.calls[step]
        again.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["journal", "lock"]


@pytest.mark.parametrize("partly", [False, True])
@pytest.mark.parametrize("what", ["begin", "outcome_b", "outcome_a", "adopt"])
def test_a_crash_at_any_step_of_a_record_leaves_it_or_nothing(tmp_path: Path, what: str, partly: bool) -> None:
    """The record is there whole, or not at all; all before it is untouched."""
    writes: dict[str, Callable[[Journal], object]] = {
        "begin": lambda j: begin(j, 2, NIXL),
        "outcome_b": lambda j: j.outcome_b(1, {"success": True}),
        "outcome_a": lambda j: j.outcome_a(1, {"success": False}),
        "adopt": lambda j: j.adopt(NIXL, 1, 1),
    }
    seen = set()
    for step in range(8):
        root = tmp_path / f"{step}"
        journal = Journal.open(root)
        begin(journal, 1, FILE)
        if what in ("begin", "adopt"):
            journal.outcome_b(1)
        before = journal._ledger.copy()
        disk = StoppingDisk(step, partly=partly)
        journal._disk = disk
        try:
            writes[what](journal)
        except Stopped:
            abandon(journal)
        else:
            journal.close()
            assert step >= len(disk.calls)
            break
        again = Journal.open(root)
        done = not ledger.same(again._ledger, before)
        assert done == (disk.calls[-1] == "sync")  # before the fsync the page cache has it, before that nobody
        seen.add(done)
        again.close()
    assert seen == {True, False}


def test_what_was_never_fsynced_does_not_count_after_a_power_cut(tmp_path: Path) -> None:
    """kill -9 between write and fsync, restart, power cut: a record that the restart read is durable by then.

    Else recovery would act on an OUTCOME that the power cut takes away again (rule 1).
    """
    root = tmp_path / "state"
    disk = PowerDisk()
    journal = Journal.open(root, disk=disk)
    begin(journal, 1, FILE)
    journal._disk = StoppingDisk(0, only="sync")
    with pytest.raises(Stopped):
        journal.outcome_b(1)
    abandon(journal)
    lost = Journal.open(disk.power_cut(root, tmp_path / "cut-before-restart"))
    assert lost.desired is None
    assert lost.pending is not None
    lost.close()
    again = Journal.open(root, disk=disk)
    assert again.desired == (FILE, 1)  # it is in the page cache, so it is read ...
    kept = Journal.open(disk.power_cut(root, tmp_path / "cut-after-restart"))
    assert kept.desired == (FILE, 1)  # ... and was made durable before anybody could act on it
    kept.close()
    again.close()


def test_a_failed_fsync_of_the_outcome_ends_the_journal(tmp_path: Path) -> None:
    """The pages count as clean after the error: only a file written anew proves anything. All later calls fail."""
    root = tmp_path / "state"
    disk = PowerDisk()
    journal = Journal.open(root, disk=disk)
    begin(journal, 1, FILE)
    disk.fail_sync = True
    with pytest.raises(JournalFailed):
        journal.outcome_b(1)
    disk.fail_sync = False
    for call in (lambda: journal.outcome_b(1), lambda: journal.outcome_a(1), lambda: journal.quarantine("d", "w")):
        with pytest.raises(JournalFailed):
            call()
    assert journal.desired is None  # nothing is believed that is not known to be on disk
    journal.close()
    again = Journal.open(root, disk=disk)
    survived = Journal.open(disk.power_cut(root, tmp_path / "cut"))
    assert survived.desired == again.desired == (FILE, 1)
    survived.close()
    again.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("call", ["reserve", "write"])
def test_a_full_disk_at_begin_changes_nothing(tmp_path: Path, call: str, code: int) -> None:
    """Disk full at BEGIN: refused before anything moved; the file is byte for byte as before."""
    journal = Journal.open(tmp_path)
    commit(journal, 1, FILE)
    size = (tmp_path / "journal").stat().st_size
    before = (tmp_path / "journal").read_bytes()
    end = journal._end
    journal._end = size  # as if the reserve had been used up
    journal._disk = StoppingDisk(0, error=code, only=call)
    with pytest.raises(JournalFull) as caught:
        begin(journal, 2, NIXL)
    assert caught.value.retryable
    assert caught.value.details["reason"] == "disk_full"
    assert (tmp_path / "journal").read_bytes() == before
    assert journal.pending is None
    journal._end = end
    begin(journal, 2, NIXL)  # space came back
    journal.outcome_b(2)
    journal.close()


def test_a_full_disk_at_a_snapshot_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No space for a new file: the old one serves on, and BEGIN itself says if it cannot grow."""
    journal = Journal.open(tmp_path)
    commit(journal, 1, FILE)
    monkeypatch.setattr(journal_module, "COMPACT_BYTES", 0)
    journal._base = 0
    journal._disk = StoppingDisk(0, error=errno.ENOSPC)  # the create of journal.new
    begin(journal, 2, NIXL)
    journal.outcome_b(2)
    journal.close()
    again = Journal.open(tmp_path)
    assert again.desired == (NIXL, 2)
    again.close()


def test_a_disk_error_at_a_snapshot_ends_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """EIO is not ENOSPC: the disk is not to be trusted with a BEGIN."""
    journal = Journal.open(tmp_path)
    commit(journal, 1, FILE)
    monkeypatch.setattr(journal_module, "COMPACT_BYTES", 0)
    journal._base = 0
    journal._disk = StoppingDisk(0, error=errno.EIO, only="sync")
    with pytest.raises(JournalFailed):
        begin(journal, 2, NIXL)
    with pytest.raises(JournalFailed):
        begin(journal, 2, NIXL)
    journal.close()
    again = Journal.open(tmp_path)
    assert again.desired == (FILE, 1)
    assert again.pending is None
    again.close()


def test_an_answer_too_large_for_a_full_disk_is_left_out(tmp_path: Path) -> None:
    """The decision matters, the wording of its answer does not: B is recorded without it."""
    journal = Journal.open(tmp_path)
    begin(journal, 1, FILE, request_key="k", body_digest="d")
    journal._disk = StoppingDisk(0, error=errno.ENOSPC, only="reserve")
    journal.outcome_b(1, {"text": "x" * 100_000})
    assert journal.answer_for("k") == ("d", None)
    journal.close()
    again = Journal.open(tmp_path)
    assert again.desired == (FILE, 1)
    again.close()


def test_a_full_disk_at_the_start(tmp_path: Path) -> None:
    """A daemon must start on a full disk, and keep the room that a pending BEGIN has for its outcome."""
    journal = Journal.open(tmp_path)
    commit(journal, 1, FILE)
    begin(journal, 2, NIXL)
    journal.close()
    size = (tmp_path / "journal").stat().st_size
    journal = Journal.open(tmp_path, disk=StoppingDisk(0, error=errno.ENOSPC, only="reserve"))
    assert "not compacted" in journal.found
    assert (tmp_path / "journal").stat().st_size == size
    journal.outcome_b(2)
    journal.close()
    again = Journal.open(tmp_path)
    assert again.desired == (NIXL, 2)
    again.close()


def test_a_torn_tail_on_a_full_disk(tmp_path: Path) -> None:
    """Both at once: the tail is zeroed in place, and the outcome still fits."""
    journal = Journal.open(tmp_path)
    begin(journal, 1, FILE)
    journal._disk = StoppingDisk(0, only="write", partly=True)
    with pytest.raises(Stopped):
        journal.outcome_b(1, {"text": "z" * 3000})
    abandon(journal)
    journal = Journal.open(tmp_path, disk=StoppingDisk(0, error=errno.ENOSPC, only="reserve"))
    assert "torn" in journal.found
    assert journal.pending is not None
    journal.outcome_b(1)
    journal.close()
    again = Journal.open(tmp_path)
    assert again.desired == (FILE, 1)
    again.close()


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """A real filesystem of 256 KiB."""
    root = tmp_path / "tiny"
    root.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k,mode=0700", "tmpfs", str(root)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {done.stderr.strip()}")
    try:
        yield root
    finally:
        subprocess.run(["umount", "-l", str(root)], check=True)


@pytest.mark.needs_root
def test_a_really_full_filesystem(tiny: Path) -> None:
    """Fill it between BEGIN and OUTCOME: the outcome fits; the next BEGIN is refused and nothing changes."""
    root = tiny / "state"
    journal = Journal.open(root)
    begin(journal, 1, FILE)
    filler = tiny / "filler"
    with pytest.raises(OSError, match="No space"), filler.open("wb", buffering=0) as out:
        while True:
            out.write(bytes(4096))
    journal.outcome_b(1, {"success": True, "text": "t" * 8000})
    before = (root / "journal").read_bytes()
    with pytest.raises(JournalFull):
        journal.begin(n=2, operation_id="o", kind="detach", a=FILE, b=DETACHED, participants=range(64))
    assert (root / "journal").read_bytes() == before
    assert journal.pending is None
    journal.close()
    journal = Journal.open(root)  # it starts on the full filesystem too
    assert journal.desired == (FILE, 1)
    filler.unlink()
    commit(journal, 2, DETACHED)
    journal.close()
    again = Journal.open(root)
    assert again.desired == (DETACHED, 2)
    again.close()


KILLED = """
import sys
from pathlib import Path
from hicache_proto.model import TargetState
from hicache_sidecar.store.journal import Journal
journal = Journal.open(sys.argv[1])
n = journal.next_n()
while True:
    journal.begin(n=n, operation_id="o", kind="attach", a=TargetState(), b=TargetState(backend=f"b{n}"),
                  participants=(0, 1))
    print("begin", n, flush=True)
    journal.outcome_b(n, {"pad": "p" * (n * 37 % 5000)})
    print("b", n, flush=True)
    n += 1
"""


def test_kill_at_any_moment_loses_nothing_that_was_said(tmp_path: Path) -> None:
    """SIGKILL a writing process again and again: what it reported as durable is there, in order, unbroken."""
    for round_ in range(6):
        child = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True, bufsize=1
        )
        assert child.stdout is not None
        said: list[tuple[str, int]] = []
        for line in child.stdout:
            what, n = line.split()
            said.append((what, int(n)))
            if len(said) == 20 + 7 * round_:
                child.kill()
                break
        said += [(line.split()[0], int(line.split()[1])) for line in child.stdout if len(line.split()) == 2]
        child.stdout.close()
        child.wait()
        what, n = said[-1]
        journal = Journal.open(tmp_path)
        if what == "b":
            assert journal.desired is not None
            assert journal.desired[1] >= n
        else:
            held = journal.pending.n if journal.pending else 0
            assert held == n or (journal.desired is not None and journal.desired[1] == n)
        if journal.pending is not None:
            journal.outcome_a(journal.pending.n)
        assert journal.desired is not None
        assert journal.desired[0].backend == f"b{journal.desired[1]}"
        journal.close()


def test_frames_of_any_size_come_back() -> None:
    """Empty, tiny and large payloads, back to back."""
    payloads = [b"", b"\0", b"END", frames.MAGIC, b"HJR\xa5" * 10, bytes(range(256)) * 300]
    data = frames.MAGIC + b"".join(frames.frame(i + 1, p) for i, p in enumerate(payloads)) + bytes(999)
    found = frames.scan(data)
    assert found.payloads == payloads
    assert not found.damage
    assert not found.torn
    assert found.end == len(data) - 999
