"""Every public class and function at the top of a module says what it is."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_public_names_have_docstrings() -> None:
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    silent = [
        f"{path.relative_to(ROOT)}: {node.name}"
        for top in ("sidecar", "engine_hooks", "proto")
        for path in sorted((ROOT / top).rglob("*.py"))
        for node in ast.parse(path.read_text()).body
        if isinstance(node, kinds) and not node.name.startswith("_") and not ast.get_docstring(node)
    ]
    assert silent == []
