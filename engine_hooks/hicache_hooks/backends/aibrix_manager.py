"""The vendor's cache manager, made with settings of our own and ended whole.

The manager reads its variables through one module of its package while it is built. For that time the module is given
another view of the environment: the process's environment is not touched, so no other backend and no second ``aibrix``
with other options sees a thing, and no other thread of the engine reads a half-changed one.
"""

import importlib
import logging
import os
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

from hicache_hooks.backends.aibrix_options import BLOCK_TOKENS, PREFIX
from hicache_proto.errors import BackendUnavailable

log = logging.getLogger(__name__)

MODEL_TOKENS = 102_400  # as SGLang's adapter; without token validation nothing depends on it
SLAB = 1 << 30  # the vendor's
END_WAIT_S = 20.0  # for writes in its queue and calls of its connector
_building = threading.Lock()


def load() -> Any:
    """The package.

    Raises:
        BackendUnavailable: it is missing, or was loaded with token validation, which page keys cannot have.
    """
    try:
        package = importlib.import_module("aibrix_kvcache")
    except (ImportError, OSError) as exc:
        missing = str(exc)[:200]
    else:
        if package.MemoryRegion.use_compact_layout():
            return package
        missing = f"{PREFIX}TOKEN_VALIDATION_ENABLED must be 0 when the engine starts"
    raise BackendUnavailable(f"aibrix is not usable here: {missing}", details={"missing": [missing]})


@contextmanager
def vendor_settings(settings: Mapping[str, str]) -> Iterator[None]:
    """While inside, the vendor's code reads ``settings`` over the process's variables."""
    envs: Any = importlib.import_module("aibrix_kvcache.envs")
    seen = {**os.environ, **settings}
    view = SimpleNamespace(getenv=seen.get, environ=seen, path=os.path)
    with _building:
        real, envs.os = envs.os, view
        try:
            with _no_time_to_live():
                yield
        finally:
            envs.os = real


@contextmanager
def _no_time_to_live() -> Iterator[None]:
    """While inside, the vendor's code gets a plain RocksDB where it asks for one with a time to live of 0.

    It always asks for one. That wrapper keeps 20 to 60 kB for good each time it is opened, takes 3.5 times as long for
    it, and adds four bytes to each value (rocksdict 0.3.29 alone). Pages stored with it are misses without, and are
    removed; the other way too.
    """
    try:
        connector: Any = importlib.import_module("aibrix_kvcache.l2.connectors.rocksdb")
    except ImportError:  # rocksdict is not installed: another connector's turn
        yield
        return
    real = connector.rocksdict

    class AccessType:
        @staticmethod
        def read_write() -> Any:
            access = real.AccessType.read_write()
            return SimpleNamespace(with_ttl=lambda seconds: access.with_ttl(seconds) if seconds else access)

    connector.rocksdict = SimpleNamespace(Options=real.Options, Rdict=real.Rdict, AccessType=AccessType)
    try:
        yield
    finally:
        connector.rocksdict = real


def device() -> str:
    """Where the vendor's slabs live. Plain ``cpu`` means pinned memory to it, which fails without a GPU."""
    import torch

    named = os.environ.get(f"{PREFIX}DEVICE", "cpu").strip().lower()
    return named if named != "cpu" or torch.cuda.is_available() else "cpu:0"


def make(page_bytes: int, settings: Mapping[str, str], l1_bytes: int) -> Any:
    """A manager whose blocks are our page buffers.

    Raises:
        BackendUnavailable: see ``load``; other exceptions are the vendor's. Nothing of it is left then.
    """
    import torch

    package = load()
    with warnings.catch_warnings():
        # Its reads wrap bytes in a tensor; torch warns once per process, and that must not fail the first read.
        warnings.simplefilter("ignore")
        torch.frombuffer(b"0", dtype=torch.uint8)
    allocator = importlib.import_module("aibrix_kvcache.memory.allocator").TensorPoolAllocator
    manager_class = package.BaseKVCacheManager
    with vendor_settings({**settings, f"{PREFIX}DEVICE": device()}):
        spec = package.KVCacheBlockSpec(
            BLOCK_TOKENS,
            torch.uint8,
            package.KVCacheBlockLayout.NCLD,
            package.KVCacheTensorSpec([0], [0], page_bytes // (2 * BLOCK_TOKENS)),
        )
        if spec.block_nbytes != page_bytes:
            raise ValueError(f"a block of {spec.block_nbytes} bytes for pages of {page_bytes}")
        config = package.KVCacheConfig(spec, package.ModelSpec(MODEL_TOKENS), multi_threaded=True)
        manager = manager_class.__new__(manager_class)  # so that a failed construction can be cleaned up
        allocator.SLAB_MAX_NBYTES = _slab(page_bytes, l1_bytes)
        try:
            manager.__init__(config)
        except BaseException:
            with suppress(TimeoutError):  # said in the log; the reason of the failure is of more use
                end(manager)
            raise
        finally:
            allocator.SLAB_MAX_NBYTES = SLAB
    return manager


def _slab(page_bytes: int, l1_bytes: int) -> int:
    """The vendor rounds its memory up to slabs of 1 GiB and uses all of it in turn: a small need gets a small slab."""
    transit = 3 * (512 // BLOCK_TOKENS) * page_bytes  # its own sum for reads and writes of L2
    return min(SLAB, -(-(l1_bytes + transit) // page_bytes) * page_bytes)


def end(manager: Any, wait_s: float = END_WAIT_S) -> None:
    """Close a manager, also one whose construction failed. The vendor stops its event loop and forgets to close it.

    Raises:
        TimeoutError: it did not end in ``wait_s``: a call of its connector hangs. It is left alone for good, with its
            threads and its directory; exceptions of its own ``close`` are the vendor's.
    """
    until = time.monotonic() + wait_s
    failed: list[BaseException] = []
    if hasattr(manager, "_infight_cv"):
        # Its close waits without a limit: for writes in flight, then for the connector.
        closer = threading.Thread(target=_close, args=(manager, failed), name="hicache-aibrix-close", daemon=True)
        closer.start()
        _join(closer, until, "its close")
    loop: Any = getattr(manager, "_event_loop", None)
    thread: Any = getattr(manager, "_thread", None)
    executor: Any = getattr(manager, "_executor", None)
    if thread is not None and thread.is_alive():
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(loop.stop)
        _join(thread, until, "its event loop")
    if executor is not None:
        executor.shutdown(wait=False)
        for worker in list(getattr(executor, "_threads", ())):
            _join(worker, until, "a call of its connector")
    if loop is not None and not loop.is_running():
        loop.close()
    if failed:
        raise failed[0]


def _close(manager: Any, failed: list[BaseException]) -> None:
    try:
        manager.close()
    except BaseException as exc:  # raised again by ``end``
        failed.append(exc)


def _join(thread: threading.Thread, until: float, what: str) -> None:
    thread.join(max(0.0, until - time.monotonic()))
    if thread.is_alive():
        log.warning("aibrix: %s did not end; the manager is left alone", what)
        raise TimeoutError(f"the aibrix manager did not end ({what}), and is left alone")
