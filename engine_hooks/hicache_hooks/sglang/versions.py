"""What differs between SGLang versions, and whether this one has what the hooks use. Nothing else asks for a version.

Floor 0.5.20: the plugin framework, the pull seam, the tree's storage attachment and the guard's base class all have
the shape that is used here. An older engine is refused by name and nothing is hooked, so that it is never half
patched; a newer one is probed for every object that the hooks touch, because a hook on a name that is gone is only
logged by the engine's framework.

Imports of the engine happen inside functions: this module can be imported without it.
"""

import importlib
import pkgutil
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

FLOOR = (0, 5, 20)

SRT = "sglang.srt"
SCHEDULER = f"{SRT}.managers.scheduler.Scheduler"
INIT = f"{SCHEDULER}.__init__"
PULL = f"{SRT}.managers.scheduler_components.request_receiver.SchedulerRequestReceiver._pull_raw_reqs"
CREATE = f"{SRT}.mem_cache.storage.backend_factory.StorageBackendFactory.create_backend"

HOOKED = (INIT, PULL, CREATE)
# What is called or replaced, beside the hooked targets. A class path and the names that it must have.
USED = (
    (SCHEDULER, ("attach_hicache_storage_wrapped", "detach_hicache_storage_wrapped", "is_fully_idle")),
    (
        f"{SRT}.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController",
        (
            "_generate_storage_config",
            "_create_sync_groups",
            "_destroy_sync_groups",
            "_generic_page_get",
            "_page_get_zero_copy",
            "prefetch_thread_func",
            "prefetch_io_aux_func",
            "prefetch_sync_thread_func",
            "backup_thread_func",
        ),
    ),
    (
        f"{SRT}.mem_cache.unified_cache.storage_attachment.StorageAttachment",
        ("attach", "detach", "apply_runtime_config", "resolve_prefetch_threshold"),
    ),
    (f"{SRT}.mem_cache.hicache_storage.HiCacheStorage", ("batch_get_v1", "batch_get_v2", "batch_exists_v2")),
)


def parse_version(text: str) -> tuple[int, int, int] | None:
    """``(major, minor, patch)`` of ``0.5.23``, ``0.5.20.post1``, ``0.5.22rc1``; None for what names no release."""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", text)
    found = tuple(int(part) for part in match.groups()) if match else None
    return found if found and found != (0, 0, 0) else None  # type: ignore[return-value]  # 0.0.0.dev1: a source build


def engine_version() -> str:
    """SGLang's own version; empty when it does not say."""
    return str(getattr(importlib.import_module("sglang"), "__version__", ""))


def too_old(version: str) -> str:
    """Why ``version`` is refused; empty when it is not. A source build without a version is left to the probe."""
    parsed = parse_version(version)
    if parsed is None or parsed >= FLOOR:
        return ""
    floor = ".".join(map(str, FLOOR))
    return f"SGLang {version} is older than {floor}, the oldest that the hooks know; nothing is hooked"


def missing_names() -> list[str]:
    """What this engine lacks of all that the hooks touch; empty: it can be hooked."""
    lacking = [target for target in HOOKED if not _has(*target.rsplit(".", 1))]
    return lacking + [f"{path}.{name}" for path, names in USED for name in names if not _has(path, name)]


def not_hooked() -> list[str]:
    """Hooks that did not take: targets whose present function is not a wrapper of the engine's registry."""
    return [target for target in HOOKED if not hasattr(_resolve(target), "__wrapped__")]


def _has(path: str, name: str) -> bool:
    try:
        return hasattr(_resolve(path), name)
    except (ImportError, AttributeError):
        return False


def _resolve(path: str) -> Any:
    return pkgutil.resolve_name(path)


# ------------------------------------------------------------------ behaviour that differs, or is not configurable


def warm_page_hash(page_size: int) -> None:
    """Make the engine's page hash usable: its first use compiles an extension (15 to 30 s, once per host)."""
    utils = importlib.import_module(f"{SRT}.mem_cache.utils")
    name = "get_storage_hash_str" if hasattr(utils, "get_storage_hash_str") else "get_hash_str"
    getattr(utils, name)(list(range(page_size)), None, page_size=page_size)


def register_pools(backend: Any, controller: Any) -> None:
    """Tell a backend the host pools, in the engine's own order."""
    backend.register_mem_pool_host(controller.storage_host_pool)
    for pool in getattr(controller.mem_pool_host, "entries", None) or []:
        backend.register_mem_host_pool_v2(pool.host_pool, pool.name)
    if hasattr(backend, "on_host_pools_registered"):  # since 0.5.21
        backend.on_host_pools_registered()


# Backends that read and write host pool pages by index. The engine chooses by this list inside its attach; a test on
# the real engine compares.
ZERO_COPY = frozenset({"hf3fs", "mooncake", "npu_memcache", "eic", "nixl", "simm", "mori", "tensorcast", "seaweedfs"})


def is_zero_copy(name: str, storage_config: Any) -> bool:
    """True when the engine uses the v1 calls for this backend."""
    if name == "dynamic":
        return bool((storage_config.extra_config or {}).get("interface_v1", 0))
    return name in ZERO_COPY


def page_functions(controller: Any, name: str | None, storage_config: Any) -> tuple[Any, Any]:
    """The engine's get and set functions for a backend, as its attach chooses them."""
    if name is not None and is_zero_copy(name, storage_config):
        return controller._page_get_zero_copy, controller._page_set_zero_copy
    return controller._generic_page_get, controller._generic_page_set


def override_view(source: str, fields: dict[str, Any]) -> None:
    """Write resolved config leaves of the engine's own view (this process's)."""
    importlib.import_module(f"{SRT}.runtime_context").get_context().override(source, **fields)


def view_leaf(name: str) -> Any:
    """Read one leaf of the engine's own view."""
    return importlib.import_module(f"{SRT}.runtime_context").get_context().config_leaf(name)


_file_dir = threading.local()


@contextmanager
def file_directory(path: str | None) -> Iterator[None]:
    """Inside, on this thread, the ``file`` backend's directory is ``path``, whatever the environment says.

    The engine lets its environment variable win over ``file_storage_path`` (and 0.5.20 knows only the variable), so
    that a second directory could never be attached while it is set.
    """
    if path is None:
        yield
        return
    _patch_file_dir()
    _file_dir.path = path
    try:
        yield
    finally:
        _file_dir.path = None


def _patch_file_dir() -> None:
    field = importlib.import_module(f"{SRT}.environ").envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR
    if "get" in vars(field):
        return
    original = field.get

    def get() -> Any:
        return getattr(_file_dir, "path", None) or original()

    field.get = get
