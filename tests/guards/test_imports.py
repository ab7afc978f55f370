"""Imports run one way (design.md, "Packages"), and heavy packages stay where they belong."""

import subprocess
import sys

import pytest
from tests.guards.sources import ROOT, SOURCE_ROOTS, imports, module_name, source_files

# What each part may import of the product. A part without a row fails the test: decide where it stands.
# The coordinator (engine) writes the journal (store); metrics (obs) render what the engine side knows.
ARROWS: dict[str, set[str]] = {
    "hicache_proto": set(),
    "hicache_sidecar.core": {"hicache_proto"},
    "hicache_sidecar.engine": {"hicache_proto", "hicache_sidecar.core", "hicache_sidecar.store"},
    "hicache_sidecar.store": {"hicache_proto", "hicache_sidecar.core"},
    "hicache_sidecar.obs": {"hicache_proto", "hicache_sidecar.core", "hicache_sidecar.engine"},
    "hicache_sidecar.server": {"hicache_proto", "hicache_sidecar.core", "hicache_sidecar.obs"},
    "hicache_sidecar.daemon": {
        "hicache_proto", "hicache_sidecar.core", "hicache_sidecar.engine", "hicache_sidecar.store",
        "hicache_sidecar.server", "hicache_sidecar.obs",
    },
    "hicache_sidecar.client": {"hicache_proto"},
    "hicache_sidecar.cli": {"hicache_proto", "hicache_sidecar.client"},
    "hicache_hooks": {"hicache_proto"},
}  # fmt: skip

# Packages that a part must never import, at any depth of a function.
# The core is pure: no clock, log or I/O.
FORBIDDEN: dict[str, set[str]] = {
    "hicache_proto": {"trio", "torch", "zmq", "starlette", "hypercorn", "prometheus_client", "numpy", "yaml"},
    "hicache_sidecar.core": {
        "trio",
        "zmq",
        "time",
        "logging",
        "os",
        "socket",
        "threading",
    },  # pure: no clock, log or I/O
    "hicache_sidecar.client": {"trio", "torch", "zmq", "asyncio", "starlette", "hypercorn"},
    "hicache_sidecar.cli": {"trio", "torch", "zmq", "asyncio", "starlette", "hypercorn"},
    "hicache_sidecar": {"torch", "numpy"},
    "hicache_hooks": {"trio", "hypercorn"},
}
PRODUCT = set(SOURCE_ROOTS.values())


def part_of(module: str) -> str:
    """The part of the product that a module belongs to; sub-packages of the sidecar are parts of their own."""
    names = module.split(".")
    return ".".join(names[:2]) if names[0] == "hicache_sidecar" and len(names) > 1 else names[0]


def test_there_are_sources() -> None:
    """The tests below say nothing about an empty list."""
    assert {part_of(module_name(path)) for path in source_files()} >= set(ARROWS)


def test_the_arrows_make_no_circle() -> None:
    left = {part: set(targets) for part, targets in ARROWS.items()}
    while left:
        free = {part for part, targets in left.items() if not targets & set(left)}
        assert free, f"a circle among {sorted(left)}"
        left = {part: targets for part, targets in left.items() if part not in free}


def test_imports_run_one_way() -> None:
    wrong = []
    for path in source_files():
        part = part_of(module_name(path))
        if part == "hicache_sidecar":  # its __init__ holds nothing
            assert not list(imports(path))
            continue
        assert part in ARROWS, f"{path}: {part} has no row in the table of arrows"
        for line, imported in imports(path):
            if imported.split(".")[0] not in PRODUCT:
                continue
            target = part_of(imported)
            if target != part and target not in ARROWS[part]:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {part} -> {target}")
    assert not wrong, "\n".join(wrong)


def test_heavy_packages_stay_where_they_belong() -> None:
    """The client has msgspec alone, the hooks never trio, the sidecar never torch, the core no clock or I/O."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {prefix} must not import {imported}"
        for path in source_files()
        for line, imported in imports(path)
        for prefix, forbidden in FORBIDDEN.items()
        if f"{module_name(path)}.".startswith(f"{prefix}.") and imported.split(".")[0] in forbidden
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("part", ["hicache_proto", "hicache_sidecar.client", "hicache_sidecar.cli"])
def test_the_base_install_is_msgspec_and_the_standard_library(part: str) -> None:
    allowed = {"msgspec", *PRODUCT} | set(sys.stdlib_module_names)
    foreign = [
        f"{path.name}:{line}: {imported}"
        for path in source_files()
        if f"{module_name(path)}.".startswith(f"{part}.")
        for line, imported in imports(path)
        if imported.split(".")[0] not in allowed
    ]
    assert not foreign, foreign


LOAD_ALL = """
import importlib, pkgutil, sys
for name in {packages!r}:
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(package.__path__, name + "."):
        if module.name.rpartition(".")[2] != "__main__":
            importlib.import_module(module.name)
from hicache_sidecar.client import Client, Connection
print(*sys.modules)
"""


def test_client_and_cli_load_nothing_heavy_at_runtime() -> None:
    """What the ast cannot see: a package loaded through another one."""
    packages = ["hicache_proto", "hicache_sidecar.client", "hicache_sidecar.cli"]
    ran = subprocess.run(
        [sys.executable, "-c", LOAD_ALL.format(packages=packages)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    loaded = {name.split(".")[0] for name in ran.stdout.split()}
    assert "hicache_sidecar" in loaded
    assert not loaded & {
        "trio",
        "torch",
        "zmq",
        "starlette",
        "hypercorn",
        "prometheus_client",
        "numpy",
        "hicache_hooks",
    }


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("hicache_hooks", {"trio", "hicache_sidecar", "hypercorn"}),
        ("hicache_sidecar", {"torch", "numpy", "hicache_hooks"}),
    ],
)
def test_hooks_and_sidecar_stay_apart_at_runtime(package: str, forbidden: set[str]) -> None:
    code = LOAD_ALL.format(packages=[package])
    if package == "hicache_hooks":
        code = code.replace("from hicache_sidecar.client import Client, Connection\n", "")
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=110, check=False)
    assert ran.returncode == 0, ran.stderr
    assert not {name.split(".")[0] for name in ran.stdout.split()} & forbidden
