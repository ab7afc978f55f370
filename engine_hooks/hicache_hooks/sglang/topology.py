"""Where a scheduler stands in its engine, what it can do, and what is refused here by name."""

import hashlib
import importlib
import importlib.metadata
import math
from typing import Any

from hicache_hooks.sglang import versions
from hicache_proto.model import Capabilities, RankIdentity


def parallel() -> Any:
    """The engine's own parallel context of this process."""
    return importlib.import_module(f"{versions.SRT}.runtime_context").get_parallel()


def identity() -> RankIdentity:
    """This scheduler's place. Plain data parallel: each replica is a world of its own.

    The engine counts the groups of DP attention as data-parallel ranks; they are parts of one world.
    """
    p = parallel()
    ranks = int(getattr(p, "num_dp_ranks", None) or getattr(p, "dp_size", 1) or 1)
    groups = max(1, int(getattr(p, "attn_dp_size", 1) or 1))
    return RankIdentity(
        dp_rank=int(p.dp_rank or 0) // groups,
        dp_size=max(1, ranks // groups),
        pp_rank=int(p.pp_rank),
        pp_size=int(p.pp_size),
        tp_rank=int(p.tp_rank),
        tp_size=int(p.tp_size),
    )


def refusals(scheduler: Any) -> list[str]:
    """Why nothing can be attached here; empty when it can. Each is a combination that has not been shown to work."""
    p = parallel()
    found = []
    if int(p.pp_size) > 1:
        found.append("pipeline parallelism (pp_size > 1) is not supported yet")
    if bool(p.attn_dp_enabled):
        found.append("DP attention is not supported yet")
    if int(getattr(p, "attn_cp_size", 1) or 1) > 1:
        found.append("attention context parallelism is not supported yet")
    tree = scheduler.tree_cache
    if not scheduler.enable_hierarchical_cache or getattr(tree, "cache_controller", None) is None:
        found.append("the engine runs without --enable-hierarchical-cache")
    elif getattr(tree, "_storage_attachment", None) is None:
        found.append(f"tree cache {type(tree).__name__} cannot attach storage at run time")
    return found


def namespace(scheduler: Any) -> str:
    """32 hex digits of what decides a page's bytes: the engine's own store keys hold less (no dtype, no layout)."""
    p = parallel()
    serving = importlib.import_module(f"{versions.SRT}.runtime_context").get_serving()
    pool = scheduler.tree_cache.cache_controller.storage_host_pool
    parts = (
        "sglang",
        str(serving.served_model_name),
        str(pool.dtype),
        str(pool.layout),
        str(pool.page_size),
        str(page_bytes(scheduler)),
        f"tp={p.tp_rank}/{p.tp_size}",
        f"pp={p.pp_rank}/{p.pp_size}",
    )
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        raw = part.encode()
        digest.update(len(raw).to_bytes(4, "little") + raw)
    return digest.hexdigest()


def host_pool(scheduler: Any) -> tuple[int, str]:
    """Tokens and layout of the host pool that storage reads and writes."""
    pool = scheduler.tree_cache.cache_controller.storage_host_pool
    return int(pool.size), str(pool.layout)


def page_bytes(scheduler: Any) -> int:
    """Payload bytes of one page of this rank."""
    pool = scheduler.tree_cache.cache_controller.storage_host_pool
    return int(pool.get_size_per_token()) * int(pool.page_size)


def capabilities(scheduler: Any, problems: list[str], fingerprint: str) -> Capabilities:
    """For the hello. ``problems``: hooks that did not take, and refusals."""
    controller = getattr(scheduler.tree_cache, "cache_controller", None)
    pool = getattr(controller, "storage_host_pool", None)
    return Capabilities(
        engine="sglang",
        engine_version=versions.engine_version(),
        hooks_version=importlib.metadata.version("hicache-sidecar"),
        attach=not problems,
        drain=not problems,
        tree=type(scheduler.tree_cache).__name__,
        layout=str(pool.layout) if pool is not None else "",
        page_size=int(pool.page_size) if pool is not None else 0,
        page_bytes=page_bytes(scheduler) if pool is not None else 0,
        l2_tokens=int(pool.size) if pool is not None else 0,
        fingerprint=fingerprint,
        watchdog_s=watchdog_s(scheduler),
        problems=list(problems),
    )


def watchdog_s(scheduler: Any) -> float | None:
    """After so many seconds without progress the engine kills itself; None: it has no watchdog."""
    timeout = getattr(scheduler.server_args, "watchdog_timeout", None)
    return float(timeout) if timeout and math.isfinite(timeout) and timeout > 0 else None
