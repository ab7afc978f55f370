"""Stands of ``aibrix``: the real package with its DRAM cache, RocksDB, or files on a shared directory. No server."""

import importlib.util
import os
from typing import Any

from tests.rigs.stores import tmpfs
from tests.rigs.stores.base import Stand

PAGE = 64 << 10
SMALL_DISK = 24 << 20  # of RocksDB, which keeps a log beside its tables


class AibrixStand(Stand):
    """DRAM alone. Small: a few pages of capacity, which evict."""

    backend_name = "aibrix"
    outlives_client = False
    can_be_small = True
    evicts_when_full = True

    @staticmethod
    def missing() -> str | None:
        return None if importlib.util.find_spec("aibrix_kvcache") else "the package aibrix-kvcache is not installed"

    def env(self) -> dict[str, str]:
        # The vendor starts and ends threads in every cycle; an arena of glibc's for each looks like a leak.
        return {"MALLOC_ARENA_MAX": "1"}

    def config(self) -> dict[str, Any]:
        return {"l1_capacity_gb": self.small_pages * 65536 / 2**30 if self.small else 0.25, "l2_backend": ""}


class AibrixRocksdbStand(AibrixStand):
    """RocksDB alone, in a private directory; without a time to live, with which it loses fresh values by itself."""

    outlives_client = True
    can_be_small = tmpfs.MAY_MOUNT
    why_not_small = "only root may mount a small file system"
    why_whole = "RocksDB has one owner; test_aibrix.py puts a value of another length between two opens"
    small_pages = 256
    evicts_when_full = False
    delete_frees = False  # RocksDB takes no delete either once a write failed

    def start(self) -> None:
        if self.small:
            tmpfs.mount(self.root / "rocks", SMALL_DISK)

    def stop(self) -> None:
        tmpfs.unmount(self.root / "rocks")

    def more_room(self) -> None:
        # All of it is log by then, and opening it again, which it takes to write again, needs room for a copy.
        tmpfs.resize(self.root / "rocks", 3 * SMALL_DISK)

    def config(self) -> dict[str, Any]:
        return {
            "l1_capacity_gb": 0, "l2_backend": "ROCKSDB",
            "l2_options": {"rocksdb_root": str(self.root / "rocks"), "rocksdb_ttl_s": 0},
        }  # fmt: skip


class AibrixBothStand(AibrixRocksdbStand):
    """DRAM before RocksDB."""

    can_be_small = False
    why_not_small = "its parts are filled one by one: aibrix-l1, aibrix-rocksdb"

    def config(self) -> dict[str, Any]:
        return {**super().config(), "l1_capacity_gb": 8 / 1024}


class AibrixShfsStand(AibrixStand):
    """Files on a shared directory: the connector whose reads have holes."""

    outlives_client = True
    can_be_small = tmpfs.MAY_MOUNT
    why_not_small = "only root may mount a small file system"
    evicts_when_full = False

    def start(self) -> None:
        if self.small:
            tmpfs.mount(self.root / "shfs", self.small_pages * PAGE)

    def stop(self) -> None:
        tmpfs.unmount(self.root / "shfs")

    def config(self) -> dict[str, Any]:
        return {"l1_capacity_gb": 0, "l2_backend": "SHFS", "l2_options": {"shfs_root": str(self.root / "shfs")}}

    def shorten(self, key: str, namespace: str) -> bool:
        (path,) = (self.root / "shfs").rglob(key.encode().hex())
        os.truncate(path, path.stat().st_size // 2)
        return True


STANDS = {"": AibrixStand, "rocksdb": AibrixRocksdbStand, "both": AibrixBothStand, "shfs": AibrixShfsStand}


def stand_class(variant: str) -> type[Stand]:
    """By what stores the pages."""
    return STANDS[variant]
