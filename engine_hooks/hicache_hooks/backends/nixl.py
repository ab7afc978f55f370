"""Backend ``nixl``: NVIDIA's transfer library, over files (POSIX, GDS, GDS_MT, 3FS) or S3 objects (OBJ).

``nixl_agent.py`` holds the library at a distance that keeps a process alive; ``nixl_file.py`` and ``nixl_object.py``
make stores of it.
"""

import os
import resource
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from hicache_hooks.backends import nixl_probe
from hicache_hooks.backends.base import LARGE_BATCH, Got, Manifest, StoreContext
from hicache_hooks.backends.nixl_agent import Transfers
from hicache_hooks.backends.nixl_file import NixlFiles
from hicache_hooks.backends.nixl_lanes import LANES, Lanes
from hicache_hooks.backends.nixl_object import NixlObjects
from hicache_hooks.backends.nixl_options import FILE_PLUGINS, NixlOptions
from hicache_hooks.backends.registry import BackendSpec
from hicache_hooks.backends.secret_text import secret_of
from hicache_hooks.backends.upkeep import part_or_raise, stored_or_raise
from hicache_proto.model import LAYOUTS

MOST_FILES, FEWEST_FILES = 1024, 8
_ENV = {"access_key": "AWS_ACCESS_KEY_ID", "secret_key": "AWS_SECRET_ACCESS_KEY", "session_token": "AWS_SESSION_TOKEN"}


