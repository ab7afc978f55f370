"""Every predicate of SGLang's ``is_fully_idle`` as a counter of its own name, and what that verdict leaves out.

All are plain reads of Python objects. Any thread may read them; only the scheduler thread's reading is binding.

The engine's verdict misses work that COMMIT must wait for (each seen on the running engine): a storage thread that is
still inside a backend call of a request that was given up (``storage_calls``; a stock detach then blocks the scheduler
for 10 s a thread), the storage queues, input that the engine has put off, requests that wait for an encoder. What our
own gate holds is no blocker. ``engine_verdict`` is the whole verdict once more: a predicate that a later engine adds
blocks before anybody taught us its name (F2).
"""

from typing import Any, Protocol

from hicache_proto.model import IdleReport

PAUSED = "engine_paused"


class Threads(Protocol):
    """What is asked of the storage threads."""

    def counters(self) -> dict[str, int]:
        """``storage_calls``, ``storage_queues``."""


def idle_report(scheduler: Any, threads: Threads, held: int = 0) -> IdleReport:
    """All counters now. ``held``: requests in front of our gate, which are shown and block nobody.

    Raises:
        AttributeError: this engine lacks what a mandatory counter reads.
    """
    s = scheduler
    counters = {
        "running_batch": len(s.running_batch.reqs),
        "chunked_prefill": int(s.chunked_req is not None),
        "last_batch": 0 if s.last_batch is None else len(s.last_batch.reqs),
        "overlap_results": len(getattr(s, "result_queue", ())) if s.enable_overlap else 0,  # made by the loop itself
        "pp_microbatches": int(not s._pp_microbatches_drained()),
        "waiting_queue": len(s.waiting_queue),
        "grammar_queue": len(s.grammar_manager.grammar_queue),
        "dllm_staging": int(s.dllm_manager.any_staging_reqs()),
        **_disaggregation(s),
        **_cache(s.tree_cache, s.enable_hierarchical_cache),
        **threads.counters(),
        "deferred_input": len(getattr(s, "_deferred_input_requests", ())),
        "encoder_waiting": len(getattr(getattr(s, "mm_receiver", None), "waiting_list", ()) or ()),
    }
    if getattr(s, "enable_hisparse", False):
        counters["hisparse_staging"] = int(s.hisparse_coordinator.has_ongoing_staging())
    if not s.enable_hierarchical_cache and getattr(s, "enable_lmcache", False):
        counters["lmcache_operations"] = int(s.tree_cache.has_pending_cache_operations())
    if not any(counters.values()):
        counters["engine_verdict"] = int(not s.is_fully_idle())
    # Paused in place with running requests: they will never end by waiting, so a drain must not wait for them.
    hopeless = bool(getattr(s, "_engine_paused", False)) and any(counters.values())
    if hopeless:
        counters[PAUSED] = 1
    return IdleReport(counters=counters, hopeless=PAUSED if hopeless else "", held=held)


def _disaggregation(s: Any) -> dict[str, int]:
    mode = getattr(s.disaggregation_mode, "value", "null")
    counters = dict.fromkeys(
        ("disagg_bootstrap_queue", "disagg_prealloc_queue", "disagg_transfer_queue", "disagg_inflight_queue"), 0
    )
    if mode == "prefill":
        counters["disagg_bootstrap_queue"] = len(s.disagg_prefill_bootstrap_queue.queue)
        counters["disagg_inflight_queue"] = len(s.disagg_prefill_inflight_queue)
    elif mode == "decode":
        counters["disagg_prealloc_queue"] = len(s.disagg_decode_prealloc_queue.queue)
        counters["disagg_retracted_queue"] = len(s.disagg_decode_prealloc_queue.retracted_queue)
        transfer = s.disagg_decode_transfer_queue
        counters["disagg_transfer_queue"] = len(transfer.queue)
        if hasattr(transfer, "has_pending_deferred_releases"):  # since 0.5.21
            counters["disagg_deferred_releases"] = int(transfer.has_pending_deferred_releases())
        offload = getattr(s, "decode_offload_manager", None)
        counters["disagg_offload"] = 0 if offload is None else len(offload.ongoing_offload)
    return counters


def _cache(tree: Any, hierarchical: bool) -> dict[str, int]:
    counters = dict.fromkeys(("ongoing_write_through", "ongoing_load_back", "ongoing_prefetch", "ongoing_backup"), 0)
    if not hierarchical:
        return counters
    counters["ongoing_write_through"] = len(tree.ongoing_write_through)
    counters["ongoing_load_back"] = len(tree.ongoing_load_back)
    if tree.enable_storage:
        counters["ongoing_prefetch"] = len(tree.ongoing_prefetch)
        counters["ongoing_backup"] = len(tree.ongoing_backup)
        pipeline = getattr(tree, "buffer_pipeline", None)
        if pipeline is not None:
            counters["buffer_pipeline"] = int(not pipeline.is_idle())
    return counters
