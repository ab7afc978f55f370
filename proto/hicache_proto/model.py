"""Model types: what a rank is, what state it is in, what an operation does to it.

All are frozen msgspec structs; durations carry their unit in the name. A ``TargetState`` is whole: backend
or none, config, policies (design.md, "The transaction").
"""

from enum import StrEnum

import msgspec

PREFETCH_POLICIES = ("best_effort", "wait_complete", "timeout")
WRITE_POLICIES = ("write_back", "write_through", "write_through_selective")
LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")

# Prefetch knobs with their SGLang names. They and the two policies are *live* keys: they change without a new set.
KNOBS = (
    "prefetch_threshold",
    "prefetch_timeout_base",
    "prefetch_timeout_per_ki_token",
    "prefetch_timeout_max",
    "hicache_storage_pass_prefix_keys",
)

KnobValue = bool | int | float | None


class Mode(StrEnum):
    """How an operation meets running work (interface.md)."""

    STRICT = "strict"
    DRAIN = "drain"
    HOT = "hot"


class State(StrEnum):
    """States that status shows. The order is fixed: metrics export the index."""

    DETACHED = "detached"
    ATTACHING = "attaching"
    ATTACHED = "attached"
    BYPASSED = "bypassed"
    DRAINING = "draining"
    DETACHING = "detaching"
    QUARANTINED = "quarantined"
    SPLIT = "split"
    ENGINE_DOWN = "engine_down"


class RankIdentity(msgspec.Struct, frozen=True, order=True):
    """Place of one scheduler process in the engine's parallel topology."""

    dp_rank: int = 0
    pp_rank: int = 0
    tp_rank: int = 0
    dp_size: int = 1
    pp_size: int = 1
    tp_size: int = 1

    @property
    def rank(self) -> int:
        """Flat rank: (dp * pp_size + pp) * tp_size + tp."""
        return (self.dp_rank * self.pp_size + self.pp_rank) * self.tp_size + self.tp_rank

    @property
    def world(self) -> int:
        """The data-parallel replica: the ranks that share one control broadcast (design.md, rule 11)."""
        return self.dp_rank

    @property
    def leader(self) -> bool:
        """True on the rank that injects commands into its world's broadcast."""
        return self.pp_rank == 0 and self.tp_rank == 0

    @property
    def size(self) -> int:
        """Number of ranks of the whole engine."""
        return self.dp_size * self.pp_size * self.tp_size


class TargetState(msgspec.Struct, frozen=True, forbid_unknown_fields=False):
    """A whole state to move a rank to. ``extra_config`` may hold secrets: never logged, never echoed.

    ``extra_config`` is the caller's string (JSON, or ``@/path``); ``knobs`` override those inside it.
    ``None`` for a policy means: what the rank has now. ``extra_config`` None on the same backend means:
    keep the present config; on another backend: no options.
    """

    backend: str | None = None
    extra_config: str | None = None
    knobs: dict[str, KnobValue] = {}
    prefetch_policy: str | None = None
    write_policy: str | None = None


class EffectiveState(msgspec.Struct, frozen=True):
    """What one rank really runs, read from the live objects.

    ``extra_config`` is the requested string with secrets redacted; ``config_digest`` identifies the effective
    config (secrets included, hashed) so that ranks can be compared; ``inner`` names the vendor's connector, ``store``
    is what the store said of itself when it was attached (place, size, direct I/O and why not).
    """

    backend: str | None = None
    extra_config: str | None = None
    config_digest: str = ""
    knobs: dict[str, KnobValue] = {}
    prefetch_policy: str | None = None
    write_policy: str | None = None
    revision: int = 0
    bypass: bool = False
    namespace: str = ""
    inner: str = ""
    store: dict[str, bool | int | str] = {}


class Blocker(msgspec.Struct, frozen=True):
    """One reason why a rank is not idle."""

    rank: int
    name: str
    count: int
    age_ms: int | None = None
    still_s: float | None = None  # how long nothing of it has ended, as far as reports show (F4)


