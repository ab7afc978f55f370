"""Messages between the sidecar (ZMQ ROUTER, binds) and a rank's hook (DEALER, connects).

One ZMQ message is one msgpack-encoded tagged struct. Each hello makes a random session id; every message
and answer after it carries (session, n, phase, call). Anything with another session, or an unknown call, is
dropped and counted (design.md, rule 5). Leases travel as durations, never as times (rule 4).

What a rank answers, and when. The truth is always ``said(report.op_n, report.op_phase, report.op_ended, n)``;
``ok`` says whether the rank is where the call wants it. Every call is answered, except when its session ends first.
A heartbeat goes out right after every change of state that no answer carries at the same moment, so a report may
arrive before its answer.

========  ==================================================  ================================================
phase     answered                                            ``error`` when not ok (code, details.reason)
========  ==================================================  ================================================
validate  when checked; ``plan``                              what the adapter raised (422s)
report    at once, by the agent; ``data`` None                -
prepare   when PREPARED (back-fill done) or ended; repeats    the build's error or ``prepare_failed``;
          while building wait too and are all answered        ``prepare_failed`` builder_busy (an older builder
                                                              still runs: repeat later); ``quarantined``;
                                                              ``operation_in_progress`` (another n is open here)
freeze    strict: at once; drain: when FROZEN or ended        ``not_idle``, details.blocked_by (strict: thawed
          (repeats renew and wait too, all are answered)      again, still PREPARED); ``unsupported_by_engine``
                                                              incomplete_idle_report, details.missing
thaw      at once                                             -
commit    at once; ok = SWITCHED                              ``not_idle`` (still FROZEN), ``internal``
                                                              swap_failed (A installed, still FROZEN),
                                                              ``internal`` not_frozen
finalize  when A's set is closed, or did not close in time    ``quarantined`` threads_stuck, details.threads:
          (seconds); the state is FINAL at once and the       the rank *is* FINAL, the old backend stays open
          heartbeat says so: waiting for the answer is        and closing is tried again; ``internal``
          optional                                            publish_failed: FINAL, repeat FINALIZE to publish
undo      at once; ok = nothing of n is left here             ``quarantined`` undo_failed
any       of an n that ended here by lease end                ``deadline_exceeded`` expired
any       of an older n than the rank has seen                ``internal`` stale
hold      when held (``report.holds`` names it)               -
========  ==================================================  ================================================

Deferred calls (prepare, freeze with drain) are answered ``expired`` at lease end; a ``lease_end`` notice goes too.
In a world of several ranks FREEZE, THAW, COMMIT, FINALIZE and UNDO take effect when the leader's broadcast reaches
the rank; each rank's answer waits for that.
"""

from typing import Any

import msgspec

from hicache_proto.errors import ErrorBody
from hicache_proto.framing import MAX_FRAME_BYTES, check_depth
from hicache_proto.model import Capabilities, Plan, RankIdentity, RankReport, TargetState

HEARTBEAT_S = 1.0  # default; the sidecar's welcome may name another
LIVENESS_S = 3.5  # a rank silent for this long is lost: three heartbeats and a margin
MAX_LINK_BYTES = MAX_FRAME_BYTES

# ---- hook -> sidecar


class RankHello(msgspec.Struct, frozen=True, tag_field="type", tag="rank_hello"):
    """First message of a session. ``incarnation`` is one engine launch; ``epoch`` counts this rank's starts in it."""

    protocol: int
    engine_id: str
    session: str
    role: str  # "rank" or "frontend"
    identity: RankIdentity
    pid: int
    incarnation: str
    epoch: int
    capabilities: Capabilities = Capabilities()
    report: RankReport = RankReport()


class Heartbeat(msgspec.Struct, frozen=True, tag_field="type", tag="heartbeat"):
    """Sent every ``heartbeat_s``, and right after a change of state that no answer carries."""

    session: str
    report: RankReport


class Answer(msgspec.Struct, frozen=True, tag_field="type", tag="answer"):
    """Reply to one ``Call``. ``report`` is always the rank's current state; nothing is cached for repeats."""

    session: str
    n: int
    phase: str
    call: int
    ok: bool
    report: RankReport
    error: ErrorBody | None = None
    plan: Plan | None = None
    data: dict[str, Any] | None = None
    stall_us: int | None = None  # how long the scheduler thread stood still for this step


class Notice(msgspec.Struct, frozen=True, tag_field="type", tag="notice"):
    """Something happened at the rank by itself: ``idle`` (asked for by WatchIdle), ``lease_end``, ``drift``, and
    ``unclean_detach``: the process leaves, and threads named in ``detail`` still use its store (F72)."""

    session: str
    kind: str
    report: RankReport
    detail: str = ""


class Goodbye(msgspec.Struct, frozen=True, tag_field="type", tag="goodbye"):
    """The process leaves in good order."""

    session: str
    reason: str = ""


HookMessage = RankHello | Heartbeat | Answer | Notice | Goodbye

# ---- sidecar -> hook


class Welcome(msgspec.Struct, frozen=True, tag_field="type", tag="welcome"):
    """The hello was taken."""

    session: str
    protocol: int
    heartbeat_s: float = HEARTBEAT_S
    sidecar_version: str = ""


class Refused(msgspec.Struct, frozen=True, tag_field="type", tag="refused"):
    """The hello was not taken; the hook tries again after ``retry_s`` (with a new session)."""

    session: str
    error: ErrorBody
    retry_s: float = 5.0


