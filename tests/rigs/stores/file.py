"""Stand of ``file``: a private directory. Small: a quota, which evicts instead of refusing."""

import os
from typing import Any

from tests.rigs.stores.base import Stand

PAGE = 64 << 10


class FileStand(Stand):
    """See the module's text."""

    backend_name = "file"
    refuses_fork = False  # plain file descriptors, opened per call
    can_be_small = True
    evicts_when_full = True

    def config(self) -> dict[str, Any]:
        quota = {"max_size": self.small_pages * PAGE} if self.small else {}
        return {"file_storage_path": str(self.root / "kv"), "min_free_space": 0, **quota}

    def shorten(self, key: str, namespace: str) -> bool:
        (path,) = (self.root / "kv" / "pages").rglob(f"*{key.rpartition('.')[2]}*")
        os.truncate(path, path.stat().st_size // 2)
        return True


def stand_class(variant: str) -> type[Stand]:
    """The one there is."""
    return FileStand
