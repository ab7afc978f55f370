"""The registry, and what GET /hicache/backends says."""

import sys

import pytest

from hicache_hooks.backends import registry
from hicache_hooks.backends.registry import Entry
from hicache_proto.errors import BackendUnavailable, UnknownBackend
from hicache_proto.model import LAYOUTS


def test_names_are_sorted_and_load() -> None:
    assert list(registry.KNOWN) == sorted(registry.KNOWN)
    for name, entry in registry.KNOWN.items():
        assert entry.name == name
        assert entry.load().options.__struct_config__.forbid_unknown_fields
        assert set(entry.load().layouts) <= set(LAYOUTS)


def test_descriptions_are_complete_and_true() -> None:
    described = {item["name"]: item for item in registry.describe()}
    assert list(described) == list(registry.KNOWN)
    for item in described.values():
        assert set(item) == {"name", "available", "missing", "layouts", "options_schema", "notes"}
        assert item["available"] is (item["missing"] == [])
        assert item["available"] or item["name"] not in ("dynamic", "file")
    schema = described["file"]["options_schema"]
    assert schema["additionalProperties"] is False
    assert set(schema["properties"]) == {"file_storage_path", "max_size", "min_free_space", "eviction_ratio"}
    assert schema["properties"]["eviction_ratio"]["default"] == 0.1
    assert described["dynamic"]["options_schema"]["required"] == ["module_path", "class_name"]


def test_a_module_that_lacks_a_package_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """interface.md: a missing package is ``backend_unavailable``, naming it; the list stays complete."""
    monkeypatch.setitem(sys.modules, "tests.no_such_vendor", None)
    monkeypatch.setitem(registry.KNOWN, "vendor", Entry("vendor", "tests.no_such_vendor"))
    with pytest.raises(BackendUnavailable) as caught:
        registry.usable("vendor")
    assert caught.value.details == {"missing": ["tests.no_such_vendor"]}
    item = next(item for item in registry.describe() if item["name"] == "vendor")
    assert item["available"] is False
    assert item["missing"] == ["tests.no_such_vendor"]


def test_a_backend_whose_device_is_missing_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    spec = replace(registry.KNOWN["file"].load(), missing=lambda: ["a driver"])
    monkeypatch.setattr(Entry, "load", lambda self: spec)
    with pytest.raises(BackendUnavailable, match="a driver"):
        registry.usable("file")


def test_backends_of_the_spec_that_are_not_here_are_unknown() -> None:
    """Said honestly: the name is refused and the release's own names are listed."""
    for name in ("mooncake", "hf3fs", "nixl", "aibrix", "eic", "redis"):
        if name not in registry.KNOWN:
            with pytest.raises(UnknownBackend, match="known are"):
                registry.usable(name)
