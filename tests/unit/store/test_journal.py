"""The journal by its public methods: what is remembered over a restart, what is refused."""

import errno
import os
import shutil
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.unit.store.disks import DETACHED, FILE, NIXL, begin, commit

from hicache_sidecar.store import frames, ledger, snapshot
from hicache_sidecar.store.errors import NEVER_BEGAN, JournalFailed, JournalGone, StateDirLocked, StateDirUnsafe
from hicache_sidecar.store.journal import COMPACT_BYTES, Journal
from hicache_sidecar.store.ledger import HISTORY_ROWS, Illogical
from hicache_sidecar.store.records import ADOPTED, COMMITTED, ROLLED_BACK


def reopened(journal: Journal, root: Path) -> Journal:
    before = journal._ledger.copy()
    journal.close()
    again = Journal.open(root)
    assert ledger.same(again._ledger, before)
    return again


def test_a_new_journal_knows_nothing(tmp_path: Path) -> None:
    """First contact: no desired state, and numbers start above what the ranks showed (rule 6)."""
    journal = Journal.open(tmp_path / "state")
    assert journal.desired is None
    assert journal.pending is None
    assert journal.history == ()
    assert journal.next_n() == 1
    assert journal.next_n([3, 7]) == 8
    journal.close()


def test_a_file_that_was_removed_is_written_anew(tmp_path: Path) -> None:
    """What is fsynced into a file without a name, no start would find: secrets, history and keys would be lost."""
    journal = Journal.open(tmp_path)
    commit(journal, 1, FILE, request_key="k1", body_digest="d1")
    journal.path.unlink()
    commit(journal, 2, NIXL)
    journal = reopened(journal, tmp_path)
    assert journal.desired == (NIXL, 2)
    assert [row.n for row in journal.history] == [1, 2]
    journal.path.unlink()
    begin(journal, 3, FILE)
    journal.path.unlink()
    journal.outcome_b(3, {})  # goes where its BEGIN is: this one is known to the ranks alone
    journal.set("name", "value")
    assert reopened(journal, tmp_path).desired == (FILE, 3)


def test_a_directory_that_was_removed_is_refused_before_anything_moves(tmp_path: Path) -> None:
    root = tmp_path / "state"
    journal = Journal.open(root)
    commit(journal, 1, FILE)
    shutil.rmtree(root)
    with pytest.raises(JournalGone) as caught:
        begin(journal, 2, NIXL)
    assert caught.value.details["reason"] in NEVER_BEGAN
    assert (journal.pending, journal.last_n) == (None, 1)
    root.mkdir(mode=0o700)
    commit(journal, 2, NIXL)
    assert reopened(journal, root).desired == (NIXL, 2)


def test_everything_is_there_after_a_restart(tmp_path: Path) -> None:
    """Rules 7 and 15: desired, pending, history, answers, quarantine and settings come back as they were."""
    journal = Journal.open(tmp_path)
    journal.adopt(DETACHED, 1, 0, reason="first contact")
    commit(journal, 2, FILE, request_key="k2", body_digest="d2", actor="alice", reason="try it")
    begin(journal, 3, NIXL, request_key="k3", body_digest="d3")
    journal.outcome_a(3, {"error": {"code": "prepare_failed"}}, message="no disk", duration_ms=12.5)
    journal.quarantine("abc", "engine died under it")
    journal.quarantine("def", "and under this")
    journal.quarantine("abc", "")
    journal.set("bypass", True)
    begin(journal, 4, DETACHED, request_key="k4", body_digest="d4")

    journal = reopened(journal, tmp_path)
    assert journal.desired == (FILE, 2)
    assert journal.pending is not None
    assert (journal.pending.n, journal.pending.a, journal.pending.b) == (4, FILE, DETACHED)
    assert journal.pending.participants == (0, 1)
    assert [(row.n, row.result, row.revision) for row in journal.history] == [
        (0, ADOPTED, 1),
        (2, COMMITTED, 2),
        (3, ROLLED_BACK, 2),
    ]
    assert (journal.history[1].actor, journal.history[1].reason) == ("alice", "try it")
    assert (journal.history[2].message, journal.history[2].duration_ms) == ("no disk", 12.5)
    assert journal.answer_for("k2") == ("d2", {"success": True, "n": 2})
    assert journal.answer_for("k3") == ("d3", {"error": {"code": "prepare_failed"}})
    assert journal.answer_for("k4") == ("d4", None)
    assert journal.answer_for("k5") is None
    assert journal.answer_for("") is None
    assert journal.quarantined == {"def": "and under this"}
    assert journal.settings == {"bypass": True}
    assert journal.next_n() == 5
    journal.outcome_b(4, None)
    assert reopened(journal, tmp_path).desired == (DETACHED, 4)


DETACH_AND_DIE = """
import os, sys
from hicache_proto.model import TargetState
from hicache_sidecar.store.journal import Journal
journal = Journal.open(sys.argv[1])
a, revision = journal.desired
journal.begin(n=2, operation_id="op-2", kind="detach", a=a, b=TargetState(), participants=(0, 1))
journal.outcome_b(2, {"success": True})
os.kill(os.getpid(), 9)  # right after the decision, before any answer
"""