class NixlStore:
    """The ``Backend`` (see base.py)."""

    manifest: ClassVar[Manifest] = Manifest(
        name="nixl",
        layouts=LAYOUTS,
        alignment=1,
        needs_registration=True,
        parallel_axes=("tp", "pp"),
        summary="NIXL: files by aio or io_uring, GPUDirect Storage where a driver is, or S3 objects",
    )

    def __init__(self, options: NixlOptions, context: StoreContext, env: Mapping[str, str]) -> None:
        """``options`` must be effective ones. No I/O, no import of the library."""
        self._plugin = options.chosen
        self._page_bytes = context.page_bytes
        self._pid = os.getpid()
        self._open = False
        files = self._plugin in FILE_PLUGINS
        secrets = {} if files else {key: secret_of(options, key, env, variable) for key, variable in _ENV.items()}
        parameters = options.parameters({key: value for key, value in secrets.items() if value})
        posix_aio = self._plugin == "POSIX" and options.use_posix_aio is True
        self._inner = f"{self._plugin}{_mode(options) if self._plugin == 'POSIX' else ''}"
        self._at_once = _descriptors_of_a_call() if files else 1 << 30  # pages; objects cut their batches themselves
        self._movers: list[Lanes | Transfers]
        self._store: NixlFiles | NixlObjects
        if files:
            lanes = Lanes(self._plugin, parameters, rebuild_after_error=posix_aio, count=_lanes(self._plugin))
            self._movers = [lanes]
            self._store = NixlFiles(options, context, lanes)
            self.epoch = self._file_epoch  # of objects the guard infers it
        else:
            readers, writers = (Transfers(self._plugin, parameters, "OBJ", rebuild_after_error=False) for _ in range(2))
            self._movers = [readers, writers]
            self._store = NixlObjects(options, context, readers, secrets, writers)
            self.confirm, self.forget = self._confirm_objects, self._store.forget

    def open(self) -> None:
        """Make the agent and the store.

        Raises:
            BackendUnavailable: the library or the plugin is not usable here.
            OSError: directory or server cannot be used.
        """
        self._pid = os.getpid()
        for mover in self._movers:
            mover.open()
        self._store.open()
        self._open = True

    def register(self, pool: memoryview) -> None:
        """The plugin gets every pool, whether or not it would do without."""
        self._usable()
        if isinstance(self._store, NixlFiles):  # objects go through bounce buffers
            self._movers[0].register(pool)

    def close(self) -> None:
        """Idempotent; in a forked child it only forgets."""
        self._open = False
        if os.getpid() == self._pid:
            self._store.close()
        for mover in self._movers:
            mover.close()

    def _usable(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError("a forked process must not use its parent's NIXL agent")
        if not self._open:
            raise RuntimeError("the NIXL store is not open")

    def batch_put(self, keys: Sequence[str], pages: Sequence[memoryview]) -> list[bool | None]:
        """Pages of files that exist are kept; objects are written again."""
        self._usable()
        for page in pages:
            if page.nbytes != self._page_bytes:
                raise ValueError(f"page buffer of {page.nbytes} bytes, expected {self._page_bytes}")
        done: list[bool | None] = []
        for part in self._parts(keys):
            try:
                done += self._store.put(keys[part], pages[part])
            except OSError as exc:
                return stored_or_raise(done, len(keys), exc)
        return done

    def batch_get(self, keys: Sequence[str], pages: Sequence[memoryview]) -> list[Got]:
        """A page of another length is a miss."""
        self._usable()
        got: list[Got] = []
        for part in self._parts(keys):
            try:
                got += self._store.get(keys[part], pages[part])
            except OSError as exc:
                return part_or_raise(got, len(keys), exc)
        return got

    def _parts(self, keys: Sequence[str]) -> list[slice]:
        return [slice(i, i + self._at_once) for i in range(0, len(keys), self._at_once)]

    def batch_exists(self, keys: Sequence[str]) -> list[bool]:
        """A page of another length does not count."""
        self._usable()
        return self._store.exists(keys) if keys else []

    def delete(self, keys: Sequence[str]) -> int:
        """Remove pages; missing ones are no error."""
        self._usable()
        return self._store.delete(list(dict.fromkeys(keys)))

    def set_aside(self, key: str, reason: str) -> None:
        """Files are moved to ``bad/``, objects deleted."""
        self._usable()
        self._store.set_aside(key)

    def clear(self) -> int:
        """Delete every page of this namespace (F68)."""
        self._usable()
        return self._store.clear()

    def health(self) -> dict[str, Any]:
        """Facts for status; asks the bucket of OBJ."""
        self._usable()
        rebuilt = sum(mover.rebuilt for mover in self._movers)
        facts = {"inner": self._inner, "in_flight_cap": self._movers[0].cap, "agents_rebuilt": rebuilt}
        if isinstance(self._store, NixlFiles):
            facts["files_of_a_call"] = self._at_once
        return facts | self._store.health()

    def _confirm_objects(self, keys: Sequence[str]) -> list[bool]:
        """See ``Backend.confirm``."""
        self._usable()
        return self._store.confirm(keys) if keys and isinstance(self._store, NixlObjects) else []

    def _file_epoch(self) -> str:
        """See ``Backend.epoch``."""
        self._usable()
        return self._store.epoch() if isinstance(self._store, NixlFiles) else ""


def _descriptors_of_a_call() -> int:
    """Each page of a call has its file open (F65): two agents, puts and gets, take half of what the process may open.

    With the 1024 of most hosts a call of 34 MiB in pages of 36 KiB would take nearly all of them.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if soft == resource.RLIM_INFINITY else min(MOST_FILES, soft // (2 * 2 * LANES))
    return max(FEWEST_FILES, most)


def _mode(options: NixlOptions) -> str:
    if options.use_uring:
        return " io_uring"
    return " posix_aio" if options.use_posix_aio else " aio"


def manifest_of(options: NixlOptions, env: Mapping[str, str]) -> Manifest:
    """Files are moved in larger calls: each registers its files, and makes and posts a transfer (0.15 ms and more).

    Not more calls at a time than agents: the next would wait inside the library, where this thread can make no sums.
    """
    if options.chosen not in FILE_PLUGINS:
        return NixlStore.manifest
    calls = LANES if options.chosen == "POSIX" else 0  # a driver moves the bytes itself
    return msgspec.structs.replace(NixlStore.manifest, batch_bytes=LARGE_BATCH, calls=calls)


def _lanes(plugin: str) -> int:
    # A driver's registration of the pool is dear.
    return LANES if plugin == "POSIX" else 1


SPEC = BackendSpec(
    manifest=manifest_of,
    options=NixlOptions,
    create=NixlStore,
    missing=nixl_probe.missing,
    layouts=NixlStore.manifest.layouts,
    notes=(
        "plugin: the first active section of 'plugin', else $SGLANG_HICACHE_NIXL_BACKEND_PLUGIN, else obj when there "
        "is a bucket, else posix",
        "gds, gds_mt and 3fs need a driver: an attach probes create_backend in a child process",
    ),
    inner=lambda options: options.chosen,
)
