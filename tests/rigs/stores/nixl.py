"""Stands of ``nixl``: POSIX with libaio, io_uring and POSIX AIO on a private directory, and OBJ on a real S3 server.

Small: a tmpfs of its own for the files (needs root), so that ENOSPC is the kernel's.
"""

import os
from pathlib import Path
from typing import Any

from tests.rigs.stores import tmpfs
from tests.rigs.stores.base import Stand
from tests.rigs.stores.weed import ACCESS_KEY, BUCKET, SECRET_KEY, WeedStand

from hicache_hooks.backends import nixl_probe
from hicache_hooks.backends.file_paths import safe

PAGE = 64 << 10
SMALL_DISK = 48 << 20  # of the S3 server


def missing() -> str | None:
    """Why NIXL cannot be used here."""
    return "; ".join(nixl_probe.missing()) or None


class PosixStand(Stand):
    """Subclasses choose the kernel interface."""

    backend_name = "nixl"
    can_be_small = tmpfs.MAY_MOUNT
    why_not_small = "only root may mount a small file system"
    mode = ""

    @staticmethod
    def missing() -> str | None:
        return missing()

    @property
    def directory(self) -> Path:
        return self.root / "kv"

    def start(self) -> None:
        self.directory.mkdir()
        if self.small:
            tmpfs.mount(self.directory, self.small_pages * PAGE)

    def stop(self) -> None:
        tmpfs.unmount(self.directory)

    def config(self) -> dict[str, Any]:
        # The cleaner is off: what this machine's disk holds besides is not the test's business.
        return {"storage_dir": str(self.directory), "l3_cleaner_enabled": False, self.mode: True}

    def shorten(self, key: str, namespace: str) -> bool:
        (path,) = (self.directory / "pages").rglob(f"*{key.rpartition('.')[2]}*")
        os.truncate(path, path.stat().st_size // 2)
        return True


class AioStand(PosixStand):
    """libaio."""

    mode = "use_aio"


class UringStand(PosixStand):
    """io_uring."""

    mode = "use_uring"


class PosixAioStand(PosixStand):
    """POSIX AIO."""

    mode = "use_posix_aio"


class ObjectStand(WeedStand):
    """S3."""

    backend_name = "nixl"
    can_be_small = tmpfs.MAY_MOUNT
    why_not_small = "only root may mount a small file system"
    small_pages = 512  # and the server's own 16 MiB
    delete_frees = False  # a full server answers 500 to deletes, and compacts much later
    dead_call_s = 10.0
    back_s = 60.0  # the server looks for its volumes for some seconds after a kill
    timeout_s = 4.0
    rounds = 8  # 0.07 GB/s

    @staticmethod
    def missing() -> str | None:
        return WeedStand.missing() or missing()

    def start(self) -> None:
        if self.small and self._starts == 0:
            tmpfs.mount(self.root / "weed", SMALL_DISK)
        super().start()

    def stop(self) -> None:
        super().stop()
        tmpfs.unmount(self.root / "weed")

    def more_room(self) -> None:
        tmpfs.resize(self.root / "weed", 2 * SMALL_DISK)

    def config(self) -> dict[str, Any]:
        parameters = {
            "active": True, "bucket": BUCKET, "endpoint_override": f"http://127.0.0.1:{self.port}", "scheme": "http",
            "access_key": ACCESS_KEY, "secret_key": SECRET_KEY, "use_virtual_addressing": "false",
        }  # fmt: skip
        return {"plugin": {"posix": {"active": False}, "obj": parameters}, "timeout_s": self.timeout_s}

    def shorten(self, key: str, namespace: str) -> bool:
        self.put_object(f"{safe(namespace)}/{safe(key.removeprefix(f'{namespace}.'))}", os.urandom(PAGE // 2))
        return True


def stand_class(variant: str) -> type[Stand]:
    """By plugin and mode."""
    return {"aio": AioStand, "uring": UringStand, "posix_aio": PosixAioStand, "obj": ObjectStand}[variant]
