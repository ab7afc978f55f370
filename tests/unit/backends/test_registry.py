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
        assert set(item) == {"name", "available", "missing", "layouts", "manifest", "options_schema", "notes"}
        assert item["available"] is (item["missing"] == [])
        assert item["available"] or item["name"] not in ("dynamic", "file")
    told = {name: item["manifest"] for name, item in described.items()}
    assert [name for name, manifest in told.items() if manifest is None] == ["dynamic"]  # a class brings its own
    assert {name for name, manifest in told.items() if manifest and manifest["needs_registration"]} == {
        "eic", "mooncake", "nixl",
    }  # fmt: skip
    assert (told["file"]["shared"], told["aibrix"]["shared"], told["hf3fs"]["shared"]) == (True, False, False)
    assert (told["aibrix"]["alignment"], told["redis"]["parallel_axes"]) == (32, ["tp", "pp"])
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


def test_every_option_says_what_it_is_and_what_counts_without_it() -> None:
    """Null is no answer to "what is the default"."""
    silent = []
    for item in registry.describe():
        schema = item["options_schema"]
        structs = [schema, *(found for found in schema.get("$defs", {}).values() if "properties" in found)]
        for name, option in ((name, option) for struct in structs for name, option in struct["properties"].items()):
            said = option.get("description", "")
            known = "default" in option and option["default"] is not None
            if not said or not (known or "default" not in option or _says_what_else(said)):
                silent.append(f"{item['name']}.{name}")
    assert silent == []


def _says_what_else(said: str) -> bool:
    return any(word in said for word in ("default", "else ", "required", "null:", "(NIXL:"))


def test_the_specs_backends_are_all_known_and_others_are_not() -> None:
    """The name is refused and the release's own names are listed."""
    assert set(registry.KNOWN) == {"aibrix", "dynamic", "eic", "file", "hf3fs", "mooncake", "nixl", "redis"}
    with pytest.raises(UnknownBackend, match="known are aibrix, dynamic"):
        registry.usable("mooncak")