HOLD = """
import sys
from hicache_sidecar.store.journal import Journal
journal = Journal.open(sys.argv[1])
print("x", flush=True)
sys.stdin.read()
"""


def test_a_detach_survives_the_death_of_the_daemon(tmp_path: Path) -> None:
    """F26: the decision is durable before the command goes out; after SIGKILL the tenant stays detached."""
    journal = Journal.open(tmp_path)
    commit(journal, 1, FILE)
    journal.close()
    assert subprocess.run([sys.executable, "-c", DETACH_AND_DIE, str(tmp_path)], check=False).returncode == -9
    again = Journal.open(tmp_path)
    assert again.desired == (DETACHED, 2)
    assert again.pending is None
    again.close()


def test_an_outcome_belongs_to_the_pending_operation_alone(tmp_path: Path) -> None:
    """Rule 1: an outcome is taken once, for the pending n; a second BEGIN waits for it; n only grows (rule 6)."""
    journal = Journal.open(tmp_path)
    with pytest.raises(Illogical):
        journal.outcome_b(1)
    begin(journal, 5)
    with pytest.raises(Illogical):
        begin(journal, 6)
    with pytest.raises(Illogical):
        journal.outcome_b(4)
    with pytest.raises(Illogical):
        journal.adopt(FILE, 3, 3)
    journal.outcome_a(5)
    with pytest.raises(Illogical):
        journal.outcome_b(5)  # A was recorded: B can never be
    with pytest.raises(Illogical):
        begin(journal, 5)
    commit(journal, 6)
    assert reopened(journal, tmp_path).desired == (FILE, 6)


def test_an_adopted_revision_moves_the_counter(tmp_path: Path) -> None:
    """Rule 6: after a lost journal, numbers go on above what the ranks proved."""
    journal = Journal.open(tmp_path)
    journal.adopt(NIXL, 41, 43, reason="rank 0 proves revision 41")
    assert journal.next_n() == 44
    assert reopened(journal, tmp_path).desired == (NIXL, 41)


def test_the_file_is_bounded_and_history_is_kept(tmp_path: Path) -> None:
    """History and request keys of the last rows survive any number of snapshots; the file does not grow for ever."""
    journal = Journal.open(tmp_path)
    answer = {"success": True, "text": "x" * 4000}
    biggest = 0
    for n in range(1, 700):
        begin(journal, n, request_key=f"k{n}", body_digest=str(n))
        journal.outcome_b(n, answer)
        biggest = max(biggest, (tmp_path / "journal").stat().st_size)
    assert biggest < 4 * COMPACT_BYTES
    assert [row.n for row in journal.history] == list(range(700 - HISTORY_ROWS, 700))
    assert journal.answer_for("k499") is None
    assert journal.answer_for("k500") == ("500", answer)
    journal = reopened(journal, tmp_path)
    assert journal.answer_for("k500") == ("500", answer)
    assert not (tmp_path / "journal.new").exists()


def test_a_key_that_is_used_again_keeps_its_last_answer(tmp_path: Path) -> None:
    """A key may come back after its row fell out of the history; the newest use counts."""
    journal = Journal.open(tmp_path)
    commit(journal, 1, request_key="k", body_digest="one")
    for n in range(2, HISTORY_ROWS):
        commit(journal, n)
    commit(journal, HISTORY_ROWS, request_key="k", body_digest="two")
    commit(journal, HISTORY_ROWS + 1)  # the first row falls out
    assert journal.answer_for("k") == ("two", {"success": True, "n": HISTORY_ROWS})
    journal.close()


def test_modes_and_secrets(tmp_path: Path) -> None:
    """Directory 0700, files 0600 whatever the umask; secrets are in the file and in no text form (F94)."""
    before = os.umask(0)
    try:
        journal = Journal.open(tmp_path / "deep" / "state")
    finally:
        os.umask(before)
    commit(journal, 1, FILE)
    begin(journal, 2, FILE)
    root = tmp_path / "deep" / "state"
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert {p.name: oct(stat.S_IMODE(p.stat().st_mode)) for p in root.iterdir()} == {
        "lock": "0o600",
        "journal": "0o600",
    }
    assert b"s3cret-sentinel" in (root / "journal").read_bytes()
    shown = repr((journal.pending, journal.history, journal._ledger.desired, journal._ledger.snapshot("")))
    assert "s3cret" not in shown
    journal.close()


def test_a_lax_file_is_closed_to_others(tmp_path: Path) -> None:
    """A restored backup with mode 0644 does not stay readable."""
    journal = Journal.open(tmp_path)
    commit(journal, 1)
    journal.close()
    (tmp_path / "journal").chmod(0o644)
    Journal.open(tmp_path).close()
    assert stat.S_IMODE((tmp_path / "journal").stat().st_mode) == 0o600


