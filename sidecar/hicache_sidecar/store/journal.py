"""The journal: what was begun, what was decided, in the state directory; fsynced before anybody acts on it.

Theory of operation
===================

One file, ``journal``. It starts with a snapshot of all before it and grows by one frame per record. ``begin``
writes BEGIN together with reserved, already zeroed space for the outcome, and only then is anything sent to a rank
(F26): a full disk is met there, before anything moved, and never at the outcome. ``outcome_b`` is one overwrite of
reserved space and one fsync; after it returns, FINALIZE may be sent (rule 1). No record of an outcome means A.

Opening always writes the file anew (new file, fsync, rename, fsync of the directory) and goes on with the copy:
that cuts a torn tail, bounds the file, and makes durable what was only in the page cache: records that a killed
daemon wrote without fsync, or whose fsync failed, after which a second fsync of the same pages would prove nothing.

Errors of a write or fsync are final: every later call raises ``JournalFailed`` and the daemon ends its process.
All methods are synchronous and may be called from any thread, one at a time or not; a lock keeps them apart.
"""

import logging
import threading
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from hicache_proto.model import TargetState
from hicache_sidecar.core.faults import OFF, Faults
from hicache_sidecar.store import frames, snapshot
from hicache_sidecar.store.disk import Disk
from hicache_sidecar.store.errors import JournalFailed, JournalFull, JournalGone
from hicache_sidecar.store.lock import StateDirLock
from hicache_sidecar.store.records import (
    Adopt,
    Begin,
    Outcome,
    Quarantine,
    Record,
    Revision,
    Setting,
    encode,
)

JOURNAL_NAME = snapshot.JOURNAL_NAME
log = logging.getLogger("hicache.store")

COMPACT_BYTES = 1024 * 1024  # a file larger than twice its snapshot and this is written anew at the next BEGIN


def _point_of(record: Record) -> str:
    """The record's name among the fault points."""
    if isinstance(record, Outcome):
        return "outcome_b" if record.b else "outcome_a"
    return "begin" if isinstance(record, Begin) else ""


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


