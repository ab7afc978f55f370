"""Opening the journal's file and writing it anew: new file, fsync, rename, fsync of the directory.

A crash at any step leaves either the old file or the new one under the name ``journal``, both complete and saying
the same. ``journal.new`` is never read: a left-over is removed. Damage is kept beside it as ``journal.damaged-…``.
"""

import errno
from pathlib import Path

import msgspec

from hicache_sidecar.store import frames
from hicache_sidecar.store.disk import Disk
from hicache_sidecar.store.errors import JournalCorrupt, JournalFailed, JournalFull
from hicache_sidecar.store.ledger import Illogical, Ledger
from hicache_sidecar.store.records import Snapshot, decode, encode

JOURNAL_NAME = "journal"
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

OUTCOME_RESERVE_BYTES = 16 * 1024  # what an answer takes, ranks aside
OUTCOME_RESERVE_PER_RANK_BYTES = 512  # one rank's row in the answer, with a long message


class Opened(msgspec.Struct):
    """A journal file ready for appending: ``end`` is the offset of the next frame, ``seq`` the last frame's number.

    ``found`` is one sentence for the log about what was there.
    """

    path: Path
    fd: int
    end: int
    seq: int
    ledger: Ledger
    found: str = ""


def outcome_reserve_bytes(ranks: int) -> int:
    """Space kept free behind a BEGIN, so that its outcome never meets a full disk."""
    return OUTCOME_RESERVE_BYTES + OUTCOME_RESERVE_PER_RANK_BYTES * ranks


def open_file(root: Path, *, recover: bool, disk: Disk, at: str) -> Opened:
    """Read ``root/journal``, or start one. The directory is locked by the caller. Raises as ``Journal.open``."""
    path = root / JOURNAL_NAME
    try:
        disk.remove(_new_name(path))
        if not path.exists():
            opened = rewrite(path, Ledger(), disk=disk, at=at)
            opened.found = "no journal was there: a new one was started"
            return opened
        fd = disk.open(path)
        try:
            opened = _read(path, fd, recover=recover, disk=disk, at=at)
        except BaseException:
            disk.close(fd)
            raise
        if opened.fd != fd:
            disk.close(fd)
        return opened
    except OSError as exc:
        raise JournalFailed(path, exc.strerror or str(exc)) from exc


def _read(path: Path, fd: int, *, recover: bool, disk: Disk, at: str) -> Opened:
    data = disk.read(fd)
    found = frames.scan(data)
    ledger, bad_at, why = replay(found)
    if why:
        if not recover:
            raise JournalCorrupt(path, bad_at, why)
        kept = _keep_damaged(path, data, disk=disk, at=at)
        ledger.recovered = kept.name
        opened = rewrite(path, ledger, disk=disk, at=at)
        opened.found = f"damage at byte {bad_at} ({why}); the damaged file is kept as {kept.name}"
        return opened
    text = f"{len(found.payloads)} records read"
    if found.torn:
        text += f"; a torn last record of {found.torn} bytes was cut"
    try:
        opened = rewrite(path, ledger, disk=disk, at=at)
    except JournalFull as exc:
        _keep_in_place(fd, data, found, disk)
        return Opened(path, fd, found.end, len(found.payloads), ledger, f"{text}; not compacted: {exc.message}")
    opened.found = text
    return opened


def replay(found: frames.Scan) -> tuple[Ledger, int, str]:
    """(the fold of all good records, offset of the first bad one, why it is bad or "")."""
    ledger = Ledger()
    for offset, payload in zip(found.offsets, found.payloads, strict=True):
        try:
            record = decode(payload)
            if isinstance(record, Snapshot) != (offset == found.offsets[0]):
                return ledger, offset, "a file has one snapshot, as its first record"
            ledger.apply(record)
        except msgspec.MsgspecError:  # its text may quote content, which may hold secrets
            return ledger, offset, "a record verifies, but this version cannot read it"
        except Illogical as exc:
            return ledger, offset, str(exc)
    if not found.damage and not found.offsets:
        return ledger, found.end, "the first snapshot is missing"
    return ledger, found.damage_at, found.damage


def rewrite(path: Path, ledger: Ledger, *, disk: Disk, at: str) -> Opened:
    """Put a new file with ``ledger``'s snapshot, and its pending BEGIN with reserve, in the place of ``path``.

    Raises:
        JournalFull: no space; ``path`` is as it was.
        JournalFailed: anything else; either file may be there, each is complete.
    """
    blob = frames.MAGIC + frames.frame(1, encode(ledger.snapshot(at)))
    seq, room = 1, 0
    if ledger.pending is not None:
        blob += frames.frame(2, encode(ledger.pending))
        seq, room = 2, outcome_reserve_bytes(len(ledger.pending.participants))
    new = _new_name(path)
    fd = -1
    try:
        fd = disk.create(new)
        disk.reserve(fd, 0, len(blob) + room)
        disk.write(fd, blob + bytes(room), 0)
        disk.sync(fd)
    except OSError as exc:
        if fd >= 0:
            disk.close(fd)
        _remove_quietly(new, disk)
        if exc.errno in _NO_SPACE:
            raise JournalFull(path, exc.strerror or str(exc)) from exc
        raise JournalFailed(path, exc.strerror or str(exc)) from exc
    try:
        disk.rename(new, path)
        disk.sync_dir(path.parent)
    except OSError as exc:
        disk.close(fd)
        raise JournalFailed(path, exc.strerror or str(exc)) from exc
    return Opened(path, fd, len(blob), seq, ledger)


def _new_name(path: Path) -> Path:
    return path.with_name(path.name + ".new")


def _remove_quietly(path: Path, disk: Disk) -> None:
    try:
        disk.remove(path)
    except OSError:
        return  # the next open empties it


def _keep_damaged(path: Path, data: bytes, *, disk: Disk, at: str) -> Path:
    """A copy, made durable before the journal is replaced: there is no moment without a file named ``journal``."""
    stamp = "".join(c for c in at if c.isalnum())
    kept = path.with_name(f"{path.name}.damaged-{stamp}")
    count = 0
    while kept.exists():
        count += 1
        kept = path.with_name(f"{path.name}.damaged-{stamp}-{count}")
    fd = disk.create(kept)
    try:
        disk.write(fd, data, 0)
        disk.sync(fd)
    except OSError as exc:
        _remove_quietly(kept, disk)
        if exc.errno in _NO_SPACE:
            raise JournalFull(path, exc.strerror or str(exc)) from exc
        raise
    finally:
        disk.close(fd)
    return kept


def _keep_in_place(fd: int, data: bytes, found: frames.Scan, disk: Disk) -> None:
    """The disk is too full for a copy: go on with the old file.

    Its records are written over themselves, so that the fsync is one of dirty pages (see ``journal.py``), and a
    torn tail is zeroed rather than cut, since the space behind a pending BEGIN belongs to its outcome.
    """
    disk.write(fd, data[: found.end] + bytes(found.torn), 0)
    disk.sync(fd)
