"""Shared set-up: the repository root on sys.path, named skips, and a summary of what was skipped and why.

A test that this machine cannot run is skipped with a reason that names what is missing; the run ends with the list,
so that a green run never hides what it did not look at.
"""

import os
import shutil
import signal
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # tests import their helpers as tests.rigs.x
    sys.path.insert(0, str(ROOT))

# A shell starts what it runs in the background with SIGINT ignored, and every child inherits that: not here, where
# programs are interrupted on purpose.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def missing_for_root() -> str | None:
    """Why tests marked needs_root cannot run here; None when they can."""
    return None if os.geteuid() == 0 else f"needs root; this run has uid {os.geteuid()}"


def missing_for_systemd() -> str | None:
    """Why a private systemd cannot be booted here; None when it can."""
    if os.geteuid() != 0:
        return f"needs root for a private systemd; this run has uid {os.geteuid()}"
    if not Path("/lib/systemd/systemd").exists():
        return "needs systemd: /lib/systemd/systemd is missing (package systemd)"
    for tool, package in (("systemctl", "systemd"), ("dbus-daemon", "dbus"), ("unshare", "util-linux")):
        if shutil.which(tool) is None:
            return f"needs {tool} (package {package})"
    if not any(" cgroup2 " in line for line in Path("/proc/self/mounts").read_text().splitlines()):
        return "needs a mounted cgroup2 hierarchy"
    return None


REQUIREMENTS = {"needs_root": missing_for_root, "needs_systemd": missing_for_systemd}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run, with the reason."""
    for name, missing in REQUIREMENTS.items():
        marked = [item for item in items if item.get_closest_marker(name)]
        reason = missing() if marked else None
        for item in marked:
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What was skipped and why, grouped by reason; said also when it is nothing."""
    reasons: dict[str, list[str]] = defaultdict(list)
    for report in terminalreporter.stats.get("skipped", []):
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reasons[why.removeprefix("Skipped: ")].append(report.nodeid)
    terminalreporter.section("skipped tests and why")
    if not reasons:
        terminalreporter.write_line("nothing was skipped")
    for why, nodes in sorted(reasons.items()):
        terminalreporter.write_line(f"{len(nodes)} skipped: {why}")
        for node in sorted(set(nodes)):
            terminalreporter.write_line(f"    {node}")
