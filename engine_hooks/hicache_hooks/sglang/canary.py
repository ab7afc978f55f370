"""PREPARE's canary on SGLang's contract: one page through the batch calls that traffic uses.

The contract has no delete, so the key is fixed for each namespace, and the page's bytes follow from the key: a later
PREPARE finds the page of an earlier one, which stores answer without writing again, and still knows what must come
back. Ranks have keys of their own where they hold different parts of a page: the namespace names the rank.

Generic backends are tested through ``batch_set`` and ``batch_get`` on scratch tensors. Zero-copy backends read and
write host pool pages by index; a page of the pool is borrowed only while at least a quarter of it is free, so that
no rank's eviction is decided by it. When a call that has its index failed, the store may still use it: it is given
back only after the store was closed, else never (F27). Where a rank is no writer (replicated MLA caches) only lookups
are tested. Stores of files may have their directory made by rank 0 alone, at the same moment: on the other ranks a
write that is not taken is tried again for a while.
"""

import hashlib
import logging
import time
from collections.abc import Callable
from typing import Any, NoReturn

from hicache_hooks.guard import describe_exception
from hicache_hooks.sglang import versions
from hicache_hooks.sglang.deadline import CallTimedOut
from hicache_hooks.sglang.storage_guard import StorageGuard
from hicache_proto.errors import PrepareFailed

log = logging.getLogger(__name__)

RANK0_PATIENCE_S, RANK0_RETRY_S = 3.0, 0.05
BORROW_FREE_SHARE = 4  # at least 1/4 of the pool free


def canary_key(namespace: str) -> str:
    """64 hex digits, as the engine's own page hashes."""
    return hashlib.sha256(f"hicache canary {namespace}".encode()).hexdigest()


def absent_key(namespace: str) -> str:
    """A key that nobody ever stores."""
    return hashlib.sha256(f"hicache canary, absent {namespace}".encode()).hexdigest()


def run_canary(backend: Any, controller: Any, storage_config: Any, name: str, namespace: str) -> None:
    """Prove ``backend``, whose host pools are registered; leaves one page in it.

    Raises:
        PrepareFailed: ``details.reason`` as the embedded engine's canary, or ``canary_late``.
    """
    # The guard turns failures into misses; here they must be seen.
    store = _InTime(backend) if isinstance(backend, StorageGuard) else backend
    zero_copy = versions.is_zero_copy(name, storage_config)
    key, absent = canary_key(namespace), absent_key(namespace)
    if _call("canary_exists_mismatch", lambda: store.batch_exists([absent])):
        _fail("canary_exists_mismatch", "exists finds a page that nobody stored")
    if not storage_config.is_storage_writer:
        return
    patience_s = RANK0_PATIENCE_S if getattr(storage_config, "tp_rank", 0) else 0.0
    if zero_copy:
        _zero_copy(backend, store, controller, key, patience_s)
    else:
        _generic(store, controller.storage_host_pool, key, patience_s)


class _InTime:
    """A guarded store's own answers, with the guard's deadline wherever the call touches no page of the engine's.

    A store that hangs then fails this PREPARE instead of keeping the builder from the next one. It is closed when the
    call has left it.
    """

    def __init__(self, guard: StorageGuard) -> None:
        self._guard, self._store = guard, guard.inner

    def batch_exists(self, keys: list[str]) -> Any:
        return self._guard.in_time(lambda: self._store.batch_exists(keys))

    def batch_set(self, keys: list[str], pages: list[Any]) -> Any:
        return self._guard.in_time(lambda: self._store.batch_set(keys, pages))

    def batch_get(self, keys: list[str], pages: list[Any]) -> Any:
        return self._guard.in_time(lambda: self._store.batch_get(keys, pages))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def _write(write: Callable[[], bool], patience_s: float) -> None:
    """Write until taken; the builder's thread may wait, the scheduler serves meanwhile."""
    limit = time.monotonic() + patience_s
    while not write():
        if time.monotonic() >= limit:
            _fail("canary_write_failed", "the store did not take the canary page")
        time.sleep(RANK0_RETRY_S)


