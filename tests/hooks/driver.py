"""Drives a RankHook without a socket: calls go in, answers are read from the agent's outbox, time is a number."""

import threading
import time
from collections.abc import Callable
from typing import Any

from tests.rigs.light_adapter import LightAdapter

from hicache_hooks.faults import Faults
from hicache_hooks.hook import RankHook
from hicache_hooks.world import Injector
from hicache_proto.hooklink import (
    Answer,
    Call,
    CallBody,
    Commit,
    Finalize,
    Freeze,
    HookMessage,
    Notice,
    Prepare,
    Thaw,
    Undo,
    phase_of,
)
from hicache_proto.model import RankIdentity, TargetState
from hicache_proto.transaction import RankPhase

DEADLINE_S = 10.0  # of waits for real threads; never reached in a passing run
FILE = TargetState(backend="file", extra_config='{"path": "/a"}')


class FakeClock:
    """Monotonic time that moves when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def forward(self, seconds: float) -> None:
        self.now += seconds


class Driver:
    """One rank, its scheduler thread being the test."""

    def __init__(
        self,
        *,
        faults: str = "",
        identity: RankIdentity | None = None,
        injector: Injector | None = None,
        clock: FakeClock | None = None,
        close_timeout_s: float = 3.0,
        adapter: type[LightAdapter] = LightAdapter,
    ) -> None:
        self.clock = clock or FakeClock()
        self.woken = threading.Event()
        self.adapter = adapter(identity, self.woken.set)
        self.hook = RankHook(
            self.adapter,
            "ipc:///nowhere",
            engine_id="e",
            incarnation="i",
            injector=injector,
            clock=self.clock,
            faults=Faults(faults),
            close_timeout_s=close_timeout_s,
            start=False,
        )
        self.answers: list[Answer] = []
        self.notices: list[Notice] = []
        self._calls = 0

    # -- in

    def send(self, body: CallBody, n: int = 0) -> Call:
        """Deliver one call, as the agent thread would."""
        self._calls += 1
        call = Call(session="s", n=n, phase=phase_of(body), call=self._calls, body=body)
        self.hook.deliver(call)
        return call

    def turn(self) -> list[Answer]:
        """One scheduler pass; the answers that it gave."""
        if self.hook.pending:
            self.hook.run_pending()
        return self.read()

    def ask(self, body: CallBody, n: int = 0) -> Answer:
        """Deliver a call that is answered within its own pass."""
        call = self.send(body, n)
        answers = [a for a in self.turn() if a.call == call.call]
        assert len(answers) == 1, answers
        return answers[0]

    def until(self, done: Callable[[], bool]) -> None:
        """Scheduler passes, woken by the hook, until ``done``."""
        limit = time.monotonic() + DEADLINE_S
        while not done():
            assert time.monotonic() < limit, "not reached"
            self.woken.wait(0.05)
            self.woken.clear()
            self.turn()

    def answer_to(self, call: Call) -> Answer:
        """Scheduler passes until ``call`` is answered."""
        self.until(lambda: any(a.call == call.call for a in self.answers))
        return next(a for a in self.answers if a.call == call.call)

    # -- out

    def read(self) -> list[Answer]:
        """Take what is in the outbox."""
        new: list[Answer] = []
        while self.hook.agent._out:
            _, make, _ = self.hook.agent._out.popleft()
            message: HookMessage = make()
            if isinstance(message, Answer):
                new.append(message)
            elif isinstance(message, Notice):
                self.notices.append(message)
        self.answers += new
        return new

    @property
    def phase(self) -> RankPhase:
        return self.hook.transaction.record.phase

    @property
    def ended(self) -> str:
        return self.hook.transaction.record.ended.value

    @property
    def backend(self) -> str | None:
        return self.adapter.installed.state.backend

    # -- an operation's steps

    def prepare(self, n: int, target: TargetState = FILE, **options: Any) -> Answer:
        return self.answer_to(
            self.send(Prepare(target=target, prepared_s=options.pop("prepared_s", 30.0), **options), n)
        )

    def freeze(self, n: int, round: int = 1, drain: bool = False, freeze_s: float = 5.0) -> Answer:
        return self.ask(Freeze(round=round, freeze_s=freeze_s, drain=drain), n)

    def thaw(self, n: int, round: int = 1) -> Answer:
        return self.ask(Thaw(round=round, prepared_s=30.0), n)

    def commit(self, n: int, in_doubt_s: float = 10.0) -> Answer:
        return self.ask(Commit(in_doubt_s=in_doubt_s), n)

    def finalize(self, n: int) -> Answer:
        return self.answer_to(self.send(Finalize(), n))

    def undo(self, n: int) -> Answer:
        return self.ask(Undo(reason="test"), n)

    def move(self, n: int, target: TargetState = FILE) -> None:
        """A whole operation that succeeds."""
        for answer in (self.prepare(n, target), self.freeze(n), self.commit(n), self.finalize(n)):
            assert answer.ok, answer

    def closed(self, backend: str = "file") -> list[int]:
        """How often each set of ``backend`` was closed."""
        return [s.closed for s in self.adapter.sets if s.state.backend == backend]

    def settle(self) -> None:
        """Until every set but the installed one is closed."""
        self.until(lambda: all(s.closed == 1 for s in self.adapter.sets if s is not self.adapter.installed))
