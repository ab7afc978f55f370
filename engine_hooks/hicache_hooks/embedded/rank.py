"""One rank's engine put together: model, pools, detached storage set, cache controller, scheduler.

No process, socket or thread of the front is in here, so tests and the GPU check drive the same object by hand.
"""

from collections.abc import Callable

import torch

from hicache_hooks.cache.controller import CacheController
from hicache_hooks.cache.hashing import fingerprint
from hicache_hooks.cache.knobs import Knobs
from hicache_hooks.cache.pages import PageFormat
from hicache_hooks.cache.pools import DevicePool, HostPool
from hicache_hooks.cache.storage_set import StorageSet
from hicache_hooks.embedded.model import Model
from hicache_hooks.embedded.options import EngineOptions
from hicache_hooks.embedded.scheduler import Emit, Scheduler


class Rank:
    """The engine of one scheduler process. Everything but ``wake`` belongs to the scheduler thread."""

    def __init__(self, options: EngineOptions, *, emit: Emit, wake: Callable[[], None], dp_rank: int = 0) -> None:
        """
        Raises:
            ValueError: options that do not fit together.
            RuntimeError: no memory, no such device, or no thread can be had.
        """
        options.check()
        if options.device == "cuda" and not torch.cuda.is_available():
            raise RuntimeError("--device cuda: torch finds no CUDA device")
        torch.set_num_threads(1)  # one rank, one core: a second thread would change the order of sums
        self.options = options
        self.dp_rank = dp_rank
        self.wake = wake
        device = _device(options, dp_rank)
        self.model = Model(options.model, context=options.context, page_size=options.page_size, device=device)
        geometry = self.model.geometry(options.layout)
        self.namespace = fingerprint(self.model.identity(), geometry)
        self.pages = PageFormat(geometry.payload_bytes, self.namespace)
        self.device = DevicePool(geometry, options.l1_pages, self.model.device)
        self.host = HostPool(geometry, options.l2_pages, pinned=options.device == "cuda")
        detached = StorageSet(
            store=None, device=self.device, host=self.host, pages=self.pages,
            knobs=Knobs(write_policy=options.write_policy),
        )  # fmt: skip
        detached.start_parked()
        self.cache = CacheController(self.device, self.host, detached, namespace=self.namespace, wake=wake)
        self.scheduler = Scheduler(
            model=self.model,
            pool=self.device,
            cache=self.cache,
            emit=emit,
            chunk_tokens=options.chunk_tokens,
            max_running=options.max_running,
        )


def _device(options: EngineOptions, dp_rank: int) -> str:
    """Replicas share out the GPUs that there are."""
    return f"cuda:{dp_rank % torch.cuda.device_count()}" if options.device == "cuda" else options.device