def _generic(store: Any, pool: Any, key: str, patience_s: float) -> None:
    page = _pattern(pool.get_dummy_flat_data_page(), key)
    _write(lambda: bool(_call("canary_write_failed", lambda: store.batch_set([key], [page]))), patience_s)
    if _call("canary_exists_mismatch", lambda: store.batch_exists([key])) != 1:
        _fail("canary_exists_mismatch", "exists does not find a page that it stored")
    got = _call("canary_read_failed", lambda: store.batch_get([key], [pool.get_dummy_flat_data_page()]))
    if not got or got[0] is None:
        _fail("canary_read_failed", "a canary page was stored and could not be read")
    if not _same(got[0], page):
        _fail("canary_mismatch", "a canary page came back with other bytes")


def _zero_copy(backend: Any, store: Any, controller: Any, key: str, patience_s: float) -> None:
    pool = controller.storage_host_pool
    borrowed = _borrow(controller)
    if borrowed is None:
        log.info("canary: the host pool is too full to lend a page; only lookups were tested")
        return
    doubtful: list[str] = []  # transfers that raised: whether they are over is not known

    def transfer(reason: str, call: Any) -> bool:
        doubtful.append(reason)
        results = _call(reason, call)
        doubtful.clear()
        return all(results or [False])

    try:
        page = _pattern(pool.get_dummy_flat_data_page(), key)
        pool.set_from_flat_data_page(borrowed[0].item(), page)
        _write(lambda: transfer("canary_write_failed", lambda: store.batch_set_v1([key], borrowed)), patience_s)
        if _call("canary_exists_mismatch", lambda: store.batch_exists([key])) != 1:
            _fail("canary_exists_mismatch", "exists does not find a page that it stored")
        pool.set_from_flat_data_page(borrowed[0].item(), pool.get_dummy_flat_data_page())
        if not transfer("canary_read_failed", lambda: store.batch_get_v1([key], borrowed)):
            _fail("canary_read_failed", "a canary page was stored and could not be read")
        if not _same(pool.get_data_page(borrowed[0].item()), page):
            _fail("canary_mismatch", "a canary page came back with other bytes")
    finally:
        if doubtful and not _closed(backend, store):
            log.error(
                "canary: the store failed inside a transfer and could not be closed; a host page of %d tokens that it "
                "may still use stays reserved until the restart",
                len(borrowed),
            )
        else:
            controller.mem_pool_host.free(borrowed)


def _closed(backend: Any, store: Any) -> bool:
    """Close it; True when it has a close of its own and that went well: nothing of it runs any more."""
    if not isinstance(backend, StorageGuard) or not hasattr(store, "close"):
        return False
    backend.close()
    return backend.closed and not backend.close_error


def _borrow(controller: Any) -> Any:
    pool = controller.mem_pool_host
    if pool.available_size() * BORROW_FREE_SHARE < controller.storage_host_pool.size:
        return None
    return pool.alloc(controller.page_size)


def _pattern(page: Any, key: str) -> Any:
    """``page`` filled with bytes that follow from the key."""
    import torch

    raw = page.view(torch.uint8)
    seed = hashlib.sha256(key.encode()).digest()
    block = torch.frombuffer(bytearray(seed), dtype=torch.uint8)
    raw.copy_(block.repeat(-(-raw.numel() // len(seed)))[: raw.numel()])
    return page


def _same(got: Any, page: Any) -> bool:
    import torch

    # As bytes: the pattern read as floating point may hold NaN, which is not equal to itself.
    a, b = got.contiguous().view(torch.uint8).flatten(), page.contiguous().view(torch.uint8).flatten()
    return bool(torch.equal(a, b))


def _call(reason: str, call: Any) -> Any:
    failed: BaseException
    try:
        return call()
    except NotImplementedError as exc:
        failed, reason = exc, "backend_contract"
    except CallTimedOut:
        _fail("canary_late", "the store did not answer the canary within guard_deadline_s")
    except BaseException as exc:  # SystemExit too: the thread is the engine's (F38)
        failed = exc
    _fail(reason, f"the store failed: {describe_exception(failed)}")


def _fail(reason: str, message: str) -> NoReturn:
    raise PrepareFailed(message, details={"reason": reason}) from None
