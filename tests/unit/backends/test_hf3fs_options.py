"""Backend hf3fs: its options, geometry, what is missing here, and the one test that needs a live 3FS."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.unit.backends.hf3fs_rig import PAGE, emulated_io, get, key, mounted, pages, put

from hicache_hooks.backends import hf3fs
from hicache_hooks.backends.base import StoreContext
from hicache_hooks.backends.hf3fs import SPEC, Hf3fsStore
from hicache_hooks.backends.hf3fs_index import IndexFile
from hicache_hooks.backends.hf3fs_options import CONFIG_ENV, Hf3fsOptions, slots_of
from hicache_hooks.backends.options import StoreFacts
from hicache_proto.errors import InvalidConfig


def options(**fields: Any) -> Hf3fsOptions:
    return Hf3fsOptions(**{"file_path_prefix": "/3fs/kv/rank", "file_size": "1gb", **fields})


def test_options_of_sglangs_file_carry_over_and_the_option_comes_first(tmp_path: Path) -> None:
    path = tmp_path / "hf3fs.json"
    path.write_text('{"file_path_prefix": "/3fs/a/x", "file_size": 1048576, "numjobs": 3, "entries": 5, "more": 1}')
    env = {CONFIG_ENV: str(path)}
    found = Hf3fsOptions(numjobs=7).effective(env)
    assert (found.file_path_prefix, found.file_size, found.numjobs, found.entries) == ("/3fs/a/x", 1 << 20, 7, 5)
    assert found.effective(env) == found
    assert options().effective({}).client_timeout == 5.0
    path.write_text('{"file_path_prefix": "/3fs/a/x", "file_size": 1048576, "numjobs": "many"}')
    with pytest.raises(InvalidConfig, match="wrong type"):
        Hf3fsOptions().effective(env)
    path.write_text("[1]")
    with pytest.raises(InvalidConfig, match="JSON object"):
        Hf3fsOptions().effective(env)


@pytest.mark.parametrize(
    ("fields", "word"),
    [({"file_path_prefix": None}, "must be given"), ({"file_size": None}, "must be given"),
     ({"file_path_prefix": "kv"}, "absolute"), ({"file_size": "much"}, "size"),
     ({"metadata_server_url": "http://m:1"}, "index in the file")],
)  # fmt: skip
def test_options_that_cannot_work_are_refused(fields: dict[str, Any], word: str) -> None:
    with pytest.raises(InvalidConfig, match=word):
        options(**fields).effective({})


def test_sizes_are_checked_against_the_pool() -> None:
    """F49: below a few pages refused; fewer than the pool, or much shared memory: said."""
    facts = StoreFacts(layout="page_first", page_bytes=1 << 20, l2_pages=100)
    with pytest.raises(InvalidConfig) as small:
        options(file_size=3 << 20).effective({}).check(facts)
    assert small.value.details["reason"] == "bad_geometry"
    with pytest.raises(InvalidConfig):
        options().effective({}).check(StoreFacts(layout="page_first", page_bytes=0, l2_pages=1))
    assert options(numjobs=2).effective({}).check(facts) == []
    assert len(options(file_size="50mb", numjobs=256, entries=64).effective({}).check(facts)) == 2


def test_geometry() -> None:
    for slots in (1, 63, 64, 65, 1000):
        size = 4096 + IndexFile(-1, slots, PAGE, 0, "ns").data_at - 4096 + slots * PAGE
        assert slots_of(size, PAGE) == slots
        assert slots_of(size - 1, PAGE) == slots - 1
    assert slots_of(0, PAGE) == slots_of(4096, PAGE) == 0


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hf3fs_fuse", None)
    assert any("hf3fs_fuse" in name for name in SPEC.missing())


# ---- the real thing


@pytest.mark.needs_3fs
@pytest.mark.skipif("HF3FS_MOUNT" not in os.environ, reason="HF3FS_MOUNT names no 3FS mount: never run on a live 3FS")
def test_on_a_live_3fs() -> None:
    """Round trip, restart, reuse; with the vendor's own bindings, on the mount that HF3FS_MOUNT names."""
    use_mount(Path(os.environ["HF3FS_MOUNT"]))


def test_what_is_asked_of_a_live_3fs_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same over the EMULATED ring: else nobody knows that it could pass."""
    emulated_io(monkeypatch)
    with mounted(tmp_path / "mnt") as mount:
        use_mount(mount.root)
        assert mount.links == []


def use_mount(mount: Path) -> None:
    """Store, close, find again, fill the file until a slot is used again; leaves nothing."""
    folder = mount / f"hicache-test-{os.getpid()}"
    size = 4096 * 2 + 4 * PAGE
    made = hf3fs.Hf3fsOptions(file_path_prefix=str(folder / "rank"), file_size=size, numjobs=2, entries=4).effective({})
    context = StoreContext(namespace="ns", page_bytes=PAGE, layout="page_first")
    store = Hf3fsStore(made, context)
    try:
        store.open()
        assert put(store, 1, 2, 3) == [True] * 3
        assert get(store, 2, 3, 99) == ["hit", "hit", "miss"]
        store.close()
        store = Hf3fsStore(made, context)
        store.open()
        assert get(store, 3, 2, 1) == ["hit"] * 3
        assert put(store, 4, 5) == [True] * 2
        assert get(store, 1, 2, 3, 4, 5, 99) == ["hit", "hit", "miss", "hit", "hit", "miss"]
        assert store.batch_get([key(99)], pages(1)) == ["miss"]
    finally:
        store.close()
        for path in folder.glob("*"):
            path.unlink()
        folder.rmdir()
