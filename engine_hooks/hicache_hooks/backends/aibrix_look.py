"""A look into what the vendor keeps: the keys of its DRAM cache (L1), and those of its connectors.

``exists`` of the vendor copies the keys before each key of a batch and costs 15 us a page, a tenth of the read of 1 MiB
that follows. Here each key is looked up by itself in the vendor's own table (equality and hash are of the last block
only), for half of that. Nothing is remembered: the vendor evicts when it likes. A list of all keys its API has not.
"""

import importlib
import os
from typing import Any

from hicache_hooks.backends.aibrix_options import AibrixOptions


class L1View:
    """Read-only. Thread-safe: holds the vendor's own lock."""

    def __init__(self, cache: Any, block_tokens: int) -> None:
        """``cache`` is the vendor's ``L1Cache``.

        Raises:
            AttributeError, ImportError: this version of the package keeps it in another way.
        """
        self._lock = cache._cond_lock
        self._policy = cache._eviction_policy
        self._table = self._policy._hashmap  # with "ghosts" of what was evicted
        module = importlib.import_module("aibrix_kvcache.cache_hashable")
        self._key, self._hashes = module.KVCacheKey, module.BlockHashes
        self._tokens = block_tokens

    def prefix(self, keys: list[str]) -> int:
        """How many of the first ``keys`` are there without a gap."""
        make, hashes, tokens, policy = self._key, self._hashes, self._tokens, self._policy
        wanted = [make(None, hashes([key], tokens)) for key in keys]
        with self._lock:
            return next((i for i, key in enumerate(wanted) if key not in policy), len(wanted))

    def keys(self) -> set[str]:
        """Every key that it knows, evicted ones included."""
        with self._lock:
            return {str(key.query._data[-1]) for key in list(self._table)}


def view(manager: Any, block_tokens: int) -> L1View | None:
    """None: the manager has no L1."""
    cache = getattr(manager, "_l1_cache", None)
    return L1View(cache, block_tokens) if cache is not None else None


def facts(manager: Any, options: AibrixOptions, source: str) -> dict[str, Any]:
    """For status: what is inside, and how full the DRAM cache is."""
    l1 = getattr(manager, "_l1_cache", None)
    ttl_s = options.l2_options.get("rocksdb_ttl_s") if options.l2_backend == "ROCKSDB" else None
    return {
        "inner": options.inner,
        "settings": source,
        "l1_used_bytes": len(l1) if l1 is not None else 0,
        "rocksdb_ttl_s": ttl_s,
    }


def refusal(status: Any) -> bool | None:
    """What a put that failed with this status says of its pages: False: no memory or no room; None: an error (F69).

    RocksDB's errors are one code of the vendor's, so a full disk is told by RocksDB's own words.
    """
    full = "no space left" in str(getattr(status, "value", "")).lower()
    return False if full or status.is_out_of_memory() or status.is_denied() else None


def stored(manager: Any, l1: L1View | None) -> set[str]:
    """Every key there is.

    Raises:
        RuntimeError: this connector, or this version of the package, cannot be looked into.
    """
    if l1 is None and getattr(manager, "_l1_cache", None) is not None:
        raise RuntimeError("pages of this version's DRAM cache cannot be listed, so they cannot be cleared")
    found = l1.keys() if l1 is not None else set()
    connector = getattr(getattr(manager, "_l2_cache", None), "_backend", None)
    if connector is None:
        return found
    raw: list[bytes]
    if connector.name in ("RocksDB", "Mock"):
        raw = list(connector.store.keys())
    elif connector.name == "SHFS":
        raw = [
            bytes.fromhex(name)
            for _, _, names in os.walk(connector.root_path)
            for name in names
            if not name.endswith(".tmp")
        ]
    else:
        raise RuntimeError(f"pages of the connector {connector.name} cannot be listed, so they cannot be cleared")
    return found | {item.decode(errors="replace") for item in raw}
