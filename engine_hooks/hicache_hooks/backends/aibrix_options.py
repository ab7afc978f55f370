"""Options of ``aibrix``, each over a variable ``AIBRIX_KV_CACHE_OL_*`` of the engine's environment.

The vendor knows variables only, one set per process. Here they become options of one attach: ``l2_options`` takes the
variables' names without the prefix, in lower case, and ``settings`` says what the vendor's code is to see.
"""

import difflib
import importlib.util
import os
from collections.abc import Mapping
from typing import Annotated, Any, Self

import msgspec

from hicache_hooks.backends.options import BackendOptions, StoreFacts, invalid
from hicache_proto.errors import BackendUnavailable

PREFIX = "AIBRIX_KV_CACHE_OL_"
MIN_PAGES = 4
GIB = 1 << 30
BLOCK_TOKENS = 16  # one page is one block of so many "tokens"; the vendor counts its time-outs and batches in tokens
PAGE_TIMEOUT_MS = 2000
DEFAULT_TTL_S = 600  # the vendor's, of RocksDB
DEFAULT_L1_GB = 10.0  # the vendor's
RDMA_DEVICES = "/sys/class/infiniband"

# Connector -> (module that it imports, what to say when it is absent).
CONNECTORS: dict[str, tuple[str, str]] = {
    "ROCKSDB": ("rocksdict", "package rocksdict"),
    "SHFS": ("", ""),
    "MOCK": ("", ""),
    "INFINISTORE": ("infinistore", "package infinistore"),
    "PRISKV": ("priskv", "module priskv (in no public index)"),
    "PRIS": ("priskv", "module priskv (in no public index)"),
    "HPKV": ("hpkv", "module hpkv (in no public index)"),
    "EIC": ("eic", "module eic (in no public index)"),
}
LOCAL = frozenset({"", "ROCKSDB", "MOCK"})  # other hosts do not see these

# What an attach may set; of aibrix-kvcache 0.8. Geometry, device and key format are ours, secrets stay in variables.
L2_OPTIONS = frozenset((
    "double_get_threshold", "l1_cache_eviction_policy", "s3fifo_small_to_main_promo_threshold",
    "s3fifo_small_fifo_capacity_ratio", "l2_cache_namespace", "l2_cache_op_batch",
    "l2_cache_per_token_timeout_ms", "l2_cache_placement_policy", "l2_cache_ingestion_type",
    "l2_cache_ingestion_max_inflight_tokens", "l2_cache_num_async_workers", "meta_service_backend",
    "meta_service_refresh_interval_s", "meta_service_url", "meta_service_cluster_meta_key", "rocksdb_root",
    "rocksdb_ttl_s", "rocksdb_write_buffer_size", "rocksdb_target_file_size_base",
    "rocksdb_max_write_buffer_number", "rocksdb_max_total_wal_size", "rocksdb_max_background_jobs", "shfs_root",
    "infinistore_host_addr", "infinistore_service_port", "infinistore_connection_type", "infinistore_ib_port",
    "infinistore_link_type", "infinistore_visible_dev_list", "infinistore_use_gdr", "hpkv_remote_addr",
    "hpkv_remote_port", "hpkv_local_addr", "hpkv_local_port", "hpkv_use_gdr", "priskv_remote_addr",
    "priskv_remote_port", "priskv_use_mput_mget", "priskv_use_zero_copy", "transport_rdma_addr_range",
    "eic_config_file",
))  # fmt: skip


def _doc(text: str, **limits: Any) -> msgspec.Meta:
    return msgspec.Meta(description=text, **limits)


