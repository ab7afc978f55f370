"""Numbers of the engine side that an operator may change, with the reasons for their defaults."""

import os
import stat
from dataclasses import dataclass, field

from hicache_proto.hooklink import HEARTBEAT_S, LIVENESS_S
from hicache_proto.transaction import DECIDE_MARGIN_S, FREEZE_S, IN_DOUBT_S, PREPARED_S


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Settings of the hook link and of operations. Durations in seconds.

    ``prepared_s``, ``freeze_s`` and ``in_doubt_s`` are the leases of design.md; ``in_doubt_s`` must be longer than
    ``freeze_s`` and both shorter than the engine's watchdog.

    Raises:
        ValueError: a value outside its range.
    """

    heartbeat_s: float = HEARTBEAT_S
    liveness_s: float = LIVENESS_S  # silent for so long: lost
    reconnect_grace_s: float = 0.5  # a broken connection has so long to come back before its rank is lost (F32)
    prepared_s: float = PREPARED_S
    freeze_s: float = FREEZE_S
    in_doubt_s: float = IN_DOUBT_S
    decide_margin_s: float = DECIDE_MARGIN_S
    call_s: float = 2.0  # a stateless question, or one try of a repeated message
    validate_s: float = 10.0  # VALIDATE may load a package on the engine's host
    on_engine_restart: str = "reattach"  # or "leave"
    socket_mode: int = stat.S_IRUSR | stat.S_IWUSR | stat.S_IRGRP | stat.S_IWGRP  # inside a 0700 or 0750 directory
    allow_uids: frozenset[int] = field(default_factory=lambda: frozenset({0, os.getuid()}))  # peers of hooks.sock

    def __post_init__(self) -> None:
        if not 0 < self.freeze_s < self.in_doubt_s:
            raise ValueError("in_doubt_s must be longer than freeze_s, and both above 0")
        if self.in_doubt_s <= self.decide_margin_s:
            raise ValueError("in_doubt_s must be longer than decide_margin_s")
        if not 0 < self.heartbeat_s < self.liveness_s:
            raise ValueError("liveness_s must be longer than heartbeat_s, and both above 0")
        if self.on_engine_restart not in ("reattach", "leave"):
            raise ValueError("on_engine_restart is 'reattach' or 'leave'")
