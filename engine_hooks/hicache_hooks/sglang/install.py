"""COMMIT and its way back on SGLang: attach, detach, exchange of the object, and live keys. Scheduler thread.

Theory of operation
===================

* Storage off -> on: the engine's own attach, which gets the object that PREPARE built (``handover``).
* On -> off: the engine's own detach. The object is put aside before, so that the engine does not close it: UNDO needs
  it back. Its communication groups are put aside too and given to the next attach (``groups``): making them is a
  collective, which an UNDO on one rank alone must never enter.
* On -> on: the object is exchanged with all that the engine's attach derives from it (type string, page functions,
  config, thresholds, the tree's knobs, metrics labels, the engine's view), while its threads wait in their queues:
  0.03 ms instead of stopping and starting four threads. Beliefs about what the old store holds are dropped.

The engine's stop joins threads for up to 10 s each on this thread. It is called only when none of them is busy; the
idle check in the same step has said so, and it is asked here once more.

A method that raises has changed nothing; what was changed halfway is put back first: an attach of the engine's can
fail with its threads running. Where that cannot be put back, ``broken`` is told.
"""

import logging
import time
from collections.abc import Callable
from typing import Any

from hicache_hooks.cache.config import Running
from hicache_hooks.cache.knobs import Knobs
from hicache_hooks.sglang import handover, versions
from hicache_hooks.sglang.config import engine_text
from hicache_hooks.sglang.groups import StorageGroups
from hicache_hooks.sglang.ours import ours
from hicache_hooks.sglang.parked import Parked
from hicache_hooks.sglang.threads import StorageThreads
from hicache_proto.errors import Internal

log = logging.getLogger(__name__)

START_S = 0.2  # a thread that was started is in its queue within a millisecond
_EXCHANGED = (
    "storage_backend",
    "storage_backend_type",
    "storage_config",
    "page_get_func",
    "page_set_func",
    "prefetch_threshold",
)


