"""Dynamic backends: allow-list first, contract before construction (F15, F18, F76)."""

import sys
from pathlib import Path
from typing import Any

import pytest
from tests.rigs.backends import BK, NoBatchGetBK, OtherConstructorBK, RememberingBK

from hicache_hooks.backends.base import StoreContext
from hicache_hooks.backends.dynamic import DynamicOptions, contract_gaps, create, load_class, manifest_of
from hicache_hooks.backends.file import FileStore
from hicache_proto.errors import Forbidden, InvalidConfig

MODULE = "tests.rigs.backends"
CONTEXT = StoreContext(namespace="ns", page_bytes=4096, layout="page_first")


def options(class_name: str, module: str = MODULE, **fields: Any) -> DynamicOptions:
    return DynamicOptions(module_path=module, class_name=class_name, **fields)


def env(*names: str) -> dict[str, str]:
    return {"HICACHE_DYNAMIC_BACKENDS": ", ".join(names)}


def test_a_module_that_is_not_listed_is_never_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F18: 403 ``not_allowlisted``; the module's code does not run."""
    (tmp_path / "evil_backend_module.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for listed in ((), ("evil_backend_module",), ("evil_backend_module:Other",), (f"{MODULE}:BK",)):
        with pytest.raises(Forbidden) as caught:
            load_class(options("Evil", "evil_backend_module"), env(*listed))
        assert caught.value.details == {"reason": "not_allowlisted"}
        with pytest.raises(Forbidden):
            options("Evil", "evil_backend_module").effective(env(*listed))
    assert "evil_backend_module" not in sys.modules
    with pytest.raises(Forbidden):
        load_class(options("system", "os"), {})


def test_a_listed_class_is_made_with_options_and_context() -> None:
    got = create(options("BK", options={"store": "dyn"}), CONTEXT, env("other:X", f"{MODULE}:BK"))
    assert isinstance(got, BK)
    assert got.context is CONTEXT
    BK.reset()


def test_missing_methods_are_listed_before_anything_is_built() -> None:
    """F15: 422 ``backend_contract`` with the missing method."""
    with pytest.raises(InvalidConfig) as caught:
        load_class(options("NoBatchGetBK"), env(f"{MODULE}:NoBatchGetBK"))
    assert caught.value.details["reason"] == "backend_contract"
    assert caught.value.details["missing"] == ["batch_get"]
    assert contract_gaps(NoBatchGetBK)[0] == ["batch_get"]


def test_another_constructor_is_found_by_its_signature() -> None:
    """F18: 422 before construction."""
    with pytest.raises(InvalidConfig) as caught:
        create(options("OtherConstructorBK"), CONTEXT, env(f"{MODULE}:OtherConstructorBK"))
    assert "constructor" in caught.value.details["problems"][0]
    assert OtherConstructorBK.constructed == 0


def test_other_breaches_of_the_contract() -> None:
    class Odd(BK):
        contract = 2
        manifest = {"name": "x"}  # type: ignore[assignment]  # noqa: RUF012

        def batch_put(self, keys: Any) -> Any: ...  # type: ignore[override]

    _, problems = contract_gaps(Odd)
    assert len(problems) == 3
    assert contract_gaps(BK) == ([], [])
    assert contract_gaps(FileStore) == ([], [])


def test_the_optional_methods_keep_the_contract_too() -> None:
    """F70: a store that answers from memory without ``forget`` would hide for ever that its content is gone."""

    class Alone(BK):
        def confirm(self, keys: list[str]) -> list[bool]:
            return [False for _ in keys]

    class NoMethods(RememberingBK):
        epoch = "1"
        forget = None  # type: ignore[assignment]

    class OtherArguments(RememberingBK):
        def epoch(self, now: float) -> str: ...

    assert contract_gaps(RememberingBK) == ([], [])
    assert contract_gaps(Alone)[1] == ["confirm and forget come together or not at all"]
    assert contract_gaps(NoMethods)[1] == ["epoch is not a method", "confirm and forget come together or not at all"]
    assert contract_gaps(OtherArguments)[1] == ["epoch does not take 0 arguments"]


def test_import_failures_are_refusals_without_the_exceptions_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F49, F94."""
    (tmp_path / "broken_backend_module.py").write_text("raise RuntimeError('s3cr3t-SENTINEL')\nX = 1\n")
    (tmp_path / "odd_backend_module.py").write_text("X = 1\n")
    (tmp_path / "leaving_backend_module.py").write_text("raise SystemExit('s3cr3t-SENTINEL')\nX = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for module, name in (
        ("broken_backend_module", "X"),
        ("leaving_backend_module", "X"),
        ("odd_backend_module", "X"),
        ("odd_backend_module", "Y"),
        ("no_such_module_", "Y"),
    ):
        with pytest.raises(InvalidConfig) as caught:
            load_class(options(name, module), env(f"{module}:{name}"))
        assert caught.value.details["reason"] == "backend_contract"
        assert "SENTINEL" not in caught.value.message + repr(caught.value.__context__)


def test_a_class_without_a_manifest_gets_the_most_restrictive() -> None:
    """F76."""
    manifest = manifest_of(options("NoManifestBK"), env(f"{MODULE}:NoManifestBK"))
    assert manifest.layouts == ("page_first",)
    assert manifest.parallel_axes == ()
    assert not manifest.shared
    assert manifest_of(options("BK"), env(f"{MODULE}:BK")) is BK.manifest
