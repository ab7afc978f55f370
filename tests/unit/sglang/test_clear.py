"""``clear`` on SGLang's ``file`` backend: this model's and rank's pages, and nothing that only ends like them."""

import sys
from enum import StrEnum
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from hicache_hooks.sglang.clear import clear_namespace

KEY = "ab" * 32


class PoolName(StrEnum):
    """The engine's."""

    KV = "kv"
    SWA = "swa"


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = ModuleType("hicache_storage")
    storage.PoolName = PoolName  # type: ignore[attr-defined]
    for name in ("sglang", "sglang.srt", "sglang.srt.mem_cache"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "sglang.srt.mem_cache.hicache_storage", storage)


def test_other_models_whose_names_end_alike_keep_their_pages(tmp_path: Path) -> None:
    """F68: model ``m`` beside ``org-m``, ``a_m`` and one that is called like a pool."""
    mine = [f"{KEY}_m_0_1.bin", f"{KEY}.{PoolName.SWA}_m_0_1.bin"]
    theirs = [
        f"{KEY}_org_m_0_1.bin",
        f"{KEY}_swa_m_0_1.bin",
        f"{KEY}.swa_x_m_0_1.bin",
        f"{KEY}_m_1_1.bin",
        f"{KEY}_m_0_1.bin.tmp",
        f"{KEY[:-1]}_m_0_1.bin",
        "notes_m_0_1.bin",
    ]
    for name in mine + theirs:
        (tmp_path / name).write_bytes(b"page")
    store = SimpleNamespace(file_path=str(tmp_path), config_suffix="_m_0_1", tp_config_suffix="_m_0_1")
    assert clear_namespace("file", store) == len(mine)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(theirs)