class Installer:
    """Moves one scheduler between storage states."""

    def __init__(
        self, scheduler: Any, threads: StorageThreads, broken: Callable[[str], None] = lambda reason: None
    ) -> None:
        """``broken``: nobody may change this engine's storage any more; says why."""
        self._broken = broken
        self._scheduler = scheduler
        self._tree = scheduler.tree_cache
        self._controller = scheduler.tree_cache.cache_controller
        self._threads = threads
        self.groups = StorageGroups(self._controller)

    def install(self, new: Parked) -> None:
        """Make ``new`` what runs. Raises: nothing changed."""
        self._refuse_write_policy(new.running.knobs)
        on = self._controller.enable_storage
        if new.backend is None:
            policies = self._policies()
            try:
                self._set_policies(new.running.knobs)  # first: a detach would be hard to take back
                if on:
                    self._detach()
            except BaseException:
                policies()
                raise
        elif on:
            self._exchange(new)
        else:
            self._attach(new)

    def live(self, running: Running) -> None:
        """Knobs and policies alone. Raises: nothing changed."""
        self._refuse_write_policy(running.knobs)
        self._live(running.knobs)

    def show(self, running: Running) -> None:
        """The engine's own view of this process, without secrets. Never raises: the view decides nothing.

        Waits for the outcome, since COMMIT's standstill is short; but after the engine's own attach, which has just
        written secrets there, it comes at once.
        """
        config, knobs = running.config, running.knobs
        fields = {
            "hicache_storage_backend": config.backend if config else None,
            "hicache_storage_backend_extra_config": config.redacted if config else None,
            "hicache_storage_prefetch_policy": knobs.prefetch_policy,
            "hicache_write_policy": knobs.write_policy,
        }
        try:
            versions.override_view("hicache_hooks", fields)
        except Exception:
            log.exception("the engine's own view could not be set")

    # ------------------------------------------------------------------ the three ways

    def _attach(self, new: Parked) -> None:
        from sglang.srt.managers.io_struct import AttachHiCacheStorageReqInput

        knobs = new.running.knobs
        request = AttachHiCacheStorageReqInput(
            hicache_storage_backend=new.name,
            hicache_storage_backend_extra_config_json=engine_text(new.running),
            hicache_storage_prefetch_policy=knobs.prefetch_policy,
            hicache_write_policy=knobs.write_policy,
        )
        policies, undo_tree = self._policies(), self._tree_knobs()
        try:
            with ours(), handover.offer(new.backend), self.groups.given():
                answer = self._scheduler.attach_hicache_storage_wrapped(request)
            if not answer.success:
                raise Internal(f"the engine refused: {answer.message}", details={"reason": "engine_refused"})
            self.show(new.running)
            if self._controller.storage_backend is not new.backend:  # of the engine's own making: not what was proven
                raise Internal("the engine did not take the prepared backend", details={"reason": "handover"})
        except BaseException:
            self._take_back()
            undo_tree()
            policies()
            raise

    def _take_back(self) -> None:
        """A failed attach may have left storage on, with running threads that would use a store that is closed."""
        if not self._controller.enable_storage:
            return
        until = time.monotonic() + START_S
        while self._threads.busy() and time.monotonic() < until:
            time.sleep(0.001)  # they have just been started, and are not in their queues yet
        try:
            self._detach()
        except BaseException:
            self._broken("an attach failed halfway and could not be taken back; restart the engine")
            raise

    def _detach(self) -> None:
        from sglang.srt.managers.io_struct import DetachHiCacheStorageReqInput

        controller = self._controller
        busy = self._threads.busy()
        if busy:
            raise Internal(f"storage threads are busy: {', '.join(busy)}", details={"reason": "threads_busy"})
        self._threads.repair()  # dead ones: the engine's stop would find nothing to stop, and its attach would refuse
        backend, groups = controller.storage_backend, self.groups.take()
        controller.storage_backend = handover.KeepOpen()
        answer = None
        try:
            with ours():
                answer = self._scheduler.detach_hicache_storage_wrapped(DetachHiCacheStorageReqInput())
        finally:
            if answer is None or not answer.success:
                controller.storage_backend = backend
                self.groups.put(groups)
                self._threads.repair()
            else:
                self.groups.keep(groups)
        if not answer.success:
            raise Internal(f"the engine refused: {answer.message}", details={"reason": "engine_refused"})

    def _exchange(self, new: Parked) -> None:
        controller, tree, knobs = self._controller, self._tree, new.running.knobs
        before = {name: getattr(controller, name) for name in _EXCHANGED}
        policies, undo_tree = self._policies(), self._tree_knobs()
        try:
            get, put = versions.page_functions(controller, new.name, new.storage_config)
            controller.storage_backend = new.backend
            controller.storage_backend_type = new.name
            controller.storage_config = new.storage_config
            controller.page_get_func, controller.page_set_func = get, put
            self._live(knobs)
            cache = getattr(tree, "storage_existence_cache", None)
            if cache is not None:
                cache.clear()  # the engine's own detach and attach forgets to: it then skips backups
        except BaseException:
            for name, value in before.items():
                setattr(controller, name, value)
            undo_tree()
            policies()
            raise

    # ------------------------------------------------------------------ knobs and policies

    def _live(self, knobs: Knobs) -> None:
        controller, tree = self._controller, self._tree
        attachment = tree._storage_attachment
        self._set_policies(knobs)
        if not controller.enable_storage:
            return
        threshold = attachment.resolve_prefetch_threshold(knobs.prefetch_threshold)
        controller.prefetch_threshold = max(threshold, controller.page_size)
        attachment.apply_runtime_config(
            storage_backend=controller.storage_backend_type,
            prefetch_threshold=threshold,
            prefetch_timeout_base=knobs.prefetch_timeout_base,
            prefetch_timeout_per_ki_token=knobs.prefetch_timeout_per_ki_token,
            hicache_storage_pass_prefix_keys=knobs.hicache_storage_pass_prefix_keys,
            enable_storage=True,
            enable_storage_metrics=tree._enable_metrics_flag,
            extra_metric_labels=tree.extra_metric_labels,
        )

    def _set_policies(self, knobs: Knobs) -> None:
        tree, wanted = self._tree, (knobs.prefetch_policy, knobs.write_policy)
        if (tree.prefetch_stop_policy, self._controller.write_policy) != wanted:
            tree._storage_attachment._apply_policies(*wanted)  # logs, which can cost milliseconds

    def _refuse_write_policy(self, knobs: Knobs) -> None:
        """Leaving write_back is refused by the engine's attach when the tree holds what the others cannot; so here."""
        tree = self._tree
        if (
            tree.is_write_back
            and knobs.write_policy != "write_back"
            and getattr(tree, "host_memory_mode", "cache") != "buffer_only"
            and hasattr(tree.tree_core, "is_write_through_compatible")
            and not tree.tree_core.is_write_through_compatible()
        ):
            raise Internal(
                "the cache holds host data without its full prefix: flush it before leaving write_back",
                details={"reason": "needs_flush"},
            )

    def _policies(self) -> Callable[[], None]:
        tree, controller = self._tree, self._controller
        was = (tree.prefetch_stop_policy, controller.write_policy, tree.write_through_threshold, tree.is_write_back)

        def back() -> None:
            tree.prefetch_stop_policy, controller.write_policy, tree.write_through_threshold, tree.is_write_back = was

        return back

    def _tree_knobs(self) -> Callable[[], None]:
        tree = self._tree
        names = (
            "prefetch_threshold",
            "prefetch_timeout_base",
            "prefetch_timeout_per_page",
            "hicache_storage_pass_prefix_keys",
        )
        was = {name: getattr(tree, name) for name in names}

        def back() -> None:
            for name, value in was.items():
                setattr(tree, name, value)

        return back
