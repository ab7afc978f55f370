"""One NIXL agent with one plugin: batches of transfers between page buffers and files or objects.

Rules, each measured on NIXL 1.5.1 (and older, where said):

1. The agent is made with sync_mode RW. The default is NONE: four threads on one agent then abort the process.
2. It is never touched in a forked child: with io_uring the child's transfer succeeds and the *parent* hangs for ever.
3. No more I/Os are in flight than half of the plugin's pool: a post beyond the pool fails, and its slots leak, so
   that every later post fails too.
4. A handle is polled to its end before it is released: after a release in flight, completions land on freed memory.
   A batch that misses its deadline keeps handle, registration and buffers (``Late``) until it ends.
5. A batch fails as a whole, without an index. With POSIX the error comes when all its I/Os have ended (tried on 32
   reads of 8 MiB, aio and io_uring), so callers retry singly. With OBJ it comes at once, and the other reads go on
   filling their buffers (15 of 15, tried on a hole in 16): there each object is a transfer of its own (``run_each``).
6. With use_posix_aio one failed I/O poisons the agent for every later transfer: a new agent takes its place, and the
   old one goes when the last transfer on it has ended.
7. Closed means closed: every call raises, none reaches the library.
"""

import ctypes
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from hicache_hooks.backends import nixl_probe

_SLOTS = {"POSIX": 65_536}  # NIXL's default of ios_pool_size
DEFAULT_CAP = 1024  # in flight, for plugins whose limits we do not know
MAX_CAP = 4096
CLOSE_WAIT_S = 10.0
# Polling: the first looks follow at once (a cached read is done when it returns), then ever less often.
_EAGER_LOOKS = 20
_PAUSE_S = (0.00005, 0.001)
_names = itertools.count(1)
_foreign: list[Any] = []  # agents of a parent process: referenced, so that nothing ends them here


class TransferFailed(OSError):
    """A batch failed as a whole; some of its pages may have moved."""


class Late(TimeoutError):
    """The deadline passed and transfers still run. Keep this until ``ended`` says so: they may touch the buffers."""

    def __init__(self, agent: "_Agent", handles: list[Any], registered: Any, keep: object) -> None:
        super().__init__("a transfer outlived its deadline")
        self._agent = agent
        self._handles = handles
        self._registered = registered
        self._keep = keep  # buffers: referenced, never read

    def ended(self) -> bool:
        """True once the transfers are over and everything of them is released."""
        self._handles = [handle for handle in self._handles if not self._over(handle)]
        if self._handles:
            return False
        if self._registered is not None:
            self._agent.deregister(self._registered)
            self._registered = None
            self._agent.late -= 1
            self._agent.drop_unused()
            self._keep = None
        return True

    def _over(self, handle: Any) -> bool:
        try:
            if self._agent.api.check_xfer_state(handle) not in ("DONE", "ERR"):
                return False
        except Exception:  # failed transfers raise: they have ended too
            pass
        self._agent.release(handle)
        return True


class _Agent:
    """One agent of the library, with the transfers that run on it."""

    def __init__(self, nixl: Any, plugin: str, parameters: dict[str, str]) -> None:
        self.name = f"hicache-{os.getpid()}-{next(_names)}"
        sync = nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_RW  # rule 1
        self.api = nixl.nixl_agent(self.name, nixl.nixl_agent_config(backends=[], sync_mode=sync))
        self.plugin = plugin
        self.api.create_backend(plugin, parameters)
        self.users = 0  # threads in a transfer; changed under the lock of ``Transfers``
        self.late = 0  # transfers that nobody waits for any more
        self.retired = False
        self.pools: list[Any] = []

    def register_pool(self, address: int, nbytes: int) -> None:
        descs = self.api.get_reg_descs([(address, nbytes, 0, "")], "DRAM")
        self.pools.append(self.api.register_memory(descs, backends=[self.plugin]))

    def release(self, handle: Any) -> None:
        with suppress(Exception):
            self.api.release_xfer_handle(handle)

    def deregister(self, registered: Any) -> None:
        with suppress(Exception):
            self.api.deregister_memory(registered, backends=[self.plugin])

    def drop_unused(self) -> None:
        """Once retired and free of transfers: deregister the pools; the last reference frees the agent."""
        if not self.retired or self.users or self.late or self.api is None:
            return
        pools, self.pools = self.pools, []
        for pool in pools:
            self.deregister(pool)
        self.api = None


