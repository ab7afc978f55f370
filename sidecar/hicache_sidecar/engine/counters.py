"""Numbers of the engine side, as plain attributes: ``obs/metrics.py`` renders them, tests read them."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Counters:
    """Counts since the daemon started. Nothing here is ever used for a decision."""

    # The hook link.
    link_received: int = 0  # well-formed messages
    link_sent: int = 0
    malformed: int = 0  # random bytes, foreign types, too deep: dropped (F95)
    stale_replies: int = 0  # answers that nobody waits for any more (F31)
    late_finalize: int = 0  # answers to FINALIZE after the rank's heartbeat had said it already
    unknown_sessions: int = 0  # messages of sessions that we do not know: told to say hello again
    missed_wakeups: int = 0  # messages found by the periodic look at EVENTS (F104)
    send_failures: int = 0  # peer gone, or its queue full
    hellos_accepted: int = 0
    hellos_refused: Counter[str] = field(default_factory=Counter)  # by reason
    sessions_lost: int = 0

    # Operations.
    operations: Counter[tuple[str, str]] = field(default_factory=Counter)  # (kind, result or error code)
    refusals: Counter[tuple[str, str]] = field(default_factory=Counter)  # (kind, error code), before anything began
    operation_seconds: Counter[str] = field(default_factory=Counter)  # by kind: sum of durations, s
    stall_us_last: int = 0  # longest scheduler stall of the last operation
    stall_us_total: int = 0  # the same, of all operations
    rollbacks: int = 0
    failover_steps: Counter[str] = field(default_factory=Counter)  # by step

    def finished(self, kind: str, result: str, seconds: float) -> None:
        """One operation ended; ``seconds`` is how long it ran."""
        self.operations[kind, result] += 1
        self.operation_seconds[kind] += seconds  # type: ignore[assignment]  # Counter adds floats as well