class AibrixOptions(BackendOptions, frozen=True, kw_only=True):
    """Options of ``aibrix``; null: the variable in brackets, else the vendor's default."""

    l1_capacity_gb: Annotated[
        Annotated[float, msgspec.Meta(ge=0)] | None,
        _doc("DRAM cache in GiB; 0: none; default 10 [L1_CACHE_CAPACITY_GB, L1_CACHE_ENABLED]"),
    ] = None
    l2_backend: Annotated[
        str | None,
        _doc('connector: ROCKSDB, SHFS, INFINISTORE, PRISKV, HPKV, EIC; default "": none [L2_CACHE_BACKEND]'),
    ] = None
    l2_options: Annotated[
        dict[str, str | bool | int | float],
        _doc("variables by name, without AIBRIX_KV_CACHE_OL_ and in lower case, such as rocksdb_root"),
    ] = msgspec.field(default_factory=dict)

    def effective(self, env: Mapping[str, str]) -> Self:
        """Every value resolved; ``l2_options`` holds texts under lower-case names, variables included.

        Raises:
            InvalidConfig: an unknown option, or nothing to store in.
            BackendUnavailable: what the connector needs is not here.
        """
        given = {_short(name): _text(value) for name, value in self.l2_options.items()}
        from_env = {name: env[PREFIX + name.upper()] for name in L2_OPTIONS if env.get(PREFIX + name.upper())}
        values = {**from_env, **given}
        backend = env.get(f"{PREFIX}L2_CACHE_BACKEND", "") if self.l2_backend is None else self.l2_backend
        backend = backend.strip().upper()
        l1_gb = _l1_from(env) if self.l1_capacity_gb is None else self.l1_capacity_gb
        if not backend and not l1_gb:
            raise invalid("l2_backend", "must be given when there is no L1 (l1_capacity_gb is 0)", "missing_option")
        _require_connector(backend, values)
        for name in ("rocksdb_root", "shfs_root"):
            if name in values:
                values[name] = os.path.expanduser(values[name])
                if not os.path.isabs(values[name]):
                    raise invalid(f"l2_options.{name}", "must be an absolute path")
        return msgspec.structs.replace(self, l1_capacity_gb=float(l1_gb), l2_backend=backend, l2_options=values)

    def check(self, facts: StoreFacts) -> list[str]:
        """L1 holds pages (F49); pages that vanish by themselves."""
        if facts.page_bytes < 1 or facts.page_bytes % (2 * BLOCK_TOKENS):
            raise invalid("page_bytes", f"of this engine is no multiple of {2 * BLOCK_TOKENS}", "bad_geometry")
        warnings = []
        pages = int((self.l1_capacity_gb or 0) * GIB) // facts.page_bytes
        if self.l1_capacity_gb and pages < MIN_PAGES:
            raise invalid("l1_capacity_gb", f"holds {pages} pages; needs {MIN_PAGES}", "bad_geometry")
        if not self.l2_backend and pages < facts.l2_pages:
            warnings.append(f"L1 holds {pages} pages, fewer than the host pool's {facts.l2_pages}")
        if not self.l2_backend:
            warnings.append("there is no l2_backend: pages are in this process's memory and end with a detach")
        ttl = self.l2_options.get("rocksdb_ttl_s", DEFAULT_TTL_S)
        if self.l2_backend == "ROCKSDB" and _seconds(ttl) > 0:
            # rocksdict 0.3.29 alone, 8 writers: 64 of 256 fresh values gone in half of the runs; with 0 in none.
            warnings.append(
                f"RocksDB pages expire after rocksdb_ttl_s = {ttl} seconds, and with any time to live RocksDB may lose "
                "fresh pages after a reopen; 0: no time to live, and no bound of the size"
            )
        return warnings

    @property
    def keeps_all(self) -> bool:
        """RocksDB alone, without a time to live: what was stored is there until it is deleted."""
        ttl = self.l2_options.get("rocksdb_ttl_s", DEFAULT_TTL_S)
        return self.l2_backend == "ROCKSDB" and not self.l1_capacity_gb and _seconds(ttl) <= 0

    @property
    def inner(self) -> str:
        """What stores the pages (F75)."""
        return "+".join(part for part in ("L1" if self.l1_capacity_gb else "", self.l2_backend or "") if part)

    def source(self, env: Mapping[str, str]) -> str:
        """For status (F75): where effective options come from. A variable that says the same as an option counts."""
        values = {
            **self.l2_options, "l2_cache_backend": self.l2_backend or "",
            "l1_cache_capacity_gb": str(self.l1_capacity_gb), "l1_cache_enabled": str(bool(self.l1_capacity_gb)),
        }  # fmt: skip
        said = {name: env.get(PREFIX + name.upper(), "").strip() for name in values}
        used = sorted(name.upper() for name, value in values.items() if said[name] and _same(said[name], str(value)))
        return f"options and {PREFIX}*: {', '.join(used)}" if used else "options"

    def settings(self, **ours: str) -> dict[str, str]:
        """Variables that the vendor is to see, ``ours`` on top; names in full."""
        values = {
            # Else a page reaches L2 at its second use, and is gone after a detach although it was said to be stored.
            "l2_cache_ingestion_type": "ALL",
            # Else what is missing in L1 is not looked for in L2 unless four blocks of a batch are.
            "double_get_threshold": "1",
            # The vendor's 20 is 0.3 s for a page, which a busy host does not keep; the guard has a deadline of its own.
            "l2_cache_per_token_timeout_ms": str(PAGE_TIMEOUT_MS // BLOCK_TOKENS),
            **self.l2_options,
            **ours,
            "l1_cache_enabled": "1" if self.l1_capacity_gb else "0",
            "l1_cache_capacity_gb": repr(self.l1_capacity_gb or 0.0),
            "l2_cache_backend": self.l2_backend or "",
            "block_size": "-1",
            "chunk_size": "512",
            "max_seq_len": "-1",
            # Lists that grow until somebody asks for a summary.
            "time_measurement_enabled": "0",
            "breakdown_measurement_enabled": "0",
        }
        return {PREFIX + name.upper(): str(value) for name, value in values.items()}


def _short(name: str) -> str:
    short = name.removeprefix(PREFIX).lower()
    if short in L2_OPTIONS:
        return short
    near = difflib.get_close_matches(short, sorted(L2_OPTIONS), n=1)
    hint = f"did you mean {near[0]!r}?" if near else "names are the variables' without AIBRIX_KV_CACHE_OL_"
    raise invalid("l2_options", f"has an unknown or fixed name; {hint}", "unknown_key", suggestion=near[:1])


def _seconds(value: object) -> int:
    try:
        return int(str(value))
    except ValueError:
        pass
    raise invalid("l2_options.rocksdb_ttl_s", "must be a whole number of seconds")


def _same(one: str, other: str) -> bool:
    words = {"1": "true", "0": "false"}
    try:
        return float(one) == float(other)
    except ValueError:
        return words.get(one, one.lower()) == other.lower()


def _text(value: object) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def _l1_from(env: Mapping[str, str]) -> float:
    if env.get(f"{PREFIX}L1_CACHE_ENABLED", "1").strip().lower() not in ("1", "true"):
        return 0.0
    text = env.get(f"{PREFIX}L1_CACHE_CAPACITY_GB") or str(DEFAULT_L1_GB)
    try:
        return float(text)
    except ValueError:
        pass
    raise invalid("l1_capacity_gb", "has a value in the engine's environment that is no number")


def _require_connector(backend: str, values: Mapping[str, str]) -> None:
    if not backend:
        return
    if backend not in CONNECTORS:
        near = difflib.get_close_matches(backend, CONNECTORS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise invalid("l2_backend", f"must be one of {', '.join(CONNECTORS)}{hint}", "unknown_connector")
    module, words = CONNECTORS[backend]
    missing = [words] if module and importlib.util.find_spec(module) is None else []
    rdma = backend == "INFINISTORE" and values.get("infinistore_connection_type", "RDMA").upper() == "RDMA"
    if rdma and not os.path.isdir(RDMA_DEVICES):
        missing.append("an RDMA device")
    if missing:
        raise BackendUnavailable(
            f"aibrix connector {backend} is not usable here: {', '.join(missing)}",
            details={"missing": missing, "connector": backend},
        )