class Transfers:
    """See the module's text. Thread-safe."""

    def __init__(self, plugin: str, parameters: dict[str, str], segment: str, *, rebuild_after_error: bool) -> None:
        """``segment``: ``FILE`` or ``OBJ``. Does nothing yet."""
        self.plugin = plugin
        self._parameters = parameters
        self._segment = segment
        self._rebuild = rebuild_after_error
        pool = int(parameters.get("ios_pool_size", _SLOTS.get(plugin, 2 * DEFAULT_CAP)))
        self.cap = max(1, min(MAX_CAP, pool // 2))  # rule 3
        self._pid = os.getpid()
        self._nixl: Any = None
        self._agent: _Agent | None = None
        self._pools: list[tuple[int, int]] = []
        self._changed = threading.Condition()
        self._in_flight = 0
        self.rebuilt = 0

    def open(self) -> None:
        """Import the package and make the agent.

        Raises:
            BackendUnavailable: no package.
            Exception: the plugin cannot be created (the library's own types).
        """
        self._nixl = nixl_probe.load()
        self._agent = _Agent(self._nixl, self.plugin, self._parameters)
        self._pid = os.getpid()

    def register(self, memory: memoryview) -> None:
        """Memory that transfers may use.

        Raises:
            RuntimeError: not open, or a forked child.
        """
        agent = self._usable()
        place = (address_of(memory), memory.nbytes)
        agent.register_pool(*place)
        self._pools.append(place)

    def close(self) -> None:
        """Wait a little for what is in flight, then let the agent go. Idempotent."""
        if os.getpid() != self._pid:
            _foreign.append(self._agent)  # rule 2: not even its end
            self._agent = None
            return
        with self._changed:
            agent, self._agent = self._agent, None
            if agent is None:
                return
            agent.retired = True
            self._changed.wait_for(lambda: agent.users == 0, CLOSE_WAIT_S)
            agent.drop_unused()

    def _usable(self) -> _Agent:
        if os.getpid() != self._pid:
            raise RuntimeError("a forked process must not use its parent's NIXL agent")
        agent = self._agent
        if agent is None:
            raise RuntimeError("the NIXL store is not open")
        return agent

    # ------------------------------------------------------------ transfers

    def run(
        self, op: str, pages: Sequence[memoryview], targets: Sequence[tuple[int, str]], deadline_s: float | None,
        keep: object = None,
    ) -> None:  # fmt: skip
        """Move ``pages`` to (``WRITE``) or from (``READ``) ``targets``: ``(device id, meta)`` each.

        ``deadline_s`` None waits as long as the kernel does, like ``preadv``: then nothing touches the pages any more
        when this returns or raises. ``keep``: what a late transfer needs alive.

        Raises:
            TransferFailed: the batch failed (rule 5).
            Late: see there. Only with a deadline.
            TimeoutError: no slots came free in time.
            RuntimeError: not open, or a forked child.
        """
        self._usable()
        for start in range(0, len(pages), self.cap):
            part = slice(start, start + self.cap)
            self._run(op, pages[part], targets[part], deadline_s, keep)

    def run_each(
        self, op: str, pages: Sequence[memoryview], targets: Sequence[tuple[int, str]], deadline_s: float,
        keep: object,
    ) -> list[bool]:  # fmt: skip
        """As ``run``, each page a transfer of its own: True per page that moved. Nothing of a failed one runs on.

        Raises:
            Late, TimeoutError, RuntimeError: as ``run``.
        """
        out: list[bool] = []
        for start in range(0, len(pages), self.cap):
            part = slice(start, start + self.cap)
            with self._taken(len(pages[part]), deadline_s) as agent:
                out += self._each(agent, op, pages[part], targets[part], deadline_s, keep)
        return out

    def _run(
        self, op: str, pages: Sequence[memoryview], targets: Sequence[tuple[int, str]], deadline_s: float | None,
        keep: object,
    ) -> None:  # fmt: skip
        with self._taken(len(pages), 60.0 if deadline_s is None else deadline_s) as agent:
            try:
                self._transfer(agent, op, pages, targets, deadline_s, keep)
            except TransferFailed:
                if self._rebuild:
                    self._replace(agent)
                raise

    @contextmanager
    def _taken(self, n: int, wait_s: float) -> Iterator[_Agent]:
        """The agent, with ``n`` I/Os counted as in flight."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._in_flight + n <= self.cap or self._agent is None, wait_s):
                raise TimeoutError("no I/O slots came free")
            agent = self._usable()
            agent.users += 1
            self._in_flight += n
        try:
            yield agent
        finally:
            with self._changed:
                self._in_flight -= n
                agent.users -= 1
                agent.drop_unused()
                self._changed.notify_all()

    def _register(self, agent: _Agent, pages: Sequence[memoryview], targets: Sequence[tuple[int, str]]) -> Any:
        rows = [(0, page.nbytes, device, meta) for page, (device, meta) in zip(pages, targets, strict=True)]
        try:
            return agent.api.register_memory(agent.api.get_reg_descs(rows, self._segment), backends=[self.plugin])
        except Exception as exc:
            raise _failed(exc) from None

    def _handle(self, agent: _Agent, op: str, pages: Sequence[memoryview], devices: Sequence[int]) -> Any:
        api = agent.api
        memory = [(address_of(page), page.nbytes, 0) for page in pages]
        there = [(0, page.nbytes, device) for page, device in zip(pages, devices, strict=True)]
        return api.initialize_xfer(
            op, api.get_xfer_descs(memory, "DRAM"), api.get_xfer_descs(there, self._segment), agent.name,
            backends=[self.plugin],
        )  # fmt: skip

    def _transfer(
        self, agent: _Agent, op: str, pages: Sequence[memoryview], targets: Sequence[tuple[int, str]],
        deadline_s: float | None, keep: object,
    ) -> None:  # fmt: skip
        until = None if deadline_s is None else time.monotonic() + deadline_s
        registered = self._register(agent, pages, targets)
        handle: Any = None
        late = False
        try:
            handle = self._handle(agent, op, pages, [device for device, _ in targets])
            state = agent.api.transfer(handle)
            late = state not in ("DONE", "ERR") and not self._poll(agent.api, handle, until)
        except Exception as exc:  # the library's own types, which exist only where it is installed
            raise _failed(exc) from None
        finally:
            if not late:
                if handle is not None:
                    agent.release(handle)
                agent.deregister(registered)
        if late:
            agent.late += 1  # it keeps its agent: that is never dropped under it
            raise Late(agent, [handle], registered, keep)

    def _each(
        self, agent: _Agent, op: str, pages: Sequence[memoryview], targets: Sequence[tuple[int, str]],
        deadline_s: float, keep: object,
    ) -> list[bool]:  # fmt: skip
        until = time.monotonic() + deadline_s
        registered = self._register(agent, pages, targets)
        moved = [False] * len(pages)
        running: dict[int, Any] = {}
        for i, (page, (device, _)) in enumerate(zip(pages, targets, strict=True)):
            with suppress(Exception):  # a page that cannot be posted has failed; the others go on
                running[i] = self._handle(agent, op, [page], [device])
        for i in list(running):
            self._look(agent, running, moved, i, agent.api.transfer)
        pause_s = _PAUSE_S[1]
        while running and time.monotonic() <= until:
            time.sleep(pause_s)  # the library has no way to be woken
            for i in list(running):
                self._look(agent, running, moved, i, agent.api.check_xfer_state)
        if running:
            agent.late += 1
            raise Late(agent, list(running.values()), registered, keep)
        agent.deregister(registered)
        return moved

    @staticmethod
    def _look(agent: _Agent, running: dict[int, Any], moved: list[bool], i: int, ask: Callable[[Any], str]) -> None:
        """Ask for one transfer's state; once it has ended it leaves ``running``."""
        try:
            state = ask(running[i])
        except Exception:  # the library's own types
            state = "ERR"
        if state in ("DONE", "ERR"):
            moved[i] = state == "DONE"
            agent.release(running.pop(i))

    @staticmethod
    def _poll(api: Any, handle: Any, until: float | None) -> bool:
        pause_s, longest_s = _PAUSE_S
        looks = 0
        while True:
            state = api.check_xfer_state(handle)
            if state == "ERR":
                raise OSError("the transfer ended in an error")
            if state == "DONE":
                return True
            if until is not None and time.monotonic() > until:
                return False
            looks += 1
            if looks > _EAGER_LOOKS:
                pause_s = min(longest_s, pause_s * 1.2)
            time.sleep(pause_s)  # the library has no way to be woken

    def _replace(self, broken: _Agent) -> None:
        """Rule 6. One caller builds; the others find the new agent."""
        with self._changed:
            if self._agent is not broken:
                return
            made = _Agent(self._nixl, self.plugin, self._parameters)
            for place in self._pools:
                made.register_pool(*place)
            self._agent = made
            broken.retired = True
            self.rebuilt += 1


def _failed(exc: Exception) -> TransferFailed:
    return TransferFailed(f"nixl: {type(exc).__name__}")


def address_of(memory: memoryview) -> int:
    """Address of a writable buffer. The caller keeps the buffer alive.

    Raises:
        TypeError: read-only or not contiguous.
    """
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
