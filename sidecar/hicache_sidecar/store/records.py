"""The journal's records. What they mean together is said in ``ledger.py``.

States inside records hold secrets (inline credentials of the extra config): the file is 0600, and the text form
of a record leaves states and answers out, so that a log line or traceback cannot leak them (failures.md F94).
Fields may be added with defaults; a newer daemon reads an older journal.
"""

from typing import Any

import msgspec

from hicache_proto.model import TargetState

COMMITTED = "committed"
ROLLED_BACK = "rolled_back"
ADOPTED = "adopted"
CHECKED = "checked"  # a dry run that passed: nothing was to be changed, and nothing was


class Begin(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="begin"):
    """Operation ``n`` will move ``participants`` (flat rank numbers) from ``a`` to ``b``. No outcome means A.

    ``request_key`` is the idempotency key ("" for none) and ``body_digest`` what it was used with. ``at`` is
    ISO 8601 UTC, for people, never for decisions.
    """

    n: int
    operation_id: str
    kind: str
    a: TargetState
    b: TargetState
    participants: tuple[int, ...]
    mode: str = "strict"
    request_key: str = ""
    body_digest: str = ""
    actor: str = ""
    reason: str = ""
    at: str = ""

    def __repr__(self) -> str:
        return f"Begin(n={self.n}, kind={self.kind!r}, operation_id={self.operation_id!r})"


class Outcome(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="outcome"):
    """How operation ``n`` ended. ``b`` True: B is the desired state from here on, at ``revision``.

    ``answer`` is the fixed part of what the client is told; a repeat of its request key gets it again. ``checked``:
    a dry run that passed, which ends on A as it should.
    """

    n: int
    b: bool
    revision: int
    answer: dict[str, Any] | None = None
    message: str = ""
    duration_ms: float = 0.0
    at: str = ""
    checked: bool = False

    def __repr__(self) -> str:
        return f"Outcome(n={self.n}, b={self.b}, revision={self.revision})"


class Adopt(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="adopt"):
    """What the ranks run is the desired state from here on (first contact, lost journal, ``resolve adopt``)."""

    n: int
    revision: int
    state: TargetState
    actor: str = ""
    reason: str = ""
    at: str = ""

    def __repr__(self) -> str:
        return f"Adopt(n={self.n}, revision={self.revision})"


class Quarantine(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="quarantine"):
    """The config with this digest killed an engine (rule 13). An empty ``reason`` lifts it."""

    digest: str
    reason: str
    at: str = ""


class Setting(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="setting"):
    """One durable operator's choice beside the state: bypass, failover policy. ``value`` None removes it."""

    name: str
    value: Any = None
    at: str = ""

    def __repr__(self) -> str:
        return f"Setting(name={self.name!r})"


class Revision(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the history, made from BEGIN and OUTCOME, or from an adoption.

    ``state`` is what the operation aimed at; ``revision`` is the revision that holds after it (for a roll-back
    the one before).
    """

    n: int
    revision: int
    result: str  # COMMITTED, ROLLED_BACK, ADOPTED or CHECKED
    operation_id: str
    kind: str
    state: TargetState
    participants: tuple[int, ...] = ()
    mode: str = "strict"
    request_key: str = ""
    body_digest: str = ""
    actor: str = ""
    reason: str = ""
    began_at: str = ""
    at: str = ""
    duration_ms: float = 0.0
    message: str = ""
    answer: dict[str, Any] | None = None

    def __repr__(self) -> str:
        return f"Revision(n={self.n}, revision={self.revision}, result={self.result!r})"


class Desired(msgspec.Struct, frozen=True):
    """The desired state (rule 7): the last OUTCOME B or adoption."""

    state: TargetState
    revision: int

    def __repr__(self) -> str:
        return f"Desired(revision={self.revision})"


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="snapshot"):
    """First record of every file: the fold of all records before it. A pending BEGIN follows as its own record."""

    last_n: int = 0
    desired: Desired | None = None
    history: tuple[Revision, ...] = ()
    quarantined: dict[str, str] = {}
    settings: dict[str, Any] = {}
    recovered: str = ""  # the file that was set aside by --recover, if this snapshot came from one
    at: str = ""

    def __repr__(self) -> str:
        return f"Snapshot(last_n={self.last_n}, history={len(self.history)} rows)"


Record = Snapshot | Begin | Outcome | Adopt | Quarantine | Setting

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Record)


def encode(record: Record) -> bytes:
    """The payload of one frame."""
    return _encoder.encode(record)


def decode(payload: bytes) -> Record:
    """Raises msgspec.MsgspecError when the payload is no record that this version knows."""
    return _decoder.decode(payload)
