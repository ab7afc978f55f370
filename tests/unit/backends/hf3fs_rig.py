"""hf3fs stores over the EMULATED ring, in this process: a mount, pages that can be told apart, faults."""

import importlib.util
import json
import mmap
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hicache_hooks.backends.base import StoreContext
from hicache_hooks.backends.hf3fs import Hf3fsStore
from hicache_hooks.backends.hf3fs_options import Hf3fsOptions, index_bytes

USRBIO = Path(__file__).resolve().parents[2] / "rigs" / "usrbio"
PAGE = 8192


def emulated_io(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The emulated ``hf3fs_fuse.io``, for this test alone."""
    spec = importlib.util.spec_from_file_location("hf3fs_fuse.io", USRBIO / "hf3fs_fuse" / "io.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "hf3fs_fuse", types.ModuleType("hf3fs_fuse"))
    monkeypatch.setitem(sys.modules, "hf3fs_fuse.io", module)
    return module


class Mount:
    """A directory that plays the mount; ``store()`` opens one on it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "3fs-virt" / "iovs").mkdir(parents=True)
        self._faults = root / "3fs-virt" / "faults.json"
        self.opened: list[Hf3fsStore] = []

    def faults(self, **faults: Any) -> None:
        """From the next submission on; none: healthy."""
        self._faults.unlink(missing_ok=True)
        if faults:
            self._faults.with_suffix(".new").write_text(json.dumps(faults))
            self._faults.with_suffix(".new").rename(self._faults)

    def options(self, slots: int = 16, **more: Any) -> Hf3fsOptions:
        """For ``slots`` pages exactly."""
        size = 4096 + index_bytes(slots) + slots * PAGE
        fields = {"file_path_prefix": str(self.root / "kv" / "rank"), "file_size": size, "numjobs": 2, "entries": 4}
        return Hf3fsOptions(**{**fields, **more}).effective({})

    def store(self, slots: int = 16, namespace: str = "ns", **more: Any) -> Hf3fsStore:
        """An open store."""
        context = StoreContext(namespace=namespace, page_bytes=PAGE, layout="page_first")
        made = Hf3fsStore(self.options(slots, **more), context)
        made.open()
        self.opened.append(made)
        return made

    @property
    def links(self) -> list[Path]:
        """Shared memory that the "daemon" has mapped."""
        return list((self.root / "3fs-virt" / "iovs").iterdir())


@contextmanager
def mounted(root: Path) -> Iterator[Mount]:
    """A healthy mount; every store is closed at the end."""
    mount = Mount(root)
    try:
        yield mount
    finally:
        mount.faults()
        for store in mount.opened:
            store.close()


def key(number: int) -> str:
    return f"ns.{number:064x}"


def pages(count: int) -> list[memoryview]:
    """Writable page buffers."""
    memory = memoryview(mmap.mmap(-1, count * PAGE))
    return [memory[i * PAGE : (i + 1) * PAGE] for i in range(count)]


def content(number: int) -> bytes:
    return number.to_bytes(4, "little") * (PAGE // 4)


def put(store: Hf3fsStore, *numbers: int) -> list[bool]:
    buffers = pages(len(numbers))
    for buffer, number in zip(buffers, numbers, strict=True):
        buffer[:] = content(number)
    return store.batch_put([key(n) for n in numbers], buffers)


def get(store: Hf3fsStore, *numbers: int) -> list[str]:
    """``hit``, ``miss``, ``error`` or ``wrong`` (bytes) by key."""
    buffers = pages(len(numbers))
    got = store.batch_get([key(n) for n in numbers], buffers)
    return [
        "wrong" if result == "hit" and bytes(buffer) != content(number) else str(result)
        for result, buffer, number in zip(got, buffers, numbers, strict=True)
    ]
