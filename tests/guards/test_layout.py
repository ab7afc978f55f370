"""Shape of the repository: source roots are no packages, files are short, sorted registries, nothing unsafe."""

import ast
import json

import pytest
from tests.guards.sources import ROOT, SOURCE_ROOTS, source_files

MAX_LINES = 400  # style.md, habit 15
# The transaction table is one table with its theory of operation in front: splitting it would hide what it proves.
LONGER = {"proto/hicache_proto/transaction.py": 550}


@pytest.mark.parametrize("root", SOURCE_ROOTS)
def test_a_source_root_is_no_package(root: str) -> None:
    """Other distributions own the names ``proto`` and ``sidecar``."""
    assert (ROOT / root / SOURCE_ROOTS[root] / "__init__.py").exists()
    assert not (ROOT / root / "__init__.py").exists()
    assert [entry.name for entry in (ROOT / root).iterdir() if entry.is_dir() and entry.name != "__pycache__"] == [
        SOURCE_ROOTS[root]
    ]


def test_every_package_is_typed() -> None:
    for root, package in SOURCE_ROOTS.items():
        assert (ROOT / root / package / "py.typed").exists(), package


def test_files_are_short() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for path in [*source_files(), *sorted((ROOT / "tests").rglob("*.py"))]
        if (lines := len(path.read_text().splitlines())) > LONGER.get(str(path.relative_to(ROOT)), MAX_LINES)
    }
    assert not long


def test_every_module_says_what_it_is() -> None:
    """A docstring first, unless the file is empty."""
    silent = [
        str(path.relative_to(ROOT))
        for path in source_files()
        if path.read_text().strip() and not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert not silent


UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "jsonpickle"}
UNSAFE_CALLS = {
    ("yaml", "load"), ("yaml", "load_all"), ("yaml", "unsafe_load"), ("yaml", "full_load"), ("torch", "load"),
    ("numpy", "load"), ("np", "load"), ("socket", "recv_pyobj"), ("socket", "send_pyobj"),
}  # fmt: skip
UNSAFE_METHODS = {"recv_pyobj", "send_pyobj", "unsafe_load"}
UNSAFE_BUILTINS = {"eval", "exec"}


def unsafe_uses(source: str) -> list[str]:
    """Every use in ``source`` that can turn bytes into code."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [f"{node.lineno}: import {a.name}" for a in node.names if a.name.split(".")[0] in UNSAFE_MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in UNSAFE_MODULES:
            found.append(f"{node.lineno}: from {node.module}")
        elif isinstance(node, ast.Call):
            target = node.func
            if isinstance(target, ast.Name) and target.id in UNSAFE_BUILTINS:
                found.append(f"{node.lineno}: {target.id}()")
            elif isinstance(target, ast.Attribute):
                owner = target.value.id if isinstance(target.value, ast.Name) else ""
                if (owner, target.attr) in UNSAFE_CALLS or target.attr in UNSAFE_METHODS:
                    found.append(f"{node.lineno}: {owner}.{target.attr}()")
            if any(k.arg == "shell" and getattr(k.value, "value", None) is True for k in node.keywords):
                found.append(f"{node.lineno}: shell=True")
    return found


def test_nothing_turns_received_bytes_into_code() -> None:
    """F95: pickle over sockets gave remote code execution three times elsewhere; none of it is here."""
    unsafe = [f"{path.relative_to(ROOT)}:{use}" for path in source_files() for use in unsafe_uses(path.read_text())]
    assert not unsafe


@pytest.mark.parametrize(
    "source",
    ["import pickle", "from marshal import loads", "yaml.load(x)", "torch.load(f)", "s.recv_pyobj()", "eval(x)",
     "subprocess.run(x, shell=True)"],
)  # fmt: skip
def test_the_guard_itself_sees(source: str) -> None:
    assert unsafe_uses(source)


def test_no_assert_checks_input_at_runtime() -> None:
    """``python -O`` drops them."""
    asserts = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in source_files()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assert)
    ]
    assert not asserts


def test_registries_are_sorted() -> None:
    """A new entry has one place, so that two changes do not meet in the last line."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == [
        f"{root}/{package}" for root, package in SOURCE_ROOTS.items()
    ]
    registry = ROOT / "engine_hooks/hicache_hooks/backends/registry.py"
    names = [
        json.loads(json.dumps([key.value for key in node.keys if isinstance(key, ast.Constant)]))
        for node in ast.walk(ast.parse(registry.read_text()))
        if isinstance(node, ast.Dict) and len(node.keys) > 1 and all(isinstance(k, ast.Constant) for k in node.keys)
    ]
    for keys in names:
        if "file" in keys:
            assert keys == sorted(keys)
