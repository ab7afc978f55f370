"""PREPARE: builds a backend object with the engine's own config and factory, off the scheduler thread.

Order: page hash -> config -> directory -> object -> host pools -> canary. Nothing of it touches what serves. A
constructor that takes seconds, or fails on one rank only, costs nothing but this thread; on the scheduler thread
of the stock engine the first stalls all requests, and the second hangs a tensor-parallel world for good.
"""

import contextlib
import importlib
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from hicache_hooks.cache.config import Running
from hicache_hooks.guard import describe_exception
from hicache_hooks.sglang import versions
from hicache_hooks.sglang.canary import run_canary
from hicache_hooks.sglang.config import FILE, FILE_PATH_KEY, EngineConfig
from hicache_hooks.sglang.parked import Parked
from hicache_hooks.sglang.storage_guard import StorageGuard
from hicache_proto.errors import HicacheError, PrepareFailed

log = logging.getLogger(__name__)


class BackendBuilder:
    """Builds for one scheduler. *builder* thread."""

    def __init__(self, scheduler: Any, namespace: str) -> None:
        self._scheduler = scheduler
        self._controller = scheduler.tree_cache.cache_controller
        self._namespace = namespace

    def build(self, running: Running, cancelled: Callable[[], bool]) -> Parked:
        """What COMMIT installs for ``running``.

        Raises:
            HicacheError: which step failed; what was opened is closed again.
        """
        config = running.config
        if config is None:
            return Parked(running)
        if not isinstance(config, EngineConfig):
            raise PrepareFailed("not a config of this engine", details={"reason": "internal"})
        options = config.values()
        _step("page hash", lambda: versions.warm_page_hash(self._controller.page_size))
        _go_on(cancelled)
        storage_config = _step("storage config", lambda: self._storage_config(options))
        path = options.get(FILE_PATH_KEY) if config.backend == FILE else None
        backend = _step("constructor", lambda: self._construct(config.backend, storage_config, path or None))
        try:
            if isinstance(backend, StorageGuard):
                backend.tune_guard(running.knobs.guard)  # its deadline holds from the canary on
            _go_on(cancelled)
            _check_directory(config.backend, backend, path or None)
            _step("registration of the host pools", lambda: versions.register_pools(backend, self._controller))
            _go_on(cancelled)
            run_canary(backend, self._controller, storage_config, config.backend, self._namespace)
            _go_on(cancelled)
        except BaseException:
            close_backend(backend)
            raise
        return Parked(running, backend, storage_config)

    def _storage_config(self, options: dict[str, Any]) -> Any:
        serving = importlib.import_module(f"{versions.SRT}.runtime_context").get_serving()
        return self._controller._generate_storage_config(serving.served_model_name, options)

    def _construct(self, name: str, storage_config: Any, path: str | None) -> Any:
        if path is not None:
            # Every rank makes it, before rank 0's constructor looks: the engine lets only rank 0 create it, and
            # a canary of another rank would come too early.
            os.makedirs(path, exist_ok=True)
        factory = importlib.import_module(f"{versions.SRT}.mem_cache.storage.backend_factory").StorageBackendFactory
        with versions.file_directory(path):
            return factory.create_backend(name, storage_config, self._controller.storage_host_pool)


def _check_directory(name: str, backend: Any, path: str | None) -> None:
    """The directory that was asked for must be the one in use: pages in another one would be lost without a word."""
    if name != FILE or path is None:
        return
    used = getattr(backend, "file_path", None)
    if used is None or os.path.realpath(used) != os.path.realpath(path):
        raise PrepareFailed(
            "the engine's file backend does not use file_storage_path", details={"reason": "other_directory"}
        )


def wait_and_close(backend: Any, timeout_s: float) -> list[str]:
    """Close a backend once no call is inside it; *closer* thread.

    A guard closes its store when the last call has left it, one that was given up too: that is waited for. The store's
    own close gets a thread of its own, for it may hang. Call it again to go on waiting.

    Returns:
        What still runs in it after ``timeout_s``; then it stays open (F117).
    """
    until = time.monotonic() + timeout_s
    in_flight = getattr(backend, "in_flight", lambda: 0)
    while in_flight() > 0:
        if time.monotonic() >= until:
            return [f"{in_flight()} storage calls"]
        time.sleep(0.005)
    if not isinstance(backend, StorageGuard):  # it could not be guarded: nobody can say whether it is closed
        close_backend(backend)
        return []
    closer = threading.Thread(target=close_backend, args=(backend,), name="hicache-store-close", daemon=True)
    try:
        closer.start()
    except RuntimeError:
        return ["no thread to close it with"]
    closer.join(max(0.0, until - time.monotonic()))
    while not backend.closed:
        if time.monotonic() >= until:
            return backend.given_up() or ["the store's own close"]
        time.sleep(0.005)
    return []


def close_backend(backend: Any) -> None:
    """Many of SGLang's backends have no close; an error of one that has is only told."""
    close = getattr(backend, "close", None)
    if close is None:
        return
    try:
        close()
    except BaseException as exc:  # a native client may raise anything; the engine goes on
        with contextlib.suppress(Exception):
            log.error("closing a backend failed: %s", describe_exception(exc))


def _step(name: str, action: Callable[[], Any]) -> Any:
    failed: BaseException
    try:
        return action()
    except HicacheError:
        raise
    except BaseException as exc:  # SystemExit of a constructor never leaves the hook (F49)
        failed = exc
    log.warning("attach: %s failed: %s", name, describe_exception(failed))
    raise PrepareFailed(
        f"{name} failed: {describe_exception(failed)}", details={"reason": "build_failed", "step": name}
    )


def _go_on(cancelled: Callable[[], bool]) -> None:
    if cancelled():
        _cancel()


def _cancel() -> NoReturn:
    raise PrepareFailed("the operation was cancelled while the backend was built", details={"reason": "cancelled"})
