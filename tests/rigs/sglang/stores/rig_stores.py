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
    """Takes 3 seconds to construct, as a store that maps and registers memory does; says that it has begun."""

    def __init__(self, storage_config, kwargs):
        super().__init__(storage_config, kwargs)
        os.makedirs(self.file_path, exist_ok=True)
        with open(f"{self.file_path}/begun-{storage_config.tp_rank}", "w"):
            pass
        time.sleep(float(self.options.get("start_s", 3.0)))


class FailingStore(PlainStore):
    """Every call raises while the file named by the option `down_file` exists: a store whose server is gone."""


def _down_or(name):
    def call(self, *args, **kwargs):
        if os.path.exists(self.options["down_file"]):
            raise ConnectionError("the store's server is gone")
        return getattr(PlainStore, name)(self, *args, **kwargs)

    return call


for _name in ("exists", "batch_exists", "batch_exists_v2", "get", "batch_get", "batch_get_v2", "set", "batch_set",
              "batch_set_v2"):  # fmt: skip
    setattr(FailingStore, _name, _down_or(_name))


class HangingGet(PlainStore):
    """`batch_get` does not return while the file named by the option `hang_file` exists."""

    def batch_get(self, keys, target_locations=None, target_sizes=None):
        limit = time.monotonic() + HANG_LIMIT_S
        while os.path.exists(self.options["hang_file"]) and time.monotonic() < limit:
            time.sleep(0.01)
        return super().batch_get(keys, target_locations, target_sizes)


class Nameless(BaseException):
    """An exception that cannot be shown, and that `except Exception` does not catch."""

    def __str__(self):
        raise SystemExit("no text")

    __repr__ = __str__


ODD = {"exit": SystemExit, "interrupt": KeyboardInterrupt, "nameless": Nameless, "stop": GeneratorExit}


class OddStore(PlainStore):
    """Fails as native clients do: raises what nobody expects, or hangs, where its options say.

    `odd_in` names a method, or `start` for the constructor; it raises `odd_what` (see `ODD`), or, where that is `hang`,
    does not return while the file `odd_file` exists. Methods do so only while that file exists. A close that
    ends leaves a file `closed-RANK` among the pages.
    """

    def __init__(self, storage_config, kwargs):
        super().__init__(storage_config, kwargs)
        self.rank = storage_config.tp_rank
        self._odd("start")

    def _odd(self, place):
        what, flag = self.options.get("odd_what"), self.options["odd_file"]
        if self.options.get("odd_in") != place or not os.path.exists(flag):
            return
        if what != "hang":
            raise ODD[what]
        limit = time.monotonic() + HANG_LIMIT_S
        while os.path.exists(flag) and time.monotonic() < limit:
            time.sleep(0.01)

    def batch_exists(self, keys, extra_info=None):
        self._odd("exists")
        return super().batch_exists(keys, extra_info)

    def batch_get(self, keys, target_locations=None, target_sizes=None):
        self._odd("get")
        return super().batch_get(keys, target_locations, target_sizes)

    def batch_set(self, keys, values=None, target_locations=None, target_sizes=None):
        self._odd("set")
        return super().batch_set(keys, values, target_locations, target_sizes)

    def close(self):
        self._odd("close")
        os.makedirs(self.file_path, exist_ok=True)
        with open(f"{self.file_path}/closed-{self.rank}", "w"):
            pass


class HangingPages(PlainStore):
    """Zero-copy (option `interface_v1`), so that no call of it is ever given up: hangs like `HangingGet`."""

    def batch_set_v1(self, keys, host_indices, extra_info=None):
        pool = self.mem_pool_host
        return [self.set(key, pool.get_data_page(at)) for key, at in zip(keys, self._starts(host_indices), strict=True)]

    def batch_get_v1(self, keys, host_indices, extra_info=None):
        limit = time.monotonic() + HANG_LIMIT_S
        while os.path.exists(self.options["hang_file"]) and time.monotonic() < limit:
            time.sleep(0.01)
        pool, found = self.mem_pool_host, []
        for key, at in zip(keys, self._starts(host_indices), strict=True):
            page = self.get(key, pool.get_dummy_flat_data_page())
            if page is not None:
                pool.set_from_flat_data_page(at, page)
            found.append(page is not None)
        return found

    def _starts(self, host_indices):
        return [int(at) for at in host_indices[:: self.mem_pool_host.page_size]]
