"""The adapter of a light rank: storage sets without a cache, pages in a ledger, faults scripted by the extra config.

The script travels in the extra config, so that the sidecar's own commands reach every fault: keys
``build_delay_s``, ``build_error``, ``build_hang_s``, ``swap_error``, ``swap_back_error``, ``close_stuck``,
``publish_error``, ``backfill_slices``, ``die`` (signal number, while building), ``scratch`` (a directory where every
open set keeps a temporary file), and ``only_rank`` (the others ignore the rest). Any other key is an option of the
store.
"""

import hashlib
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from hicache_proto.errors import InvalidConfig, LayoutUnsupported, NotFound, UnknownBackend, UnsupportedByEngine
from hicache_proto.model import (
    MANDATORY_COUNTERS,
    Capabilities,
    EffectiveState,
    IdleReport,
    OpUsage,
    Plan,
    RankIdentity,
    TargetState,
    ThreadReport,
)

BACKENDS = ("file", "nixl", "light")
SCRIPT_KEYS = {
    "build_delay_s", "build_error", "build_hang_s", "swap_error", "swap_back_error", "close_stuck", "publish_error",
    "backfill_slices", "die", "only_rank", "scratch",
}  # fmt: skip
PAGES_PER_SET = 8
POLICY, WRITE = "best_effort", "write_through"


class Ledger:
    """Pages by owner; a page freed twice or owned twice raises (F42)."""

    def __init__(self, pages: int = 64) -> None:
        self._lock = threading.Lock()
        self._free = set(range(pages))
        self._owned: dict[int, str] = {}
        self.pages = pages

    def take(self, count: int, owner: str) -> list[int]:
        """Reserve pages."""
        with self._lock:
            if count > len(self._free):
                raise MemoryError(f"{count} pages wanted, {len(self._free)} free")
            taken = [self._free.pop() for _ in range(count)]
            self._owned.update(dict.fromkeys(taken, owner))
            return taken

    def give_back(self, pages: list[int]) -> None:
        """Free pages."""
        with self._lock:
            for page in pages:
                if page not in self._owned:
                    raise RuntimeError(f"page {page} is freed twice")
                del self._owned[page]
                self._free.add(page)

    def owners(self) -> dict[str, int]:
        """Pages by owner; empty when every page is free."""
        with self._lock:
            counts: dict[str, int] = {}
            for owner in self._owned.values():
                counts[owner] = counts.get(owner, 0) + 1
            return counts


class LightSet:
    """A storage set: a state, pages, one worker thread that waits to be stopped, and a temporary file if asked."""

    def __init__(self, state: EffectiveState, script: dict[str, Any], ledger: Ledger, name: str) -> None:
        self.state = state
        self.script = script
        self.name = name
        self._ledger = ledger
        self.pages = ledger.take(PAGES_PER_SET, name) if state.backend is not None else []
        self.closed = 0
        self._stop = threading.Event()
        self.thread: threading.Thread | None = None
        if state.backend is not None:
            self.thread = threading.Thread(target=self._stop.wait, name=f"light-worker-{name}", daemon=True)
            self.thread.start()
        self._file = -1
        self._path = ""
        if state.backend is not None and "scratch" in script:
            self._file, self._path = tempfile.mkstemp(".part", f"{os.getpid()}-{name}-", script["scratch"])

    def close(self, timeout_s: float) -> list[str]:
        """Stop the thread, free the pages; names of threads that did not stop."""
        if self.script.get("close_stuck"):
            return [f"light-worker-{self.name}"]
        self._stop.set()
        if self.thread is not None:
            self.thread.join(timeout_s)
        self.closed += 1
        path, self._path = self._path, ""
        if path:
            os.close(self._file)
            os.unlink(path)
        pages, self.pages = self.pages, []
        self._ledger.give_back(pages)
        return []


