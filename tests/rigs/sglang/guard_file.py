"""Run in the rig's environment: the guard around SGLang's own HiCacheFile. Prints one JSON document.

guard_file.py DIRECTORY
"""

import json
import sys

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorage, HiCacheStorageConfig

from hicache_hooks.sglang.storage_guard import StorageGuard, guard_storage

PAGES = 8


class Pool:
    """Stands for the host pool: the guard looks for its memory."""

    def __init__(self) -> None:
        self.kv_buffer = torch.zeros(1024)
        self.page_size = 64


def main(directory: str) -> dict:
    config = HiCacheStorageConfig(
        0, 1, 0, 1, 0, 1, False, False, False, "model", extra_config={"file_storage_path": directory}
    )
    inner = HiCacheFile(config)
    guard = guard_storage(inner)
    guard.register_mem_pool_host(Pool())
    keys = [f"{number:064x}" for number in range(PAGES)]
    pages = [torch.full((4096,), float(number)) for number in range(PAGES)]
    empty = [torch.zeros(4096) for _ in range(PAGES)]
    found = {
        "name": type(guard).__name__,
        "is_file": isinstance(guard, HiCacheFile),
        "is_storage": isinstance(guard, HiCacheStorage),
        "path": guard.file_path,
        "layout": hasattr(guard, "describe_l3_object_layout"),
        # Rule 7: a method of the base class that the guard forgot would answer with the base's default.
        "forgotten": sorted(
            name for name in vars(HiCacheStorage) if not name.startswith("_") and name not in vars(StorageGuard)
        ),
        "written": guard.batch_set(keys, pages),
        "there": guard.batch_exists([*keys, "0" * 63 + "f"]),
        "v2": guard.batch_exists_v2([*keys, "0" * 63 + "f"]).kv_hit_pages,
        "equal": all(torch.equal(one, two) for one, two in zip(guard.batch_get(keys, empty), pages, strict=True)),
    }
    # A short file, as after a full disk: the store raises, the engine sees a miss.
    with open(f"{directory}/{keys[3]}_model_0_1.bin", "r+b") as page:
        page.truncate(100)
    found["short"] = [page is not None for page in guard.batch_get(keys, empty)]
    guard.set_bypass(True)
    found["bypassed"] = [guard.batch_exists(keys), guard.batch_set(["a" * 64], pages[:1])]
    guard.set_bypass(False)
    usage = guard.usage()
    found["usage"] = {
        kind: [counts.hit, counts.miss, counts.error, counts.skipped, counts.bytes] for kind, counts in usage.items()
    }
    guard.close()
    found["closed"] = [guard.closed, guard.batch_exists(keys), inner.batch_exists(keys)]
    return found


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
