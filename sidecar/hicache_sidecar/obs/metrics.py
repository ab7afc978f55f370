"""Prometheus metrics, named ``hicache_...``: one custom collector that reads what the daemon already knows.

Nothing is registered at attach and nothing is removed at detach: every family is made anew for each scrape from
snapshots, so it appears exactly once whatever happened before (failures.md F89). The registry is our own, in one
process (F90); label values are ranks of the topology, names of fixed tables, or bounded (F92). ``prometheus_client`` is
imported at the first scrape: a daemon that nobody scrapes does not pay for it.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from hicache_proto import __version__
from hicache_proto.model import State
from hicache_sidecar.obs import failover, threads
from hicache_sidecar.obs.counters import Counters
from hicache_sidecar.obs.guards import GuardMetrics, latency
from hicache_sidecar.obs.usage import RESULTS, UsageTotals

if TYPE_CHECKING:
    from hicache_sidecar.engine.coordinator import Coordinator
    from hicache_sidecar.engine.registry import Session

MAX_IDLE_COUNTERS = 64  # per rank; the mandatory ones are 18
STATE_NUMBERS = {state.value: number for number, state in enumerate(State)}  # fixed: alerts are written against them

Labels = tuple[str, ...]
Samples = Iterable[tuple[Labels, float]]


class Metrics:
    """Renders /metrics for one daemon."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._usage = UsageTotals()
        self._guards = GuardMetrics()
        self._sessions: dict[int, str] = {}
        self._coordinator: Coordinator | None = None
        self._registry: Any = None

    def follow(self, coordinator: "Coordinator") -> None:
        """Begin to read ``coordinator``; its ranks' reports are added up as they arrive."""
        self._coordinator = coordinator
        coordinator.registry.on_report.append(self._on_report)

    def render(self, coordinator: "Coordinator", accept: str) -> tuple[bytes, str]:
        """Body and content type that suit the scraper's Accept header. Runs in the loop: a few milliseconds."""
        from prometheus_client.exposition import choose_encoder

        if self._coordinator is not coordinator:
            self.follow(coordinator)
        if self._registry is None:
            self._registry = self._make_registry()
        encode, content_type = choose_encoder(accept)
        body: bytes = encode(self._registry)
        return body, str(content_type)

    def _make_registry(self) -> Any:
        from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector

        registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        GCCollector(registry=registry)
        registry.register(self)
        return registry

    def _on_report(self, session: "Session") -> None:
        if self._sessions.get(session.rank) != session.id:
            self._sessions[session.rank] = session.id
            # A session of another process counts from zero; after our own restart the first report is the base.
            self._usage.restarted(session.rank)
            self._guards.restarted(session.rank)
        self._usage.observe(session.rank, session.report.usage)
        self._guards.observe(session.rank, session.report)

    # ---- collecting

    def describe(self) -> list[Any]:
        """Nothing is known before the first scrape; an empty answer keeps the registry from collecting to find out."""
        return []

    def collect(self) -> Iterator[Any]:
        """One family after the other, from snapshots; no I/O."""
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        def gauge(name: str, text: str, labels: Labels, samples: Samples) -> Any:
            family = GaugeMetricFamily(name, text, labels=labels)
            for values, value in samples:
                family.add_metric(values, value)
            return family

        def counter(name: str, text: str, labels: Labels, samples: Samples) -> Any:
            family = CounterMetricFamily(name, text, labels=labels)
            for values, value in samples:
                family.add_metric(values, value)
            return family

        yield gauge("hicache_build_info", "Version of the sidecar", ("version",), [((__version__,), 1)])
        for family, series in self._counters.families():
            yield counter(family.name, family.help, family.labels, series.items())
        if self._coordinator is None:
            return
        for kind, name, text, labels, samples in self._engine(self._coordinator):
            yield (gauge if kind == "gauge" else counter)(name, text, labels, samples)
        spread = HistogramMetricFamily(
            "hicache_storage_call_duration_seconds", "Backend calls by duration", labels=("rank", "op")
        )
        for values, buckets, seconds in latency(self._usage.totals()):
            spread.add_metric(values, buckets, seconds)
        yield spread

    def _engine(self, coordinator: "Coordinator") -> Iterator[tuple[str, str, str, Labels, Samples]]:
        registry, counts = coordinator.registry, coordinator.counters
        sessions = dict(registry.ranks)
        self._usage.keep(sessions)
        self._guards.keep(sessions)
        reports = {(str(rank),): session.report for rank, session in sorted(sessions.items())}
        yield "gauge", "hicache_ranks_expected", "Ranks that the topology promises", (), [((), registry.expected)]
        yield "gauge", "hicache_ranks_connected", "Ranks that are connected", (), [((), len(registry.live))]
        yield "gauge", "hicache_ready", "Topology complete and recovery ended", (), [((), coordinator.ready()[0])]
        status = coordinator.ctx.status()
        yield "gauge", "hicache_state", f"0..8: {', '.join(STATE_NUMBERS)}", (), [((), STATE_NUMBERS[status.state])]
        yield "gauge", "hicache_revision", "Revision of the agreed state", (), [((), status.revision)]
        yield "gauge", "hicache_drift", "Fields of ranks that differ from desired", (), [((), len(status.drift))]
        yield "gauge", "hicache_ranks_missing", "Expected, not connected", (), [((), len(status.missing_ranks))]
        yield from self._ranks(sessions, registry, reports)
        yield from self._storage()
        yield from self._guards.families(reports)
        yield (
            "counter", "hicache_operations", "Operations that began, by kind and result", ("kind", "result"),
            [(key, n) for key, n in counts.operations.items()],
        )  # fmt: skip
        yield (
            "counter", "hicache_operation_refusals", "Requests refused before anything began", ("kind", "code"),
            [(key, n) for key, n in counts.refusals.items()],
        )  # fmt: skip
        yield (
            "counter", "hicache_operation_seconds", "Time spent in operations", ("kind",),
            [((kind,), seconds) for kind, seconds in counts.operation_seconds.items()],
        )  # fmt: skip
        yield "counter", "hicache_rollbacks", "Operations that ended on the old state", (), [((), counts.rollbacks)]
        yield from failover.families(coordinator)
        yield (
            "gauge", "hicache_scheduler_stall_last_seconds", "Longest scheduler stall of the last operation", (),
            [((), counts.stall_us_last / 1e6)],
        )  # fmt: skip
        yield (
            "counter", "hicache_scheduler_stall_seconds", "Scheduler stalls of all operations and ranks", (),
            [((), counts.stall_us_total / 1e6)],
        )  # fmt: skip
        yield (
            "counter", "hicache_hook_messages", "Messages of the hook link", ("what",),
            [
                ((what,), getattr(counts, name))
                for what, name in (
                    ("received", "link_received"), ("sent", "link_sent"), ("malformed", "malformed"),
                    ("stale_reply", "stale_replies"), ("unknown_session", "unknown_sessions"),
                    ("send_failure", "send_failures"), ("hello_accepted", "hellos_accepted"),
                    ("late_finalize", "late_finalize"),
                )
            ],
        )  # fmt: skip
        yield "counter", "hicache_hook_missed_wakeups", "Wake-ups that a poll healed", (), [((), counts.missed_wakeups)]
        yield (
            "counter", "hicache_hook_hellos_refused", "Hellos refused, by reason", ("reason",),
            [((reason,), n) for reason, n in counts.hellos_refused.items()],
        )  # fmt: skip
        yield "counter", "hicache_hook_sessions_lost", "Sessions that ended by loss", (), [((), counts.sessions_lost)]

    def _ranks(
        self, sessions: Mapping[int, "Session"], registry: Any, reports: dict[tuple[str], Any]
    ) -> Iterator[tuple[str, str, str, Labels, Samples]]:
        rank = ("rank",)
        each = {(str(number),): session for number, session in sorted(sessions.items())}
        yield "gauge", "hicache_rank_up", "1 while connected", rank, [(r, s.alive) for r, s in each.items()]
        yield (
            "gauge", "hicache_rank_report_age_seconds", "Age of the last report", rank,
            [(r, registry.age_ms(s) / 1000) for r, s in each.items()],
        )  # fmt: skip
        yield (
            "gauge",
            "hicache_engine_epoch",
            "Starts of this rank",
            rank,
            [(r, s.hello.epoch) for r, s in each.items()],
        )
        yield (
            "gauge", "hicache_rank_revision", "Revision that the rank reports", rank,
            [(r, report.state.revision) for r, report in reports.items()],
        )  # fmt: skip
        yield (
            "gauge", "hicache_rank_backend_info", "Backend that the rank reports", ("rank", "backend"),
            [((*r, report.state.backend or "none"), 1) for r, report in reports.items()],
        )  # fmt: skip
        yield (
            "gauge",
            "hicache_rank_bypass",
            "1 while bypassed",
            rank,
            [(r, x.state.bypass) for r, x in reports.items()],
        )
        yield (
            "gauge", "hicache_rank_quarantined", "1 while quarantined", rank,
            [(r, bool(report.quarantine)) for r, report in reports.items()],
        )  # fmt: skip
        yield (
            "gauge",
            "hicache_rank_holds",
            "Open holds of admission",
            rank,
            [(r, len(x.holds)) for r, x in reports.items()],
        )
        yield (
            "gauge", "hicache_rank_busy", "Counters of the idle report", ("rank", "counter"),
            [
                ((*r, name), count)
                for r, report in reports.items()
                for name, count in sorted(report.idle.counters.items())[:MAX_IDLE_COUNTERS]
            ],
        )  # fmt: skip
        yield from threads.families(reports)

    def _storage(self) -> Iterator[tuple[str, str, str, Labels, Samples]]:
        totals = [((str(rank), op), sample) for (rank, op), sample in sorted(self._usage.totals().items())]
        labels = ("rank", "op")
        yield (
            "counter", "hicache_storage_keys", "Keys by result; a miss is no error", (*labels, "result"),
            [((*key, result), sample[result]) for key, sample in totals for result in RESULTS],
        )  # fmt: skip
        for name, field, text in (
            ("hicache_storage_bytes", "bytes", "Bytes moved"),
            ("hicache_storage_calls", "calls", "Calls into the backend"),
            ("hicache_storage_call_seconds", "seconds", "Time spent in backend calls"),
        ):
            yield "counter", name, text, labels, [(key, sample[field]) for key, sample in totals]
