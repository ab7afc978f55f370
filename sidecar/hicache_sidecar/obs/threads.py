"""Metric families of the worker threads, by what they do (failures.md F39, F90).

A thread's own name holds the number of its storage set, and that of a thread that was given up a number too: as labels
they would be other series after each attach. So all that do the same are one series: down when one of them is down,
stalled as long as the longest, restarted as often as all together (F38).
"""

import re
from collections.abc import Iterator, Mapping

from hicache_proto.model import RankReport, ThreadReport

Labels = tuple[str, ...]
Family = tuple[str, str, str, Labels, list[tuple[Labels, float]]]  # kind, name, help, label names, samples

MAX_THREADS = 32  # per rank
_OWN = re.compile(r"hicache-.+?-\d+-([a-z0-9]+-\d+)(?:-late-\d+)?")  # hicache-<backend>-<set>-<kind>-<index>


def role(name: str) -> str:
    """``hicache-file-3-prefetch-0-late-2`` is ``prefetch-0``; a name of another make stays."""
    found = _OWN.fullmatch(name)
    return found[1] if found else name[:64]


def families(reports: Mapping[tuple[str], RankReport]) -> Iterator[Family]:
    """From the last report of each rank."""
    by_role: dict[Labels, list[ThreadReport]] = {}
    for rank, report in reports.items():
        for thread in report.threads[:MAX_THREADS]:
            by_role.setdefault((*rank, role(thread.name)), []).append(thread)
    labels = ("rank", "thread")
    yield (
        "gauge", "hicache_storage_thread_up", "1 while the worker thread lives", labels,
        [(key, min(one.alive for one in threads)) for key, threads in by_role.items()],
    )  # fmt: skip
    yield (
        "gauge", "hicache_storage_thread_stalled_seconds", "Time without an end of a call; 0: not stalled", labels,
        [(key, max(one.stalled_s for one in threads)) for key, threads in by_role.items()],
    )  # fmt: skip
    yield (
        "gauge", "hicache_storage_thread_restarts", "Times that a thread of the installed set died and was replaced",
        labels, [(key, sum(one.restarts for one in threads)) for key, threads in by_role.items()],
    )  # fmt: skip
    yield (
        "gauge", "hicache_abandoned_threads", "Threads given up while a store was built or asked, and not back",
        ("rank",), [(rank, report.abandoned) for rank, report in reports.items()],
    )  # fmt: skip