class LightAdapter:
    """EngineAdapter over nothing but numbers. Attributes may be set by a test at any time."""

    def __init__(self, identity: RankIdentity | None = None, wake: Callable[[], None] | None = None) -> None:
        self._identity = identity or RankIdentity()
        self._wake = wake or (lambda: None)
        self.counters = dict.fromkeys(MANDATORY_COUNTERS, 0)
        self.caps = Capabilities(engine="light", hot=True, layout="page_first", tree="radix", page_size=16)
        self.ledger = Ledger()
        self.installed = LightSet(EffectiveState(prefetch_policy=POLICY, write_policy=WRITE), {}, self.ledger, "none")
        self.sets: list[LightSet] = [self.installed]
        self.bypass = False
        self.published: list[tuple[str | None, int]] = []
        self.calls: list[str] = []
        self.slices = 0
        self._slices_left = 0
        self.build_gate: threading.Event | None = None  # a test holds builders here

    # -- facts

    def identity(self) -> RankIdentity:
        return self._identity

    def capabilities(self) -> Capabilities:
        return self.caps

    def effective(self) -> EffectiveState:
        return msgspec.structs.replace(self.installed.state, bypass=self.bypass)

    def idle_report(self) -> IdleReport:
        return IdleReport(counters=dict(self.counters))

    def usage(self) -> dict[str, OpUsage]:
        return {}

    def threads(self) -> list[ThreadReport]:
        thread = self.installed.thread
        return [] if thread is None else [ThreadReport(name=thread.name, alive=thread.is_alive())]

    def layers(self) -> dict[str, str]:
        return {}

    # -- validate and build

    def _parse(self, target: TargetState) -> tuple[EffectiveState, dict[str, Any]]:
        present = self.installed.state
        if target.backend is not None and target.backend not in BACKENDS:
            raise UnknownBackend(f"no backend {target.backend!r}", details={"known": list(BACKENDS)})
        text = target.extra_config
        if text is None:
            text = present.extra_config if target.backend == present.backend else None
        try:
            options = json.loads(text) if text else {}
        except ValueError as error:
            raise InvalidConfig(f"extra config is no JSON: {error}") from error
        if not isinstance(options, dict):
            raise InvalidConfig("extra config must be an object")
        if options.get("layout") == "bad":
            raise LayoutUnsupported("layout", details={"layout": self.caps.layout, "allowed": ["page_head"]})
        knobs = {key: options.pop(key) for key in list(options) if key.startswith("prefetch_")}
        script = {key: options[key] for key in options if key in SCRIPT_KEYS}
        if script.get("only_rank", self._identity.rank) != self._identity.rank:
            script = {}
        digest = hashlib.sha256(json.dumps([target.backend, options], sort_keys=True).encode()).hexdigest()[:16]
        state = EffectiveState(
            backend=target.backend,
            extra_config=text if target.backend else None,
            config_digest=digest if target.backend else "",
            knobs={**knobs, **target.knobs},
            prefetch_policy=target.prefetch_policy or present.prefetch_policy,
            write_policy=target.write_policy or present.write_policy,
            namespace="light",
        )
        return state, script

    def validate(self, target: TargetState, *, mode: str, swap: bool) -> Plan:
        self.calls.append("validate")
        if not self.caps.attach:
            raise UnsupportedByEngine(f"no runtime attach with tree {self.caps.tree!r}")
        if mode == "hot" and not self.caps.hot:
            raise UnsupportedByEngine("no hot mode")
        state, _ = self._parse(target)
        present = self.installed.state
        live = [k for k in ("knobs", "prefetch_policy", "write_policy") if getattr(state, k) != getattr(present, k)]
        changed, relation = live, "live" if live else "same"
        if state.backend != present.backend or state.config_digest != present.config_digest:
            changed = ["hicache_storage_backend_extra_config", *live]
            relation = "detach" if state.backend is None else "swap" if present.backend else "attach"
        return Plan(
            relation=relation,
            changed_keys=changed,
            config_digest=state.config_digest,
            redacted_config=state.extra_config,
        )

    def build(self, target: TargetState, cancelled: Callable[[], bool]) -> object:
        self.calls.append("build")
        state, script = self._parse(target)
        if self.build_gate is not None:
            self.build_gate.wait(30.0)
        if "die" in script:
            os.kill(os.getpid(), int(script["die"]))
        if "build_hang_s" in script:
            time.sleep(float(script["build_hang_s"]))  # deaf to ``cancelled``, as native code is
        until = time.monotonic() + float(script.get("build_delay_s", 0.0))
        while time.monotonic() < until and not cancelled():
            time.sleep(0.01)
        if script.get("build_error"):
            raise InvalidConfig("the store cannot be opened", details={"reason": "scripted"})
        self._slices_left = int(script.get("backfill_slices", 0))
        parked = LightSet(state, script, self.ledger, f"{state.backend}-{len(self.sets)}")
        self.sets.append(parked)
        return parked

    # -- scheduler

    def backfill_slice(self, budget_s: float) -> bool:
        self.slices += 1
        self._slices_left = max(0, self._slices_left - 1)
        return self._slices_left == 0

    def swap(self, new: object) -> object:
        self.calls.append("swap")
        assert isinstance(new, LightSet)
        if new.script.get("swap_error"):
            raise RuntimeError("scripted swap failure")
        old, self.installed = self.installed, new
        return old

    def swap_back(self, old: object) -> object:
        self.calls.append("swap_back")
        assert isinstance(old, LightSet)
        if self.installed.script.get("swap_back_error"):
            raise RuntimeError("scripted swap back failure")
        new, self.installed = self.installed, old
        return new

    def publish(self, installed: object, revision: int) -> None:
        self.calls.append("publish")
        assert isinstance(installed, LightSet)
        if installed.script.pop("publish_error", None):
            raise RuntimeError("scripted publish failure")
        self.published.append((installed.state.backend, revision))

    def close(self, parked: object, timeout_s: float) -> list[str]:
        self.calls.append("close")
        assert isinstance(parked, LightSet)
        return parked.close(timeout_s)

    def set_bypass(self, enabled: bool) -> bool:
        was, self.bypass = self.bypass, enabled
        return was

    def clear(self, namespace: str) -> int:
        if self.installed.state.backend is None or namespace != "light":
            raise NotFound("nothing to clear")
        return 0

    def describe_backends(self) -> list[dict[str, Any]]:
        return [
            {"name": name, "available": True, "missing": [], "layouts": [], "options_schema": {}, "notes": []}
            for name in BACKENDS
        ]

    def wake(self) -> None:
        self._wake()