class IdleReport(msgspec.Struct, frozen=True):
    """Every counter of one rank, by name. Any non-zero counter blocks, known or not (failures.md F2)."""

    counters: dict[str, int] = {}
    ages_ms: dict[str, int] = {}  # age of the oldest item, where the engine knows it
    hopeless: str = ""  # why waiting cannot make this rank idle (a paused engine with running requests); "" = it can
    held: int = 0  # requests that wait in front of a closed gate; no blocker (rule 12)


# Counters that every report must carry; one that is missing is an error, not "idle" (F2).
MANDATORY_COUNTERS = (
    "running_batch",  # requests in the running batch
    "chunked_prefill",  # a request whose prefill is half done
    "last_batch",  # results of the last batch not processed yet
    "overlap_results",  # overlap-scheduled results
    "pp_microbatches",  # pipeline-parallel micro-batches
    "waiting_queue",
    "grammar_queue",
    "disagg_bootstrap_queue",
    "disagg_prealloc_queue",
    "disagg_transfer_queue",
    "disagg_inflight_queue",
    "dllm_staging",  # diffusion-LLM staging requests
    "ongoing_write_through",  # L1 -> L2
    "ongoing_load_back",  # L2 -> L1
    "ongoing_prefetch",  # L3 -> L2
    "ongoing_backup",  # L2 -> L3
    "storage_queues",  # entries of the storage queues that no counter above holds
    "storage_calls",  # worker threads inside a backend call
)
# What the spec's message calls #queue-req and #running-req.
QUEUE_COUNTERS = (
    "waiting_queue", "grammar_queue", "disagg_bootstrap_queue", "disagg_prealloc_queue", "disagg_transfer_queue",
    "disagg_inflight_queue", "dllm_staging",
)  # fmt: skip
RUNNING_COUNTERS = ("running_batch",)


class Capabilities(msgspec.Struct, frozen=True):
    """What the engine behind a rank can do; unsupported combinations are refused before anything moves (F12)."""

    engine: str = ""  # "embedded", "sglang", ...
    engine_version: str = ""
    hooks_version: str = ""
    attach: bool = True
    hot: bool = False
    drain: bool = True
    checkpoint: bool = False  # can store the whole tree before a store is let go (F58)
    tree: str = ""
    layout: str = ""
    page_size: int = 0  # tokens
    page_bytes: int = 0  # payload bytes of one page
    l2_tokens: int = 0
    fingerprint: str = ""
    watchdog_s: float | None = None
    problems: list[str] = []  # hooks that did not take, and why


# Upper bounds of the latency histogram, in seconds; one more bucket holds what took longer. A page batch on a local
# disk takes milliseconds, a hung store seconds: the bounds part these.
LATENCY_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class LatencySummary(msgspec.Struct, frozen=True):
    """Sum and count of a duration, for mean and rate, and its histogram over ``LATENCY_BOUNDS_S``."""

    count: int = 0
    total_s: float = 0.0
    max_s: float = 0.0
    buckets: list[int] = []  # per bound, not cumulative, the overflow last; empty: not counted


class OpUsage(msgspec.Struct, frozen=True):
    """Results of one backend call kind (``get``, ``put``, ``exists``), counted per key (F91: a miss is no error)."""

    hit: int = 0
    miss: int = 0
    error: int = 0
    timeout: int = 0
    skipped: int = 0
    bytes: int = 0
    latency: LatencySummary = LatencySummary()


class RecentUse(msgspec.Struct, frozen=True):
    """One store over its last look-ups, a thousand or so; a store that was closed has none (F57)."""

    lookups: int = 0
    written: int = 0  # pages
    read: int = 0  # pages


class StoreUsage(msgspec.Struct, frozen=True):
    """One store's use since the process started, whether it is installed now or was."""

    ops: dict[str, OpUsage] = {}  # by backend call kind
    lookups: int = 0  # requests that could have read from it
    skipped: dict[str, int] = {}  # requests by "threshold", keys by "bypass", "breaker", "closed"
    write_only: bool = False  # written, looked up often enough, never read: in all, or in its last look-ups (F57)
    gaps: int = 0  # look-ups that met a gap: pages are stored behind one that is not, so they cannot be used (F57)
    gap_pages: int = 0  # those pages, counted at every look-up
    recent: RecentUse = RecentUse()


