"""What a scheduler really runs, read from its live objects: any thread, plain reads.

Status and drift are about what *is*, not about what was ordered. What we installed is recognised by identity of the
backend object; anything else was attached by the engine itself, at its start or through its own API.
"""

import math
from dataclasses import replace
from typing import Any

from hicache_hooks.cache.config import Running
from hicache_hooks.cache.knobs import Knobs
from hicache_hooks.sglang import versions
from hicache_hooks.sglang.config import BASE, adopted
from hicache_hooks.sglang.parked import Parked
from hicache_proto.model import KNOBS, EffectiveState


class LiveState:
    """Reads one scheduler."""

    def __init__(self, scheduler: Any, namespace: str) -> None:
        self._scheduler = scheduler
        self._tree = scheduler.tree_cache
        self._controller = scheduler.tree_cache.cache_controller
        self._namespace = namespace
        self._ours: Parked | None = None

    def installed(self, parked: Parked | None) -> None:
        """*scheduler*: what we installed last."""
        self._ours = parked

    def backend(self) -> Any:
        """The backend object in use; None when storage is off."""
        return self._controller.storage_backend if self._controller.enable_storage else None

    def parked(self) -> Parked:
        """What runs, as something that can be installed again."""
        backend, ours = self.backend(), self._ours
        if backend is None:
            return Parked(Running(None, self._knobs(None)))
        if ours is not None and ours.backend is backend:
            return Parked(Running(ours.running.config, self._knobs(ours.running.knobs)), backend, ours.storage_config)
        running = adopted(
            str(self._controller.storage_backend_type),
            versions.view_leaf("hicache_storage_backend_extra_config"),
            self._knobs(None),
            self._namespace,
        )
        return Parked(running, backend, self._controller.storage_config)

    def running(self) -> Running:
        """What runs."""
        return self.parked().running

    def effective(self) -> EffectiveState:
        """For the report."""
        parked = self.parked()
        config, knobs = parked.running.config, parked.running.knobs
        inner = getattr(parked.backend, "inner", parked.backend)
        return EffectiveState(
            backend=config.backend if config else None,
            extra_config=config.redacted if config else None,
            config_digest=config.digest if config else "",
            knobs={key: getattr(knobs, key) for key in KNOBS},
            prefetch_policy=knobs.prefetch_policy,
            write_policy=knobs.write_policy,
            bypass=bool(getattr(parked.backend, "bypass", False)),
            namespace=config.namespace if config else "",
            inner=type(inner).__name__ if inner is not None else "",
        )

    def layers(self) -> dict[str, str]:
        """Each layer's belief, when they disagree (F24)."""
        controller, tree, scheduler = self._controller, self._tree, self._scheduler
        on = bool(controller.enable_storage)
        name = str(controller.storage_backend_type) if on else "none"
        view = {
            "controller": name,
            "tree": name if tree.enable_storage and on else ("none" if not tree.enable_storage else "on"),
            "scheduler": name if scheduler.enable_hicache_storage and on else
            ("none" if not scheduler.enable_hicache_storage else "on"),
            "config": str(versions.view_leaf("hicache_storage_backend") or "none"),
        }  # fmt: skip
        return view if len(set(view.values())) > 1 else {}

    def _knobs(self, ordered: Knobs | None) -> Knobs:
        """The live values. ``ordered``: what was installed, to undo the rounding of the engine's per-page budget."""
        tree, controller = self._tree, self._controller
        policies = {"prefetch_policy": tree.prefetch_stop_policy, "write_policy": controller.write_policy}
        if not controller.enable_storage:
            return replace(BASE, **policies)
        per_ki = tree.prefetch_timeout_per_page * 1024 / tree.page_size
        if ordered is not None and math.isclose(per_ki, ordered.prefetch_timeout_per_ki_token, rel_tol=1e-9):
            per_ki = ordered.prefetch_timeout_per_ki_token
        elif ordered is None:
            per_ki = round(per_ki, 9)
        threshold = tree.prefetch_threshold
        return Knobs(
            prefetch_threshold=threshold,
            prefetch_timeout_base=float(tree.prefetch_timeout_base),
            prefetch_timeout_per_ki_token=per_ki,
            prefetch_timeout_max=None,
            hicache_storage_pass_prefix_keys=bool(tree.hicache_storage_pass_prefix_keys),
            guard=BASE.guard if ordered is None else ordered.guard,
            **policies,
        )
