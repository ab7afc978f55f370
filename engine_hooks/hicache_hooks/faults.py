"""Fault points by name, off unless ``HICACHE_FAULTS`` names them: ``name=action[,name=action...]``.

A name is ``<phase>.<boundary>``: phase = the wire name of a call (``prepare``, ``freeze``, ``thaw``, ``commit``,
``finalize``, ``undo``) or ``lease_end``, ``build``, ``close`` (these three only ``before_apply``); boundary, in the
order in which they are met:

* ``recv``: the agent took the message off the socket;
* ``before_apply``, ``after_apply``: the scheduler thread (``build``, ``close``: their own threads);
* ``before_send``, ``after_send``: the agent, around the answer.

Actions: ``kill`` (SIGKILL), ``stop`` (SIGSTOP), ``error`` (raises), ``hang:SECONDS`` (the thread sleeps),
``cut`` (the agent drops its connection; only at ``recv`` and the sends). Each fires once; ``name=action@all``
fires every time. Production code meets one dictionary test per boundary and nothing else.
"""

import os
import signal
import time
from collections.abc import Mapping

ENV = "HICACHE_FAULTS"
MAX_HANG_S = 600.0  # a typo must not park a process for days

PHASES = ("prepare", "freeze", "thaw", "commit", "finalize", "undo", "lease_end", "build", "close")
LOCAL_PHASES = ("lease_end", "build", "close")  # no message stands behind them
BOUNDARIES = ("recv", "before_apply", "after_apply", "before_send", "after_send")


class FaultError(Exception):
    """Raised by the action ``error``."""


class LinkCut(Exception):
    """Raised by the action ``cut``."""


class Faults:
    """The fault points of one process."""

    __slots__ = ("_always", "_plan", "hits")

    def __init__(self, spec: str = "") -> None:
        """Parse a specification.

        Raises:
            ValueError: an unknown name or action; silence would make a crash test pass for nothing.
        """
        self._plan: dict[str, str] = {}
        self._always: set[str] = set()
        self.hits: list[str] = []
        for item in filter(None, (part.strip() for part in spec.split(","))):
            name, sep, action = item.partition("=")
            action, _, every = action.partition("@")
            if not sep or every not in ("", "all"):
                raise ValueError(f"fault {item!r}: want name=action or name=action@all")
            _check(name, action)
            self._plan[name] = action
            if every:
                self._always.add(name)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> "Faults":
        """The faults that the environment asks for. Raises as the constructor."""
        return cls(environ.get(ENV, ""))

    def __bool__(self) -> bool:
        return bool(self._plan)

    def hit(self, phase: str, boundary: str) -> None:
        """Pass a fault point.

        Raises:
            FaultError, LinkCut: as planned.
        """
        if not self._plan:
            return
        name = f"{phase}.{boundary}"
        action = self._plan.get(name)
        if action is None:
            return
        if name not in self._always:
            del self._plan[name]
        self.hits.append(name)
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif action == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif action == "error":
            raise FaultError(f"fault point {name}")
        elif action == "cut":
            raise LinkCut(name)
        else:
            time.sleep(float(action.removeprefix("hang:")))


def _check(name: str, action: str) -> None:
    phase, _, boundary = name.partition(".")
    if phase not in PHASES or boundary not in BOUNDARIES:
        raise ValueError(f"no fault point {name!r}: phases {PHASES}, boundaries {BOUNDARIES}")
    if phase in LOCAL_PHASES and boundary != "before_apply":
        raise ValueError(f"no fault point {name!r}: {phase} has only before_apply")
    if action in ("kill", "stop", "error"):
        return
    if action == "cut":
        if boundary not in ("recv", "before_send", "after_send"):
            raise ValueError(f"fault {name}: only the agent's boundaries can cut the link")
        return
    kind, _, seconds = action.partition(":")
    try:
        if kind == "hang" and 0 <= float(seconds) <= MAX_HANG_S:
            return
    except ValueError:
        pass
    raise ValueError(f"fault {name}: no action {action!r} (kill, stop, error, cut, hang:SECONDS up to {MAX_HANG_S:g})")