class ThreadReport(msgspec.Struct, frozen=True):
    """One worker thread of a storage set (F38, F39). ``stalled_s``: seconds without an end of anything; 0 until it
    counts as stalled."""

    name: str
    alive: bool = True
    restarts: int = 0
    stalled_s: float = 0.0


class BreakerReport(msgspec.Struct, frozen=True):
    """One circuit breaker. ``reason``: ``errors``, ``slow``, ``hung`` or what opened it by hand; empty while closed."""

    state: str = "closed"  # "closed" | "open" | "half_open"
    reason: str = ""
    opened_for_s: float = 0.0  # since it opened, half-open time included; 0 while closed
    ratio: float = 0.0  # failed share of the calls in the window; while not closed, of those that opened it
    calls: int = 0  # calls in the window
    opened_total: int = 0
    probe_in_s: float | None = None  # until the next probe; None while closed or while one runs


class EpochChange(msgspec.Struct, frozen=True):
    """A store was reachable and had lost all that it held (F70). ``how``: ``said`` by the store, or ``inferred``."""

    n: int  # counts up over all stores of the process
    old: str
    new: str
    how: str = "said"
    ago_s: float = 0.0


class GuardReport(msgspec.Struct, frozen=True):
    """The guard in front of the installed store: what failover decides on.

    Counters are totals since the store was attached, per call (``OpUsage`` counts keys); a probe is not counted.
    """

    name: str  # the backend
    breaker: str = "closed"  # the worse of both sides: open, half_open, closed
    opened_for_s: float = 0.0  # the longest of both sides
    reason: str = ""  # of the worse side
    ratio: float = 0.0  # the higher of both sides
    calls: int = 0
    errors: int = 0  # calls that failed as a whole or in part
    timeouts: int = 0  # calls that ran past their deadline, or said so themselves
    late: int = 0  # calls past their deadline that are still inside the store; their pages are not reused
    stuck: list[str] = []  # worker threads inside such a call, by name
    sides: dict[str, BreakerReport] = {}  # "read" (get, exists) and "write" (put): a full disk opens only one (F62)
    epoch: str = ""  # of what the store holds: its own name for it, or how often we found it emptied, from 1
    epoch_changes: int = 0  # since the store was attached
    epoch_change: EpochChange | None = None  # the last one
    no_room: bool = False  # the last put of new pages found no room for some; a full store fails no call (F62)


class RankReport(msgspec.Struct, frozen=True):
    """Everything a rank says about itself; cheap enough for every heartbeat."""

    state: EffectiveState = EffectiveState()
    op_n: int = 0  # highest operation number this rank has seen
    op_phase: str = ""  # transaction.RankPhase of op_n
    op_ended: str = ""  # transaction.Ended of op_n once its phase is none
    lease_left_s: float | None = None
    holds: list[str] = []
    idle: IdleReport = IdleReport()
    usage: dict[str, OpUsage] = {}
    threads: list[ThreadReport] = []
    quarantine: str = ""  # reason; empty when clean
    layers: dict[str, str] = {}  # per-layer view, filled when layers disagree (F24)
    stores: dict[str, StoreUsage] = {}  # by backend, with its inner connector: "file", "aibrix:ROCKSDB"
    guard: GuardReport | None = None  # of the installed store; None: detached, or the engine has no such guard
    checkpoint_pages: int = 0  # written by the checkpoint of the operation that runs (F58)
    abandoned: int = 0  # threads that were given up outside the installed store's calls, and are not back (F46)


class Plan(msgspec.Struct, frozen=True):
    """A rank's answer to VALIDATE: what moving to the target would mean here. Nothing was touched."""

    relation: str  # "same" | "live" | "attach" | "swap" | "detach"
    changed_keys: list[str] = []
    config_digest: str = ""
    redacted_config: str | None = None
    warnings: list[str] = []
    notes: list[str] = []
