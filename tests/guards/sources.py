"""The product's source files and what they import, read with ``ast``: no module is executed."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE_ROOTS = {"proto": "hicache_proto", "sidecar": "hicache_sidecar", "engine_hooks": "hicache_hooks"}


def source_files() -> Iterator[Path]:
    """Every Python file of the three packages."""
    for root, package in SOURCE_ROOTS.items():
        yield from sorted((ROOT / root / package).rglob("*.py"))


def module_name(path: Path) -> str:
    """Dotted name of a source file."""
    parts = path.relative_to(ROOT).with_suffix("").parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """``(line, dotted module)`` of every import in the file, also those inside functions and TYPE_CHECKING blocks."""
    module = module_name(path)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*up, *([node.module] if node.module else [])])
            for alias in node.names:  # `from package import module` names a module too
                yield node.lineno, f"{base}.{alias.name}"
