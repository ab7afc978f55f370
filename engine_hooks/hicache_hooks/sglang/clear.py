"""Deletes this rank's pages from the attached store, nothing else (F68).

SGLang's own ``clear`` empties a whole store, other engines' pages too, so it is not used. The ``file`` backend marks
its files with model and rank, and those are deleted here; other backends cannot be cleared by namespace. What stands
before model and rank must be a page's key and nothing more: the names of model ``a_m`` end as those of ``m`` do.
"""

import contextlib
import importlib
import os
import re
from typing import Any

from hicache_hooks.sglang.versions import SRT
from hicache_proto.errors import PrepareFailed, UnsupportedByEngine


def page_pattern() -> str:
    """A page hash, and the pool's name where it is not the KV cache's. By name: ``.swa_x`` is not a pool of ours."""
    try:
        pools = importlib.import_module(f"{SRT}.mem_cache.hicache_storage").PoolName
    except (ImportError, AttributeError):
        return "[0-9a-f]{64}"
    names = sorted(str(pool) for pool in pools)  # as the backend writes them
    return f"[0-9a-f]{{64}}(?:\\.(?:{'|'.join(map(re.escape, names))}))?"


def clear_namespace(name: str, store: Any) -> int:
    """How many pages were deleted. *agent* thread.

    Raises:
        UnsupportedByEngine: this backend cannot. PrepareFailed: the store failed.
    """
    suffixes = tuple(
        f"{mark}.bin" for mark in {getattr(store, "config_suffix", ""), getattr(store, "tp_config_suffix", "")} if mark
    )
    path = getattr(store, "file_path", None)
    if name != "file" or not suffixes or not isinstance(path, str):
        raise UnsupportedByEngine(
            f"SGLang's backend {name!r} can only be emptied as a whole, other engines' pages too",
            details={"reason": "clear_not_scoped"},
            hint="the engine's own POST /hicache/storage-backend/clear does that",
        )
    ours = re.compile(f"{page_pattern()}(?:{'|'.join(map(re.escape, suffixes))})")
    deleted = 0
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                if ours.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(entry.path)
                        deleted += 1
    except OSError as failure:
        reason = os.strerror(failure.errno or 0)
        raise PrepareFailed(f"the store could not be cleared: {reason}", details={"reason": "clear_failed"}) from None
    cache = getattr(store, "metadata_cache", None)
    if cache is not None:
        cache.clear()
    return deleted
