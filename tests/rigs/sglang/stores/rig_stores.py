"""Storage classes that the tests load into a real SGLang by its `dynamic` backend. Runs in the rig's environment.

All keep their pages as SGLang's own `file` backend does, in the option `file_storage_path`.
"""

import os
import time

from sglang.srt.mem_cache.hicache_storage import HiCacheFile

HANG_LIMIT_S = 120.0


class PlainStore(HiCacheFile):
    """Nothing but the constructor that `dynamic` wants."""

    def __init__(self, storage_config, kwargs):
        super().__init__(storage_config)
        self.options = dict(storage_config.extra_config or {})


class OneRankFails(PlainStore):
    """Its constructor raises on tensor-parallel rank 1 alone."""

    def __init__(self, storage_config, kwargs):
        if storage_config.tp_rank == 1:
            raise RuntimeError("this rank's network card is missing")
        super().__init__(storage_config, kwargs)


class SlowStart(PlainStore):
    """Takes 3 seconds to construct, as a store that maps and registers memory does."""

    def __init__(self, storage_config, kwargs):
        super().__init__(storage_config, kwargs)
        time.sleep(float(self.options.get("start_s", 3.0)))


class HangingGet(PlainStore):
    """`batch_get` does not return while the file named by the option `hang_file` exists."""

    def batch_get(self, keys, target_locations=None, target_sizes=None):
        limit = time.monotonic() + HANG_LIMIT_S
        while os.path.exists(self.options["hang_file"]) and time.monotonic() < limit:
            time.sleep(0.01)
        return super().batch_get(keys, target_locations, target_sizes)
