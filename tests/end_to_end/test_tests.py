"""The tests' own house: every test file says what it holds, and none imports another."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "tests").rglob("test_*.py"))


def imported(tree: ast.Module) -> set[str]:
    """Last parts of the names of imported modules, and the names imported from them."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found |= {(node.module or "").split(".")[-1], *(name.name for name in node.names)}
        elif isinstance(node, ast.Import):
            found |= {name.name.split(".")[-1] for name in node.names}
    return found


def test_every_test_file_has_a_docstring_and_imports_none():
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}
    assert len(trees) > 40
    assert not [path.name for path, tree in trees.items() if not ast.get_docstring(tree)]
    assert not [path.name for path, tree in trees.items() if imported(tree) & {path.stem for path in FILES}]
