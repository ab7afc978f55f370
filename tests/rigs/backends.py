"""BK: a storage backend in memory whose every call can be scripted, in this process or, by its options, in another.

In this process: ``rig = BK.rig("a")``, then ``rig.faults["batch_get"] = Fault(error=OSError)``; the backend is made
with ``options={"store": "a"}``. In an engine process (allow-listed as ``tests.rigs.backends:BK``): the same faults as
plain values in ``options["faults"]``, e.g. ``{"open": {"error": "PermissionError"}}``, only on one rank with
``"tp_rank"`` or ``"claim"``, or while a file exists with ``"while_file"``; ``options["log"]`` names a file that gets
one line per open and close.
"""

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from hicache_hooks.backends.base import Got, Manifest, StoreContext
from hicache_proto.model import LAYOUTS

HANG_MAX_S = 60.0  # a test that forgets to release ends all the same
_ERRORS: dict[str, type[BaseException]] = {
    cls.__name__: cls
    for cls in (OSError, PermissionError, TimeoutError, RuntimeError, ValueError, NotImplementedError, SystemExit)
}


@dataclass
class Fault:
    """What happens in one method. ``every`` 3: in calls 3, 6, 9...; ``times``: at most so often."""

    error: type[BaseException] | str | None = None
    text: str = "scripted"
    every: int = 1
    times: int | None = None
    delay_s: float = 0.0
    hang: bool = False  # until Rig.release is set
    answer: str = ""  # "none": as if nothing was there or taken; "all": everything; "shape"; "short"; "bytes"
    while_file: str = ""  # only while this file exists
    tp_rank: int | None = None  # only on this rank
    claim: str = ""  # only in the one process that creates this file first: "on one rank only" without knowing which


class _Events(dict[str, threading.Event]):
    """An event per method. Made under a lock: two threads that ask first must get the same one."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()

    def __missing__(self, method: str) -> threading.Event:
        with self._lock:
            return self.setdefault(method, threading.Event())


@dataclass
class Rig:
    """One store's content and script, shared by every BK with this name in the process."""

    data: dict[str, bytes] = field(default_factory=dict)
    faults: dict[str, Fault] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)
    registered: list[int] = field(default_factory=list)  # bytes of each registered pool
    set_aside: list[tuple[str, str]] = field(default_factory=list)
    release: threading.Event = field(default_factory=threading.Event)
    entered: dict[str, threading.Event] = field(default_factory=_Events)
    fired: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)
    epoch: int = 1

    @property
    def open_now(self) -> int:
        """Opens that no close has followed."""
        return self.calls["open"] - self.calls["close"]

    def forget(self) -> None:
        """The store lost everything (F70)."""
        self.data.clear()
        self.epoch += 1


_RIGS: dict[str, Rig] = {}