class Journal:
    """The open journal of one state directory. Make it with ``Journal.open``."""

    def __init__(self, lock: StateDirLock, opened: snapshot.Opened, disk: Disk, faults: Faults = OFF) -> None:
        self.path = opened.path
        self.found = opened.found
        self._lock, self._disk, self._faults = lock, disk, faults
        self._fd, self._end, self._seq = opened.fd, opened.end, opened.seq
        self._base = opened.end  # size right after the last snapshot
        self._ledger = opened.ledger
        self._mutex = threading.Lock()
        self._failed: JournalFailed | None = None
        self._closed = False

    @classmethod
    def open(
        cls, state_dir: Path | str, recover: bool = False, *, disk: Disk | None = None, faults: Faults = OFF
    ) -> "Journal":
        """Lock the state directory, read what is there, and write it anew.

        Args:
            state_dir: made with mode 0700 if it is not there.
            recover: on damage, keep the damaged file beside the journal and go on with the records before it.
            disk: the filesystem; tests give one that fails. faults: fault points that are to fire.

        Raises:
            StateDirUnsafe, StateDirLocked: the directory cannot be ours.
            JournalCorrupt: damage, and ``recover`` was not given.
            JournalFailed: the filesystem does not do as told.
        """
        disk = disk or Disk()
        root = Path(state_dir)
        lock = StateDirLock.take(root)
        try:
            opened = snapshot.open_file(root, recover=recover, disk=disk, at=_now())
        except BaseException:
            lock.release()
            raise
        return cls(lock, opened, disk, faults)

    # ---- what is known

    @property
    def desired(self) -> tuple[TargetState, int] | None:
        """The desired state and its revision (rule 7), or None before the first."""
        desired = self._ledger.desired
        return None if desired is None else (desired.state, desired.revision)

    @property
    def pending(self) -> Begin | None:
        """The last BEGIN, while it has no outcome."""
        return self._ledger.pending

    @property
    def history(self) -> tuple[Revision, ...]:
        """Rows of the last operations and adoptions, oldest first, at most ``ledger.HISTORY_ROWS``. With secrets."""
        return self._ledger.history

    @property
    def last_n(self) -> int:
        """The highest operation number on record."""
        return self._ledger.last_n

    @property
    def quarantined(self) -> dict[str, str]:
        """Digest of each quarantined config, and why."""
        return dict(self._ledger.quarantined)

    @property
    def settings(self) -> dict[str, Any]:
        """Durable choices beside the state, by name."""
        return dict(self._ledger.settings)

    def next_n(self, seen: Iterable[int] = ()) -> int:
        """A number for the next operation (rule 6): above all on record and all that the hellos showed."""
        return max([self._ledger.last_n, *seen]) + 1

    def answer_for(self, request_key: str) -> tuple[str, dict[str, Any] | None] | None:
        """(body digest, answer) of the operation that used this idempotency key, also before a restart.

        The answer is None while that operation has no outcome (it is ``pending``), or when none was recorded.
        """
        return self._ledger.answer_for(request_key)

    # ---- records

    def begin(
        self,
        *,
        n: int,
        operation_id: str,
        kind: str,
        a: TargetState,
        b: TargetState,
        participants: Iterable[int],
        mode: str = "strict",
        request_key: str = "",
        body_digest: str = "",
        actor: str = "",
        reason: str = "",
        at: str = "",
    ) -> Begin:
        """Make BEGIN durable, with room for its outcome. After this PREPARE may be sent.

        Raises:
            JournalFull: no space; nothing happened and the file is as before.
            JournalFailed: see the class; the daemon must end.
            ledger.Illogical: another operation is pending, or ``n`` is not new.
        """
        record = Begin(
            n=n,
            operation_id=operation_id,
            kind=kind,
            a=a,
            b=b,
            participants=tuple(sorted(participants)),
            mode=mode,
            request_key=request_key,
            body_digest=body_digest,
            actor=actor,
            reason=reason,
            at=at or _now(),
        )
        with self._mutex:
            self._append(record, may_compact=True)
        return record

    def outcome_b(
        self,
        n: int,
        answer: dict[str, Any] | None = None,
        *,
        revision: int | None = None,
        message: str = "",
        duration_ms: float = 0.0,
        at: str = "",
    ) -> int:
        """Decide B: one write into reserved space, one fsync. After this FINALIZE may be sent, and B is desired.

        Args:
            answer: fixed part of what the client is told, msgpack types only.
            revision: the new revision; ``n`` when left out (rule 6).

        Returns:
            The new revision.

        Raises:
            JournalFailed: not known to be on disk; end the process, recovery reads what is there.
            ledger.Illogical: ``n`` is not the pending operation.
        """
        new = n if revision is None else revision
        record = Outcome(
            n=n, b=True, revision=new, answer=answer, message=message, duration_ms=duration_ms, at=at or _now()
        )
        with self._mutex:
            self._append_outcome(record)
        return new

    def outcome_a(
        self,
        n: int,
        answer: dict[str, Any] | None = None,
        *,
        message: str = "",
        duration_ms: float = 0.0,
        at: str = "",
        checked: bool = False,
    ) -> int:
        """Record that ``n`` ended on A. Need not be waited for (no record means A), but it frees the next BEGIN.
        ``checked``: it was a dry run, and passed.

        Returns:
            The revision that still holds.

        Raises: as ``outcome_b``.
        """
        with self._mutex:
            held = self._ledger.desired.revision if self._ledger.desired else 0
            record = Outcome(
                n=n,
                b=False,
                revision=held,
                answer=answer,
                message=message,
                duration_ms=duration_ms,
                at=at or _now(),
                checked=checked,
            )
            self._append_outcome(record)
        return held

    def adopt(
        self, state: TargetState, revision: int, n: int, *, actor: str = "", reason: str = "", at: str = ""
    ) -> None:
        """Take what the ranks run as desired: first contact (revision 1), lost journal, ``resolve adopt``.

        ``n`` is the highest operation number that the ranks showed; later numbers stay above it.

        Raises:
            JournalFull: no space; nothing happened.
            JournalFailed, ledger.Illogical: as ``begin``.
        """
        record = Adopt(n=n, revision=revision, state=state, actor=actor, reason=reason, at=at or _now())
        with self._mutex:
            self._append(record, may_compact=True)

    def quarantine(self, digest: str, reason: str, *, at: str = "") -> None:
        """Never try the config with this digest again by itself (rule 13). An empty reason lifts it.

        Raises: as ``adopt``.
        """
        with self._mutex:
            self._append(Quarantine(digest=digest, reason=reason, at=at or _now()))

    def set(self, name: str, value: Any, *, at: str = "") -> None:
        """Keep one operator's choice (bypass, failover policy); None removes it. Raises as ``adopt``."""
        with self._mutex:
            self._append(Setting(name=name, value=value, at=at or _now()))

    def close(self) -> None:
        """Give up file and lock. Twice is fine."""
        with self._mutex:
            if self._closed:
                return
            self._closed = True
            self._disk.close(self._fd)
            self._lock.release()

    # ---- writing

    def _reserve_for(self, record: Record) -> int:
        """Bytes to keep free behind ``record`` for the outcome of what is pending after it."""
        pending = record if isinstance(record, Begin) else self._ledger.pending
        if pending is None or isinstance(record, Outcome):
            return 0
        return snapshot.outcome_reserve_bytes(len(pending.participants))

    def _ready(self, record: Record) -> None:
        if self._failed is not None:
            raise self._failed
        if self._closed:
            raise JournalFailed(self.path, "it is closed")
        self._ledger.check(record)

    def _append(self, record: Record, *, may_compact: bool = False) -> None:
        """A record that begins something. An outcome goes to the file that has its BEGIN, whatever became of that."""
        self._ready(record)
        if not self._disk.linked(self._fd):
            self._name_again()
        elif may_compact and self._end > max(COMPACT_BYTES, 2 * self._base):
            self._compact()
        blob = frames.frame(self._seq + 1, encode(record))
        self._make_room(len(blob), self._reserve_for(record))
        self._put(blob, record)

    def _append_outcome(self, record: Outcome) -> None:
        self._ready(record)
        blob = frames.frame(self._seq + 1, encode(record))
        try:
            self._make_room(len(blob), 0)
        except JournalFull:
            # More than was reserved, and the disk is full now: the decision matters, its answer's wording does not.
            record = msgspec.structs.replace(record, answer=None, message=record.message[:200])
            blob = frames.frame(self._seq + 1, encode(record))
            try:
                self._make_room(len(blob), 0)
            except JournalFull as exc:
                raise self._broken(exc) from exc
        self._put(blob, record)

    def _make_room(self, size: int, reserve: int) -> None:
        """Space for ``size`` bytes at the end and ``reserve`` behind them, all zeros, or JournalFull and no change."""
        have = self._disk.size(self._fd)
        want = self._end + size + reserve
        if want <= have:
            return
        try:
            self._disk.reserve(self._fd, have, want - have)
            # Written zeros are blocks that an outcome only overwrites: its fsync then needs no metadata.
            self._disk.write(self._fd, bytes(want - have), have)
        except OSError as exc:
            try:
                self._disk.truncate(self._fd, have)
            except OSError as worse:
                raise self._broken(worse) from worse
            raise JournalFull(self.path, exc.strerror or str(exc)) from exc

    def _put(self, blob: bytes, record: Record) -> None:
        point = _point_of(record)
        self._faults.hit(point, "before_write")
        try:
            self._disk.write(self._fd, blob, self._end)
            self._faults.hit(point, "before_fsync")
            self._disk.sync(self._fd)
        except OSError as exc:
            raise self._broken(exc) from exc
        self._faults.hit(point, "after_fsync")
        self._end += len(blob)
        self._seq += 1
        self._ledger.apply(record)

    def _broken(self, exc: Exception) -> JournalFailed:
        why = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
        self._failed = JournalFailed(self.path, why)
        return self._failed

    def _name_again(self) -> None:
        """Somebody removed the file: what it said is known here, so it is written anew."""
        if not self.path.parent.is_dir():
            raise JournalGone(self.path)
        log.error("journal %s was removed while it was in use; it is written anew", self.path)
        self._compact()
        if not self._disk.linked(self._fd):
            raise JournalFull(self.path, "it was removed, and there is no space for a new one")

    def _compact(self) -> None:
        """Write the file anew. Without space the old file serves on; BEGIN will say so if it needs more."""
        try:
            opened = snapshot.rewrite(self.path, self._ledger, disk=self._disk, at=_now())
        except JournalFull:
            return
        except JournalFailed as exc:
            self._failed = exc
            raise
        self._disk.close(self._fd)
        self._fd, self._end, self._seq, self._base = opened.fd, opened.end, opened.seq, opened.end
