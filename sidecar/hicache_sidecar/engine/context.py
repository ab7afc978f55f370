"""What the coordinator's parts share: the link side, the journal, the jobs, and the rule "one operation at a time"."""

import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import trio

from hicache_proto import api
from hicache_proto.errors import HicacheError, Internal, NoEngine, OperationInProgress
from hicache_proto.hooklink import AskReport, CallBody
from hicache_sidecar.core.actor import Actor
from hicache_sidecar.core.faults import OFF, Faults
from hicache_sidecar.engine import status
from hicache_sidecar.engine.counters import Counters
from hicache_sidecar.engine.events import EventHub
from hicache_sidecar.engine.fanout import FanOut, RankAnswer
from hicache_sidecar.engine.operation import KEEP_JOBS, STOPPING, Job
from hicache_sidecar.engine.registry import Registry, Session
from hicache_sidecar.engine.rows import Rows
from hicache_sidecar.engine.settings import EngineSettings
from hicache_sidecar.engine.sums import Sums
from hicache_sidecar.store.errors import JournalFailed
from hicache_sidecar.store.journal import Journal

log = logging.getLogger("hicache_sidecar.engine")

SETTLED_LATER = f"{STOPPING}; the outcome is settled at its next start"


@dataclass(eq=False, kw_only=True)
class Context:
    """Shared state of one daemon. Only the loop's thread touches it."""

    registry: Registry
    fanout: FanOut
    book: Journal
    settings: EngineSettings
    counters: Counters
    hub: EventHub
    nursery: trio.Nursery
    faults: Faults = OFF
    running: Job | None = None
    leaving: bool = False  # the daemon stops
    recovering: str = ""  # why changes are refused after a start; empty once recovery ended
    digest: str = ""  # config digest of the desired state, once a rank has told it
    split: str = ""  # first contact found ranks that disagree
    failover: str = ""  # a store that is left alone by a failover policy, for the status
    jobs: OrderedDict[str, Job] = field(default_factory=OrderedDict)
    sums: Sums = field(default_factory=Sums)
    rows: Rows = field(default_factory=Rows)
    # Ranks that were lost while a config was being attached: its digest, and the process that ran then (F19).
    guilty: dict[str, str] = field(default_factory=dict)  # found to kill the engine, and not in the journal yet
    suspects: dict[int, tuple[str, tuple[int, int, str]]] = field(default_factory=dict)
    # Told of every operation's end before anybody is woken by it; must neither wait nor raise.
    on_end: list[Callable[[Job], None]] = field(default_factory=list)

    # ---- jobs

    def claim(self, job: Job) -> None:
        """Make ``job`` the running one.

        Raises:
            OperationInProgress: another runs; its id is in the error (F7).
        """
        if self.leaving:
            raise OperationInProgress(STOPPING, details={"reason": "stopping"})
        if self.running is not None:
            raise OperationInProgress(
                f"{self.running.kind} {self.running.id} is running since {self.running.started_at}"
                f" (phase {self.running.phase})",
                operation_id=self.running.id,
                hint=f"wait until it is done, or `hicachectl cancel {self.running.id}`",
                details={"kind": self.running.kind, "phase": self.running.phase, "since": self.running.started_at},
            )
        if self.recovering:
            raise OperationInProgress(f"recovery is not over: {self.recovering}", details={"reason": "recovering"})
        self.running = job
        self.jobs[job.id] = job
        while len(self.jobs) > KEEP_JOBS:
            self.jobs.popitem(last=False)

    def launch(self, job: Job, work: Callable[[Job], Awaitable[api.Document]]) -> None:
        """Run ``work`` for the claimed job in the daemon's own nursery: it goes on when the client leaves."""
        self.nursery.start_soon(self._work, job, work)

    async def _work(self, job: Job, work: Callable[[Job], Awaitable[api.Document]]) -> None:
        answer: api.Document | None = None
        error: HicacheError | None = None
        try:
            with job.scope:
                answer = await work(job)
            if job.scope.cancelled_caught:
                error = Internal(SETTLED_LATER, details={"reason": "stopping"})
        except JournalFailed as exc:
            self.release(job, None, exc)
            log.critical("the journal failed, the daemon ends: %s", exc.message)
            raise
        except HicacheError as exc:
            error = exc
        except Exception as exc:
            log.exception("operation %s failed by a defect", job.id)
            error = Internal(f"a defect of the sidecar: {type(exc).__name__}", operation_id=job.id)
        except BaseException:
            self.release(job, None, Internal(SETTLED_LATER, details={"reason": "stopping"}))
            raise
        self.faults.hit("answer", "before_send")
        self.release(job, answer, error)

    def release(self, job: Job, answer: api.Document | None, error: HicacheError | None) -> None:
        """End a job, count it and free the slot."""
        result = error.code if error is not None else "success"
        self.counters.finished(job.kind, result, trio.current_time() - job.started)
        if job.n == 0 and error is not None:
            self.counters.refusals[job.kind, result] += 1
        if self.running is job:
            self.running = None
        job.finish(answer, error)
        for listener in self.on_end:
            listener(job)
        self.write_audit(job.actor, job.kind, result, operation_id=job.id, reason=job.clean(job.reason))
        self.registry.changed.unpark_all()

    def judge(self, session: Session) -> None:
        """A new process in the place of one that died during an operation proves that the config killed it (F19)."""
        suspect = self.suspects.pop(session.rank, None) if session.alive else None
        if suspect is None:
            return
        digest, process = suspect
        same = process == (session.hello.pid, session.hello.epoch, session.hello.incarnation)
        if digest and not same:  # the same process was only out of reach
            reason = f"the process of rank {session.rank} died while this config was being attached"
            log.error("config quarantined: %s", reason)
            self.hub.publish("quarantined", rank=session.rank, reason=reason)
            self.guilty[digest] = reason  # at once: this very session would be brought to it again

    def write_audit(self, actor: str, action: str, result: str, **facts: Any) -> None:
        """An event per change, with the principal; the audit log is written around the service (F118)."""
        self.hub.publish("audit", actor=actor, action=action, result=result, **facts)

    async def leave(self, within_s: float) -> None:
        """The daemon stops: nothing new begins; what runs goes back to the old state, or ends if the new one is
        decided. What is not over ``within_s`` seconds later is left to the leases and the journal."""
        self.leaving = True
        job = self.running
        if job is None:
            return
        job.cancel(STOPPING)
        with trio.move_on_after(within_s):
            await job.done.wait()
        job.scope.cancel()

    # ---- ranks

    def require_engine(self) -> None:
        """All expected ranks are connected.

        Raises:
            NoEngine: naming those that are not (F115).
        """
        registry = self.registry
        if not registry.live:
            raise NoEngine("no rank of the engine is connected", details={"reason": "no_rank"})
        if missing := registry.missing_ranks:
            names = ", ".join(str(rank) for rank in missing)
            raise NoEngine(
                f"not all ranks are connected: missing {names} of {registry.expected}",
                details={"reason": "missing_ranks", "missing_ranks": missing, "expected": registry.expected},
            )

    def sessions(self) -> dict[int, str]:
        """Connected ranks and their sessions."""
        return {rank: s.id for rank, s in self.registry.live.items()}

    async def ask_all(self, body: CallBody, deadline: float) -> dict[int, RankAnswer]:
        """A stateless question to every connected rank."""
        return await self.fanout.ask(self.sessions(), 0, body, deadline)

    async def refresh(self, within_s: float) -> dict[int, RankAnswer]:
        """Fresh reports from every rank that answers in time; the registry keeps them."""
        return await self.ask_all(AskReport(), trio.current_time() + within_s)

    def status(self) -> api.StatusDocument:
        """The status document from the last reports."""
        warnings = [self.recovering] if self.recovering else []
        quarantined = self.book.quarantined.get(self.digest, "") if self.digest else ""
        if quarantined:
            warnings.append(f"the desired config is quarantined: {quarantined}")
        if self.split:
            warnings.append(self.split)
        if self.failover:
            warnings.append(self.failover)
        if self.registry.live:
            warnings += [f"rank {rank} is not connected{self._why_lost(rank)}" for rank in self.registry.missing_ranks]
        return status.status_document(
            self.registry, self.sums, self.rows, self.book.desired, self.digest, self.running, warnings, quarantined
        )

    def _why_lost(self, rank: int) -> str:
        session = self.registry.ranks.get(rank)
        return f": {session.why_lost}" if session is not None and session.why_lost else ""

    def actor_name(self, actor: Actor) -> str:
        """The principal, as history and audit show it."""
        return actor.name
