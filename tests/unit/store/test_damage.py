"""Torn tails and damage: the first are cut, the second is never passed over in silence."""

import itertools
from pathlib import Path

import pytest
from tests.unit.store.disks import FILE, NIXL, begin, commit

from hicache_sidecar.store import frames, ledger
from hicache_sidecar.store.errors import JournalCorrupt
from hicache_sidecar.store.journal import Journal


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A closed journal: snapshot, two whole operations and a BEGIN, with reserve behind."""
    journal = Journal.open(tmp_path)
    commit(journal, 1, FILE, request_key="k1")
    journal.quarantine("abc", "died")
    commit(journal, 2, NIXL)
    begin(journal, 3, FILE)
    journal.close()
    return tmp_path


def content(root: Path) -> bytes:
    return (root / "journal").read_bytes()


def opens_like(root: Path, data: bytes, records: int) -> str:
    """Write ``data``, open, and check that exactly the first ``records`` records count. Returns what was found."""
    (root / "journal").write_bytes(data)
    wanted, _, why = _replayed(data, records)
    assert not why
    journal = Journal.open(root)
    try:
        assert ledger.same(journal._ledger, wanted)
        return journal.found
    finally:
        journal.close()


def _replayed(data: bytes, records: int) -> tuple[ledger.Ledger, int, str]:
    from hicache_sidecar.store.snapshot import replay

    found = frames.scan(data)
    kept = frames.Scan(found.payloads[:records], found.offsets[:records], 0)
    return replay(kept)


def test_a_tail_torn_at_any_byte_is_cut(root: Path) -> None:
    """Whatever part of the last write reached the disk, with the space behind it reserved (zeros) or not there."""
    data = content(root)
    found = frames.scan(data)
    assert not found.damage
    assert len(found.payloads) == 7
    start, stop = found.offsets[-1], found.end
    for cut in range(start, stop):
        zeros = data[:cut] + bytes(len(data) - cut)
        for torn in (zeros, data[:cut]):
            again = frames.scan(torn)
            assert not again.damage, (cut, again.damage)
            assert len(again.payloads) == 6
            assert again.torn == len(torn[start:].rstrip(b"\0"))
    for cut in (start, start + 1, start + 31, start + 40, stop - 5, stop - 1):  # the whole way, for some
        said = opens_like(root, data[:cut], 6)
        assert ("cut" in said) == (cut > start)
        opens_like(root, data[:cut] + bytes(len(data) - cut), 6)


def test_sectors_that_were_written_out_of_order_are_a_torn_tail(tmp_path: Path) -> None:
    """A disk may write the last sector of a record before the first: that is a tear, not damage."""
    journal = Journal.open(tmp_path)
    begin(journal, 1)
    journal.outcome_b(1, {"text": "y" * 3000})
    journal.close()
    data = content(tmp_path)
    found = frames.scan(data)
    start, stop = found.offsets[-1], found.end
    edges = [start, *range((start // 512 + 1) * 512, stop, 512), stop]
    for left, right in itertools.pairwise(edges):
        torn = frames.scan(data[:left] + bytes(right - left) + data[right:])
        assert not torn.damage
        assert len(torn.payloads) == 2
        assert torn.torn


def test_a_flipped_bit_in_any_byte_is_damage(root: Path) -> None:
    """In every record, the last one too: it was complete, so somebody may have acted on it."""
    data = content(root)
    whole = frames.scan(data)
    for at in range(whole.end):
        for bit in (0, 3, 7):
            flipped = data[:at] + bytes([data[at] ^ (1 << bit)]) + data[at + 1 :]
            found = frames.scan(flipped)
            assert found.damage, (at, bit)
            assert found.payloads == whole.payloads[: len(found.payloads)]
            assert not found.payloads or found.damage_at <= at


def test_damage_stops_the_start_and_says_where(root: Path) -> None:
    """The error names file, offset and --recover, quotes no content, and leaves the file alone."""
    data = bytearray(content(root))
    offset = frames.scan(bytes(data)).offsets[3]
    data[offset + 40] ^= 4
    (root / "journal").write_bytes(data)
    for _ in range(2):  # a second start says the same
        with pytest.raises(JournalCorrupt) as caught:
            Journal.open(root)
        assert caught.value.offset == offset
        assert str(root / "journal") in caught.value.message
        assert str(offset) in caught.value.message
        assert "--recover" in caught.value.hint
        assert "s3cret" not in repr(caught.value.body())
        assert content(root) == bytes(data)


def test_recover_keeps_the_damaged_file_and_goes_on(root: Path) -> None:
    """--recover: the records before the damage count, nothing is thrown away, and the next start is a normal one."""
    data = bytearray(content(root))
    found = frames.scan(bytes(data))
    data[found.offsets[4] + 50] ^= 1  # BEGIN of 2
    (root / "journal").write_bytes(data)
    journal = Journal.open(root, recover=True)
    assert journal.desired == (FILE, 1)
    assert journal.pending is None
    assert journal.quarantined == {"abc": "died"}
    kept = [p for p in root.iterdir() if p.name.startswith("journal.damaged-")]
    assert len(kept) == 1
    assert kept[0].read_bytes() == bytes(data)
    assert kept[0].stat().st_mode & 0o777 == 0o600
    assert kept[0].name in journal.found
    commit(journal, journal.next_n([2, 3]), NIXL)  # the ranks show what was lost (rule 6)
    journal.close()
    again = Journal.open(root)
    assert again.desired == (NIXL, 4)
    assert again._ledger.recovered == kept[0].name
    again.close()


def test_recover_on_a_whole_file_changes_nothing(root: Path) -> None:
    """--recover left in a unit file by mistake is harmless."""
    Journal.open(root, recover=True).close()
    assert not [p for p in root.iterdir() if "damaged" in p.name]


@pytest.mark.parametrize(
    ("data", "why"),
    [(b"", "empty"), (bytes(4096), "empty"), (b"hicache journal 2\n", "version 1"), (b"#!/bin/sh\n", "version 1")],
)
def test_a_file_that_is_no_journal(tmp_path: Path, data: bytes, why: str) -> None:
    """A journal is put in place complete: an empty file, or another one, is damage and not a fresh start."""
    (tmp_path / "journal").write_bytes(data)
    with pytest.raises(JournalCorrupt, match=why):
        Journal.open(tmp_path)
    journal = Journal.open(tmp_path, recover=True)
    assert journal.desired is None
    journal.close()


def test_a_missing_or_repeated_record_is_damage(root: Path) -> None:
    """Each frame is numbered: frames that verify but do not follow each other are not believed."""
    data = content(root)
    found = frames.scan(data)
    a, b, c = found.offsets[2], found.offsets[3], found.offsets[4]
    for wrong in (data[:a] + data[b:], data[:b] + data[a:b] + data[b:], data[:a] + data[b:c] + data[a:b] + data[c:]):
        (root / "journal").write_bytes(wrong)
        with pytest.raises(JournalCorrupt, match="stands where"):
            Journal.open(root)


def test_records_that_cannot_follow_each_other_are_damage(tmp_path: Path) -> None:
    """An outcome without BEGIN verifies and is numbered right, and is refused all the same."""
    from hicache_sidecar.store.records import Outcome, Snapshot, encode

    lone = frames.frame(1, encode(Snapshot())) + frames.frame(2, encode(Outcome(n=1, b=True, revision=1)))
    (tmp_path / "journal").write_bytes(frames.MAGIC + lone)
    with pytest.raises(JournalCorrupt, match="OUTCOME of n=1"):
        Journal.open(tmp_path)
    unknown = frames.frame(1, encode(Snapshot())) + frames.frame(2, b"\x81\xa4type\xa6future")
    (tmp_path / "journal").write_bytes(frames.MAGIC + unknown)
    with pytest.raises(JournalCorrupt, match="cannot read it"):
        Journal.open(tmp_path)
    (tmp_path / "journal").write_bytes(frames.MAGIC)
    with pytest.raises(JournalCorrupt, match="snapshot is missing"):
        Journal.open(tmp_path)
