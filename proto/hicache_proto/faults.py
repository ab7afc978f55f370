"""Fault points: named places where a test makes a process die, stop, stand still, fail or lose its link.

Both programs use this; each has its own list of points (``hicache_hooks.faults``, ``hicache_sidecar.core.faults``).
Off unless named: ``name=action[@when]``, several by comma. Production code meets one test of an empty dictionary per
boundary and nothing else. A name or action that does not exist is an error: silence would make a crash test pass
for nothing.

Actions:

* ``kill`` (SIGKILL), ``stop`` (SIGSTOP) of this process; ``hang:SECONDS``: the thread sleeps;
* ``hold:SECONDS``: the thread waits at most so long for whoever armed the point (below) to let it go;
* ``error`` (raises), ``cut`` (the connection is dropped): only where the point says so.

When: by default once, the first time; ``@all``: every time; ``@/path``: each time that the file ``/path`` is there.
Firing renames it to ``/path.fired``, so one process of many fires, at the moment that the test chose, and a process
that is started again does not; ``hold`` ends when ``/path.fired`` is removed.
"""

import os
import signal
import time
from collections.abc import Mapping

MAX_HANG_S = 600.0  # a typo must not park a process for days
HOLD_POLL_S = 0.002  # a test looks at the other end; nothing else waits here
FIRED = ".fired"

PLAIN = frozenset({"kill", "stop", "hang", "hold"})
RAISING = PLAIN | {"error"}
LINKED = RAISING | {"cut"}


class FaultError(Exception):
    """Raised by the action ``error``."""


class LinkCut(Exception):
    """Raised by the action ``cut``."""


class FaultPlan:
    """What is to happen at the fault points of one process. ``hits`` are the points that fired, in order."""

    __slots__ = ("_plan", "hits")

    def __init__(self, points: Mapping[str, frozenset[str]], spec: str = "") -> None:
        """Parse a specification.

        Args:
            points: the process's fault points and the actions that each can do.

        Raises:
            ValueError: an unknown name or action.
        """
        self._plan: dict[str, list[tuple[str, str]]] = {}
        self.hits: list[str] = []
        for item in filter(None, (part.strip() for part in spec.split(","))):
            name, sep, rest = item.partition("=")
            action, at, when = rest.partition("@")
            if not sep or (at and when != "all" and not when.startswith("/")):
                raise ValueError(f"fault {item!r}: want name=action, name=action@all or name=action@/path")
            _check(points, name, action, when)
            self._plan.setdefault(name, []).append((action, when))

    def __bool__(self) -> bool:
        return bool(self._plan)

    def hit(self, phase: str, boundary: str) -> None:
        """Pass the fault point ``phase.boundary``.

        Raises:
            FaultError, LinkCut: as planned.
        """
        if not self._plan:
            return
        name = f"{phase}.{boundary}"
        for entry in self._plan.get(name, ()):
            if self._takes(name, *entry):
                self.hits.append(name)
                _perform(name, *entry)
                return

    def _takes(self, name: str, action: str, when: str) -> bool:
        if when.startswith("/"):
            try:
                os.rename(when, when + FIRED)
            except OSError:
                return False  # not armed, or another process was first
        elif not when:
            entries = [entry for entry in self._plan[name] if entry != (action, when)]
            self._plan = {**self._plan, name: entries}
        return True


def _perform(name: str, action: str, when: str) -> None:
    kind, _, seconds = action.partition(":")
    match kind:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "error":
            raise FaultError(f"fault point {name}")
        case "cut":
            raise LinkCut(name)
        case "hold":
            limit = time.monotonic() + float(seconds)
            while os.path.exists(when + FIRED) and time.monotonic() < limit:
                time.sleep(HOLD_POLL_S)
        case _:
            time.sleep(float(seconds))


def _check(points: Mapping[str, frozenset[str]], name: str, action: str, when: str) -> None:
    can = points.get(name)
    if can is None:
        raise ValueError(f"no fault point {name!r}: {', '.join(points)}")
    kind, colon, seconds = action.partition(":")
    timed = kind in ("hang", "hold")
    if kind not in can or timed != bool(colon):
        raise ValueError(f"fault {name}: no action {action!r} here ({', '.join(sorted(can))}; hang and hold :SECONDS)")
    if kind == "hold" and not when.startswith("/"):
        raise ValueError(f"fault {name}: hold needs @/path, or nobody could let it go")
    if timed:
        try:
            fits = 0 <= float(seconds) <= MAX_HANG_S
        except ValueError:
            fits = False
        if not fits:
            raise ValueError(f"fault {name}: {seconds!r} is no time up to {MAX_HANG_S:g} seconds")
