"""The fold of the journal's records: what is desired, what is pending, what was. Pure: no file, no clock.

Rules kept here (design.md, "The transaction"): 1 (no outcome means A; an outcome is taken once, for the pending n
alone), 6 (n only grows), 7 (desired = last OUTCOME B or adoption), 15 (key, digest and answer are kept together).
"""

from typing import Any

import msgspec

from hicache_sidecar.store.records import (
    ADOPTED,
    CHECKED,
    COMMITTED,
    ROLLED_BACK,
    Adopt,
    Begin,
    Desired,
    Outcome,
    Quarantine,
    Record,
    Revision,
    Setting,
    Snapshot,
)

HISTORY_ROWS = 200  # rows kept over a snapshot; also how many request keys are remembered


class Illogical(ValueError):
    """A record that cannot follow the ones before it: a defect of the writer, or a file put together by hand."""


class Ledger:
    """The state after all records so far. ``check`` before writing a record, ``apply`` once it is durable."""

    def __init__(self) -> None:
        self.last_n = 0
        self.desired: Desired | None = None
        self.pending: Begin | None = None
        self.history: tuple[Revision, ...] = ()
        self.quarantined: dict[str, str] = {}
        self.settings: dict[str, Any] = {}
        self.recovered = ""
        self._by_key: dict[str, Revision] = {}

    def check(self, record: Record) -> None:
        """Say whether ``record`` may come next.

        Raises:
            Illogical: with what is wrong, without content.
        """
        match record:
            case Begin():
                if self.pending is not None:
                    raise Illogical(f"BEGIN of n={record.n} while n={self.pending.n} has no outcome")
                if record.n <= self.last_n:
                    raise Illogical(f"BEGIN of n={record.n} after n={self.last_n}: n only grows")
            case Outcome():
                if self.pending is None or self.pending.n != record.n:
                    held = self.pending.n if self.pending else "none"
                    raise Illogical(f"OUTCOME of n={record.n}, pending is {held}")
            case Adopt():
                if self.pending is not None:
                    raise Illogical(f"adoption while n={self.pending.n} has no outcome")
            case Snapshot() | Quarantine() | Setting():
                pass

    def apply(self, record: Record) -> None:
        """Take ``record`` in. Raises Illogical as ``check`` does."""
        self.check(record)
        match record:
            case Snapshot():
                self._restore(record)
            case Begin():
                self.pending = record
                self.last_n = record.n
            case Outcome():
                self._outcome(record)
            case Adopt():
                self.last_n = max(self.last_n, record.n, record.revision)
                self.desired = Desired(record.state, record.revision)
                self._remember(
                    Revision(
                        n=record.n,
                        revision=record.revision,
                        result=ADOPTED,
                        operation_id="",
                        kind="adopt",
                        state=record.state,
                        actor=record.actor,
                        reason=record.reason,
                        began_at=record.at,
                        at=record.at,
                    )
                )
            case Quarantine():
                self.quarantined.pop(record.digest, None)
                if record.reason:
                    self.quarantined[record.digest] = record.reason
            case Setting():
                self.settings.pop(record.name, None)
                if record.value is not None:
                    self.settings[record.name] = record.value

    def _outcome(self, record: Outcome) -> None:
        begin = self.pending
        if begin is None:  # check() refused it already; said again for the type checker
            raise Illogical(f"OUTCOME of n={record.n} without BEGIN")
        self.pending = None
        if record.b:
            self.desired = Desired(begin.b, record.revision)
            self.last_n = max(self.last_n, record.revision)
        self._remember(
            Revision(
                n=begin.n,
                revision=record.revision,
                result=_result(record),
                operation_id=begin.operation_id,
                kind=begin.kind,
                state=begin.b,
                participants=begin.participants,
                mode=begin.mode,
                request_key=begin.request_key,
                body_digest=begin.body_digest,
                actor=begin.actor,
                reason=begin.reason,
                began_at=begin.at,
                at=record.at,
                duration_ms=record.duration_ms,
                message=record.message,
                answer=record.answer,
            )
        )

    def _remember(self, row: Revision) -> None:
        self._set_history((*self.history, row))

    def _set_history(self, rows: tuple[Revision, ...]) -> None:
        for dropped in rows[:-HISTORY_ROWS]:
            if self._by_key.get(dropped.request_key) is dropped:
                del self._by_key[dropped.request_key]
        self.history = rows[-HISTORY_ROWS:]
        if self.history and self.history[-1].request_key:
            self._by_key[self.history[-1].request_key] = self.history[-1]

    def _restore(self, snap: Snapshot) -> None:
        self.last_n, self.desired, self.pending = snap.last_n, snap.desired, None
        self.quarantined, self.settings = dict(snap.quarantined), dict(snap.settings)
        self.recovered = snap.recovered
        self.history = snap.history[-HISTORY_ROWS:]
        self._by_key = {row.request_key: row for row in self.history if row.request_key}

    def answer_for(self, request_key: str) -> tuple[str, dict[str, Any] | None] | None:
        """(body digest, fixed part of the answer) of the operation that used this key; the answer is None while
        that operation has no outcome, or when its answer was too large to keep."""
        if self.pending is not None and request_key and self.pending.request_key == request_key:
            return self.pending.body_digest, None
        row = self._by_key.get(request_key)
        return None if row is None else (row.body_digest, row.answer)

    def snapshot(self, at: str) -> Snapshot:
        """The record that stands for everything but ``pending``, whose BEGIN is written again after it."""
        # While n is pending the snapshot stands for the time before its BEGIN: n itself must still be "new" then.
        last_n = self.last_n if self.pending is None else self.pending.n - 1
        return Snapshot(
            last_n=last_n,
            desired=self.desired,
            history=self.history,
            quarantined=dict(self.quarantined),
            settings=dict(self.settings),
            recovered=self.recovered,
            at=at,
        )

    def copy(self) -> "Ledger":
        """An independent copy."""
        twin = Ledger()
        twin._restore(self.snapshot(""))
        twin.last_n, twin.pending = self.last_n, self.pending
        return twin


def _result(record: Outcome) -> str:
    """The history's word."""
    if record.b:
        return COMMITTED
    return CHECKED if record.checked else ROLLED_BACK


def same(one: Ledger, other: Ledger) -> bool:
    """True when two ledgers say the same, times of snapshots aside."""
    return one.pending == other.pending and msgspec.structs.asdict(one.snapshot("")) == msgspec.structs.asdict(
        other.snapshot("")
    )
