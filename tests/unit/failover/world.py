"""A world in virtual time for the failover machine: stores that fail and come back, ranks, an operator, a clock.

``World.run`` asks the machine, does what it says at once, and moves the clock to the next moment that matters.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from hicache_proto.failover import FailoverPolicy, Spare
from hicache_proto.model import BreakerReport, GuardReport, TargetState
from hicache_sidecar.core.failover import Failover
from hicache_sidecar.core.failover_types import Facts, Move, RankView, Record, SetBypass, Wait

A, B, C = (TargetState(backend=name, prefetch_policy="timeout", write_policy="write_back") for name in "ABC")
NONE = TargetState(prefetch_policy="timeout", write_policy="write_back")
SPARE_B, SPARE_C = Spare(hicache_storage_backend="B"), Spare(hicache_storage_backend="C")


def guard(name: str, state: str, side: str = "read", open_s: float = 0.0) -> GuardReport:
    """A report with one side in ``state`` and the other closed."""
    other = "write" if side == "read" else "read"
    sides = {side: BreakerReport(state=state, reason="errors", opened_for_s=open_s), other: BreakerReport()}
    return GuardReport(name=name, breaker=state, reason="errors", opened_for_s=open_s, sides=sides)


@dataclass
class World:
    """``sick`` stores have an open breaker while in use and refuse to be attached."""

    policies: dict[str, FailoverPolicy]
    state: TargetState = A
    ranks: int = 2
    hot: bool = True
    dice: Callable[[], float] = lambda: 1.0
    now: float = 1000.0
    sick: set[str] = field(default_factory=set)
    side: str = "read"
    bypass: list[bool] = field(default_factory=list)
    opened: dict[str, float] = field(default_factory=dict)
    moves: list[tuple[float, str, str | None, str]] = field(default_factory=list)  # time, step, to, mode
    log: list[tuple[float, str]] = field(default_factory=list)
    blocked: str = ""
    bypass_fails: int = 0

    def __post_init__(self) -> None:
        self.bypass = self.bypass or [False] * self.ranks
        self.machine = Failover(Record(policies=self.policies), lambda: self.dice())

    def restart(self) -> None:
        """The sidecar ends and starts again with what was durable."""
        self.machine = Failover(self.machine.record(), lambda: self.dice())

    def fail(self, *names: str) -> None:
        self.sick |= set(names)
        self.opened.update(dict.fromkeys(names, self.now))

    def heal(self, *names: str) -> None:
        self.sick -= set(names)

    def facts(self) -> Facts:
        name = self.state.backend
        one = None
        if name is not None:
            state = "open" if name in self.sick else "closed"
            one = guard(name, state, self.side, self.now - self.opened.get(name, self.now) if name in self.sick else 0)
        views = tuple(RankView(rank, one, self.bypass[rank]) for rank in range(self.ranks))
        return Facts(desired=self.state, ranks=views, can_hot=self.hot, blocked=self.blocked)

    def step(self) -> float | None:
        """One decision, done; the time that it waits for, None when something was done."""
        decision = self.machine.next(self.now, self.facts())
        match decision:
            case Wait(until=until):
                return until
            case SetBypass(enabled=enabled):
                ok = self.bypass_fails <= 0
                self.bypass_fails -= 1
                if ok:
                    self.bypass = [enabled] * self.ranks
                self.machine.bypass_done(self.now, decision, ok)
                self.log.append((self.now, "bypass" if enabled else "unbypass"))
            case Move(target=target, step=step, mode=mode):
                ok = target.backend is None or target.backend not in self.sick
                self.moves.append((self.now, step if ok else f"{step} failed", target.backend, mode))
                self.log.append((self.now, f"{step} {target.backend}" if ok else f"failed {target.backend}"))
                if ok:
                    self.state, self.bypass = target, [False] * self.ranks  # a new set starts without bypass
                self.machine.moved(self.now, decision, target if ok else None, "scripted")
        return None

    def run(self, seconds: float) -> "World":
        """Let ``seconds`` pass."""
        end = self.now + seconds
        for _ in range(10_000):
            until = self.step()
            if until is None:
                continue
            if until >= end or math.isinf(until):
                self.now = end
                while self.step() is None:
                    pass
                return self
            assert until > self.now, f"a wait into the past: {self.machine.state} {self.machine.reason}"
            self.now = until
        raise AssertionError("the machine never rests")

    @property
    def did(self) -> list[str]:
        return [what for _, what in self.log]

    @property
    def notes(self) -> list[str]:
        return [step for step, *_ in self.machine.notes]