def test_one_daemon_per_state_directory(tmp_path: Path) -> None:
    """Rule 15: the lock is taken before the journal is read; the message names the holder."""
    journal = Journal.open(tmp_path)
    begin(journal, 1)
    with pytest.raises(StateDirLocked, match=str(os.getpid())):
        Journal.open(tmp_path)
    journal.outcome_b(1)  # the refused opener did no harm
    journal.close()
    journal.close()
    Journal.open(tmp_path).close()


def test_the_lock_dies_with_its_process(tmp_path: Path) -> None:
    """SIGKILL leaves nothing that blocks the next start."""
    child = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.read(1) == b"x"
    with pytest.raises(StateDirLocked, match=str(child.pid)):
        Journal.open(tmp_path)
    child.kill()
    child.communicate(timeout=10)
    Journal.open(tmp_path).close()


def test_a_directory_of_others_is_refused(tmp_path: Path) -> None:
    """Naming /tmp as state directory must neither use it nor close it to everybody else."""
    (tmp_path / "theirs").write_text("x")
    tmp_path.chmod(0o777)
    with pytest.raises(StateDirUnsafe, match="0777"):
        Journal.open(tmp_path)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o777
    tmp_path.chmod(0o700)
    with pytest.raises(StateDirUnsafe):
        Journal.open(tmp_path / "theirs")


def test_an_empty_directory_with_lax_mode_is_taken_and_closed(tmp_path: Path) -> None:
    """``mkdir`` by hand gives 0755: nothing of others is in it, so it becomes 0700."""
    root = tmp_path / "made-by-hand"
    root.mkdir(mode=0o755)
    Journal.open(root).close()
    assert stat.S_IMODE(root.stat().st_mode) == 0o700


def test_a_lax_mode_that_cannot_be_changed_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory on a read-only file system: refused with its reason, not with a traceback."""
    root = tmp_path / "made-by-hand"
    root.mkdir(mode=0o755)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "chmod", refuse)
    with pytest.raises(StateDirUnsafe, match="Read-only file system"):
        Journal.open(root)


@pytest.mark.needs_root
def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    """What another uid owns, that uid can change under us."""
    root = tmp_path / "foreign"
    root.mkdir(mode=0o700)
    os.chown(root, 12345, 12345)
    with pytest.raises(StateDirUnsafe, match="12345"):
        Journal.open(root)


def test_a_symbolic_link_is_not_followed(tmp_path: Path) -> None:
    """Neither the journal nor the lock may point elsewhere."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    root = tmp_path / "state"
    root.mkdir(mode=0o700)
    (root / "journal").symlink_to(victim)
    with pytest.raises(JournalFailed):
        Journal.open(root)
    (root / "journal").unlink()
    (root / "lock").unlink()
    (root / "lock").symlink_to(victim)
    with pytest.raises(StateDirUnsafe):
        Journal.open(root)
    assert victim.read_text() == "precious"


def test_a_closed_journal_writes_nothing(tmp_path: Path) -> None:
    """Late threads of a daemon that stops meet an error, not a closed descriptor that is somebody else's by now."""
    journal = Journal.open(tmp_path)
    journal.close()
    with pytest.raises(JournalFailed, match="closed"):
        begin(journal, 1)


def test_a_left_over_new_file_is_never_read(tmp_path: Path) -> None:
    """A crash in the middle of a snapshot leaves ``journal.new``: the old file counts."""
    journal = Journal.open(tmp_path)
    commit(journal, 1)
    journal.close()
    (tmp_path / "journal.new").write_bytes(frames.MAGIC + b"garbage")
    again = Journal.open(tmp_path)
    assert again.desired == (FILE, 1)
    assert not (tmp_path / "journal.new").exists()
    again.close()


def test_room_for_the_outcome_of_many_ranks(tmp_path: Path) -> None:
    """The reserve grows with the participants: 256 ranks' rows in an answer fit what BEGIN reserved."""
    journal = Journal.open(tmp_path)
    journal.begin(n=1, operation_id="o", kind="attach", a=DETACHED, b=FILE, participants=range(256))
    size = (tmp_path / "journal").stat().st_size
    rows = [{"rank": r, "success": True, "message": "m" * 400, "stall_us": 1234} for r in range(256)]
    journal.outcome_b(1, {"ranks": rows})
    assert (tmp_path / "journal").stat().st_size == size
    assert snapshot.outcome_reserve_bytes(256) > 256 * 400
    journal.close()


def test_threads_may_write_at_once(tmp_path: Path) -> None:
    """A quarantine from one thread beside an operation in another: both are whole."""
    journal = Journal.open(tmp_path)
    threads = [threading.Thread(target=journal.quarantine, args=(f"d{i}", "why")) for i in range(8)]
    begin(journal, 1)
    for thread in threads:
        thread.start()
    journal.outcome_b(1)
    for thread in threads:
        thread.join(10)
    again = reopened(journal, tmp_path)
    assert len(again.quarantined) == 8
    assert again.desired == (FILE, 1)
    again.close()