def _claimed(path: str) -> bool:
    """True in the process that made ``path``."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        with open(path) as file:
            return file.read() == str(os.getpid())
    os.write(fd, str(os.getpid()).encode())
    os.close(fd)
    return True


class BK:
    """The scriptable backend (contract: hicache_hooks.backends.base.Backend)."""

    contract: ClassVar[int] = 1
    manifest: ClassVar[Manifest | None] = Manifest(
        name="bk", layouts=LAYOUTS, parallel_axes=("tp", "pp"), summary="scriptable, in memory"
    )

    def __init__(self, options: dict[str, Any], context: StoreContext) -> None:
        self.rig_ = self.rig(options.get("store", "default"))
        self.context = context
        self.log = options.get("log")
        self.closed = False
        for method, fault in options.get("faults", {}).items():
            self.rig_.faults[method] = Fault(**fault)
        self._enter("constructor")

    @staticmethod
    def rig(name: str = "default") -> Rig:
        """The rig of this name, made when it is not there."""
        return _RIGS.setdefault(name, Rig())

    @staticmethod
    def reset() -> None:
        """Forget every rig; wakes what hangs."""
        for rig in _RIGS.values():
            rig.release.set()
        _RIGS.clear()

    def _enter(self, method: str) -> Fault:
        """Count the call and run its script; returns the fault that applies now, or an empty one."""
        rig = self.rig_
        with rig.lock:
            rig.calls[method] += 1
            fault = rig.faults.get(method, Fault())
            applies = (
                rig.calls[method] % fault.every == 0
                and (fault.times is None or rig.fired[method] < fault.times)
                and (not fault.while_file or os.path.exists(fault.while_file))
                and fault.tp_rank in (None, self.context.tp_rank)
                and (not fault.claim or _claimed(fault.claim))
            )
            if not applies:
                return Fault()
            rig.fired[method] += 1
        rig.entered[method].set()
        if fault.delay_s:
            time.sleep(fault.delay_s)  # a slow store, not synchronisation
        if fault.hang:
            rig.release.wait(HANG_MAX_S)
        if fault.error is not None:
            raise (_ERRORS[fault.error] if isinstance(fault.error, str) else fault.error)(fault.text)
        return fault

    def _write_log(self, event: str) -> None:
        if self.log:
            line = json.dumps({"event": event, "pid": os.getpid(), "tp_rank": self.context.tp_rank}) + "\n"
            fd = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.write(fd, line.encode())
            os.close(fd)

    def open(self) -> None:
        self._write_log("open")
        self._enter("open")

    def register(self, pool: memoryview) -> None:
        self._enter("register")
        self.rig_.registered.append(pool.nbytes)

    def batch_put(self, keys: Sequence[str], pages: Sequence[memoryview]) -> list[bool]:
        fault = self._enter("batch_put")
        self._require_open()
        if fault.answer == "none":
            return [False] * len(keys)
        for key, page in zip(keys, pages, strict=True):
            self.rig_.data[key] = bytes(page)
        return [True] * (len(keys) + (fault.answer == "shape"))

    def batch_get(self, keys: Sequence[str], pages: Sequence[memoryview]) -> list[Got]:
        fault = self._enter("batch_get")
        self._require_open()
        if fault.answer in ("none", "all"):
            return [Got.MISS if fault.answer == "none" else Got.HIT] * len(keys)
        out = []
        for key, page in zip(keys, pages, strict=True):
            data = self.rig_.data.get(key)
            if data is None:
                out.append(Got.MISS)
                continue
            half = len(data) // 2
            page[: half if fault.answer == "short" else None] = data[:half] if fault.answer == "short" else data
            if fault.answer == "bytes":
                page[0] ^= 0xFF
            out.append(Got.HIT)
        return out[1:] if fault.answer == "shape" else out

    def batch_exists(self, keys: Sequence[str]) -> list[bool]:
        fault = self._enter("batch_exists")
        self._require_open()
        if fault.answer in ("none", "all"):
            return [fault.answer == "all"] * len(keys)
        return [key in self.rig_.data for key in keys]

    def delete(self, keys: Sequence[str]) -> int:
        self._enter("delete")
        self._require_open()
        return sum(self.rig_.data.pop(key, None) is not None for key in keys)

    def set_aside(self, key: str, reason: str) -> None:
        self._enter("set_aside")
        self.rig_.set_aside.append((key, reason))
        self.rig_.data.pop(key, None)

    def clear(self) -> int:
        self._enter("clear")
        self._require_open()
        mine = [key for key in self.rig_.data if key.startswith(f"{self.context.namespace}.")]
        return self.delete(mine)

    def health(self) -> dict[str, Any]:
        self._enter("health")
        self._require_open()
        return {"inner": "dict", "epoch": self.rig_.epoch, "pages": len(self.rig_.data)}

    def close(self) -> None:
        self._write_log("close")
        self.closed = True
        self._enter("close")

    def _require_open(self) -> None:
        if self.closed:
            raise RuntimeError("used after close")


class EpochBK(BK):
    """Says which epoch it is in (F70)."""

    def epoch(self) -> str:
        self._enter("epoch")
        self._require_open()
        return str(self.rig_.epoch)


class RememberingBK(BK):
    """Says of what it has stored or found that it exists, without looking."""

    def __init__(self, options: dict[str, Any], context: StoreContext) -> None:
        super().__init__(options, context)
        self.memory: set[str] = set()

    def batch_put(self, keys: Sequence[str], pages: Sequence[memoryview]) -> list[bool]:
        done = super().batch_put(keys, pages)
        self.memory.update(keys)
        return done

    def batch_exists(self, keys: Sequence[str]) -> list[bool]:
        return [key in self.memory or key in self.rig_.data for key in keys]

    def confirm(self, keys: Sequence[str]) -> list[bool]:
        return super().batch_exists(keys)

    def delete(self, keys: Sequence[str]) -> int:
        self.memory.difference_update(keys)
        return super().delete(keys)

    def forget(self) -> None:
        self.memory.clear()


class RegisteringBK(BK):
    """Needs the pools registered."""

    manifest = Manifest(name="bk", layouts=LAYOUTS, needs_registration=True)


class PageFirstBK(BK):
    """Cannot use every layout (F47), no parallel axes (F76)."""

    manifest = Manifest(name="bk", layouts=("page_first", "page_head"))


class NoManifestBK(BK):
    """Says nothing about itself (F76)."""

    manifest = None


class NoBatchGetBK(BK):
    """Lacks a newer batch method (F15)."""

    batch_get = None  # type: ignore[assignment]


class OtherConstructorBK(BK):
    """Another constructor contract (F18)."""

    constructed: ClassVar[int] = 0

    def __init__(self, config: dict[str, Any]) -> None:
        type(self).constructed += 1