class Rehello(msgspec.Struct, frozen=True, tag_field="type", tag="rehello"):
    """The sidecar does not know this session (it restarted): say hello again at once."""

    session: str


class Validate(msgspec.Struct, frozen=True, tag_field="type", tag="validate"):
    """Stateless: parse, check and compare ``target``; build nothing. Answered with ``plan``."""

    target: TargetState
    mode: str = "strict"
    swap: bool = False


class AskReport(msgspec.Struct, frozen=True, tag_field="type", tag="report"):
    """Stateless: report now (status ``?fresh=1``, idle probe). Answered from the agent thread."""


class Describe(msgspec.Struct, frozen=True, tag_field="type", tag="describe"):
    """Stateless: known backends with options' schema and what is missing here, in ``data["backends"]``."""


class Hold(msgspec.Struct, frozen=True, tag_field="type", tag="hold"):
    """Not of an operation (n = 0): close admission under ``name`` for ``hold_s``; repeating renews.

    For the manual drain. Idle is then learnt by WatchIdle or from reports. The hold ends by itself.
    """

    name: str
    hold_s: float


class Release(msgspec.Struct, frozen=True, tag_field="type", tag="release"):
    """Drop the hold ``name`` (n = 0); idempotent. ``data["released"]`` says whether there was one."""

    name: str


class WatchIdle(msgspec.Struct, frozen=True, tag_field="type", tag="watch_idle"):
    """Stateless: send one ``idle`` notice at the next idle moment within ``for_s``; admission stays open."""

    for_s: float


class Prepare(msgspec.Struct, frozen=True, tag_field="type", tag="prepare"):
    """Build the target's storage set, parked, off the scheduler thread. Repeating renews the lease."""

    target: TargetState
    prepared_s: float
    hot: bool = False
    checkpoint: bool = False  # PREPARED and FROZEN mean that the store that stays holds the whole tree (F58)


class Freeze(msgspec.Struct, frozen=True, tag_field="type", tag="freeze"):
    """Hold admission, then the idle check. ``drain``: stay held until idle; else thaw at once when busy.

    Repeating the same ``round`` renews the lease. A round that was thawed never freezes again.
    """

    round: int
    freeze_s: float
    drain: bool = False


class Thaw(msgspec.Struct, frozen=True, tag_field="type", tag="thaw"):
    """Open admission again, keep what was prepared (a strict wait goes on with admission open)."""

    round: int
    prepared_s: float


class Commit(msgspec.Struct, frozen=True, tag_field="type", tag="commit"):
    """Lease and idle checked again in one scheduler step, then one reference is swapped."""

    in_doubt_s: float


class Finalize(msgspec.Struct, frozen=True, tag_field="type", tag="finalize"):
    """Sent only after a durable OUTCOME B: thaw, publish, retire the old set."""


class Undo(msgspec.Struct, frozen=True, tag_field="type", tag="undo"):
    """Abort, roll back, cancel: back to the old set, thaw, drop the new one."""

    reason: str = ""


class Bypass(msgspec.Struct, frozen=True, tag_field="type", tag="bypass"):
    """Reads miss, writes are skipped; at any moment, under load."""

    enabled: bool


class ClearNamespace(msgspec.Struct, frozen=True, tag_field="type", tag="clear"):
    """Delete this namespace's pages from the attached store. ``data["deleted"]`` = count."""

    namespace: str


class SetView(msgspec.Struct, frozen=True, tag_field="type", tag="set_view"):
    """For a ``frontend``: what the engine's own HTTP view should show."""

    target: TargetState


CallBody = (
    Validate
    | AskReport
    | Describe
    | WatchIdle
    | Hold
    | Release
    | Prepare
    | Freeze
    | Thaw
    | Commit
    | Finalize
    | Undo
    | Bypass
    | ClearNamespace
    | SetView
)


class Call(msgspec.Struct, frozen=True, tag_field="type", tag="call"):
    """One request to one rank. ``n`` is the operation (0 for stateless calls); ``phase`` names the body's kind."""

    session: str
    n: int
    phase: str
    call: int
    body: CallBody


SidecarMessage = Welcome | Refused | Rehello | Call

# A report of an engine with its threads and counters has some 60 containers, and walking it in Python cost 0.4 ms, 30
# times its decoding. msgspec itself ends nesting by Python's recursion limit of 1000: half of that is safe unwalked.
UNWALKED_CONTAINERS = 400

_encoder = msgspec.msgpack.Encoder()
_from_hook = msgspec.msgpack.Decoder(HookMessage)
_from_sidecar = msgspec.msgpack.Decoder(SidecarMessage)


def phase_of(body: CallBody) -> str:
    """The wire name of a body's kind, used as ``Call.phase``."""
    return str(body.__struct_config__.tag)


def encode(message: HookMessage | SidecarMessage) -> bytes:
    """One ZMQ frame."""
    return _encoder.encode(message)


def _checked(frame: bytes) -> bytes:
    if len(frame) > MAX_LINK_BYTES:
        raise msgspec.DecodeError(f"link message of {len(frame)} bytes")
    check_depth(frame, free=UNWALKED_CONTAINERS)
    return frame


def decode_from_hook(frame: bytes) -> HookMessage:
    """Decode what a rank sent.

    Raises:
        msgspec.MsgspecError, HicacheError: anything but a well-formed message; the caller drops and counts it.
    """
    return _from_hook.decode(_checked(frame))


def decode_from_sidecar(frame: bytes) -> SidecarMessage:
    """Decode what the sidecar sent. Raises as ``decode_from_hook``."""
    return _from_sidecar.decode(_checked(frame))
