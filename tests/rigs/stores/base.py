"""What a *stand* is: one real store, started for tests on loopback or in a private directory.

A stand knows how to start and harm its store and which options reach it; the checks in ``tests/stores`` know nothing
else about it. Adding a store is one module with ``stand_class(variant) -> type[Stand]`` and one line
in ``catalogue.py``.

The flags say what a check may ask of the store. They describe the *store*, never excuse our backend: "short objects
are misses" or "no call outlives its deadline" have no flag.
"""

import signal
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

from tests.rigs.procs import Process, ProcessFailed

START_S = 60.0  # a server on two busy cores


class Stand:
    """A store without a server of its own (a directory, memory of the engine). Subclasses override what differs."""

    backend_name: ClassVar[str] = ""  # as in the registry
    has_server: ClassVar[bool] = False  # kill, hang, resume and restart exist
    emulated: ClassVar[bool] = False  # not the real store, but something of ours in its place
    refuses_fork: ClassVar[bool] = True  # a call in a forked child must raise; False: it may also just work
    can_clear: ClassVar[bool] = True  # False: the client has no call that lists keys; clear must be refused
    outlives_client: ClassVar[bool] = True  # pages are there after close and open
    outlives_server: ClassVar[bool] = True  # pages are there after a restart of the server
    evicts_when_full: ClassVar[bool] = False  # a full store drops old pages instead of refusing new ones
    can_be_small: ClassVar[bool] = False  # honours ``small``
    why_not_small: ClassVar[str] = "it has no limit of its own"  # why there is no check of a full store
    why_whole: ClassVar[str] = "its pages are in the engine's own memory"  # why ``shorten`` can do nothing
    delete_frees: ClassVar[bool] = True  # a full store has room once pages are deleted; False: see ``more_room``
    small_pages: ClassVar[int] = 128  # about so many 64 KiB pages fit when ``small``
    dead_call_s: ClassVar[float] = 10.0  # no call takes longer while the server is dead or hangs
    back_s: ClassVar[float] = 20.0  # the same open backend works again so soon after the server is back
    open_s: ClassVar[float] = 60.0  # deadline of open, which may import a vendor's package
    rounds: ClassVar[int] = 30  # of each thread in the check of four threads; fewer for a slow store
    cycles: ClassVar[int] = 200  # open/close cycles of the leak check; fewer only with the reason beside it
    cycles_s: ClassVar[float] = 120.0
    warm_cycles: ClassVar[int] = 0  # before the first look; 0: a tenth of them. More only with the reason beside it

    def __init__(self, name: str, root: Path, *, small: bool = False) -> None:
        """``root`` is private to this stand. Starts nothing."""
        self.name = name
        self.root = root
        self.small = small

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.stop()

    @staticmethod
    def missing() -> str | None:
        """What this machine lacks to run the stand, or None. Then its tests are skipped with that reason."""
        return None

    def start(self) -> None:
        """Make the store usable."""

    def stop(self) -> None:
        """End everything that was started. Idempotent."""

    def config(self) -> dict[str, Any]:
        """Options of the backend, as an operator would write them into the extra config."""
        raise NotImplementedError

    def env(self) -> dict[str, str]:
        """Environment of the process that opens the backend."""
        return {}

    def shorten(self, key: str, namespace: str) -> bool:
        """Cut the stored object of ``key`` to half behind the backend's back; False: see ``why_whole``."""
        return False

    def more_room(self) -> None:
        """Where not ``delete_frees``: room for twice as much."""
        raise NotImplementedError

    # The next four exist where ``has_server``.

    def kill(self) -> None:
        """End the server at once; connections are refused afterwards."""
        raise NotImplementedError

    def hang(self) -> None:
        """Stop the server without ending it; connections are accepted by the kernel and nothing answers."""
        raise NotImplementedError

    def resume(self) -> None:
        """Undo ``hang``."""
        raise NotImplementedError

    def restart(self) -> None:
        """Start the server again at the same address, after ``kill``."""
        raise NotImplementedError


class ServerStand(Stand):
    """A store that is one server process: subclasses say its command line and when it is ready."""

    has_server = True

    def __init__(self, name: str, root: Path, *, small: bool = False) -> None:
        super().__init__(name, root, small=small)
        self._server: Process | None = None
        self._starts = 0

    def argv(self) -> list[str]:
        """Command line; the same for every start."""
        raise NotImplementedError

    def ready(self) -> bool:
        """The server answers."""
        raise NotImplementedError

    @property
    def server(self) -> Process:
        """The process.

        Raises:
            ProcessFailed: it was not started.
        """
        if self._server is None:
            raise ProcessFailed(f"the server of {self.name} was not started")
        return self._server

    def start(self) -> None:
        self._starts += 1
        self._server = Process(f"{self.name}-server", self.argv(), self.root / f"server-{self._starts}.log")
        self._server.wait_until("an answer", self.ready, START_S)

    def stop(self) -> None:
        if self._server is not None:
            self._server.kill()  # tests keep nothing: no time for a tidy end

    def kill(self) -> None:
        self.server.kill()

    def hang(self) -> None:
        self.server.signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.server.signal(signal.SIGCONT)

    def restart(self) -> None:
        self.start()
