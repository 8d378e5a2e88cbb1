"""The package's metadata: entry points, dependencies, versions; and the tests' own house."""

import ast
import re
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import fp4compile
from fp4compile.recipe import recipes

ROOT = Path(__file__).parents[2]


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def entry_points() -> dict[str, str]:
    return project()["entry-points"]["torch_dynamo_backends"]


def test_every_named_recipe_is_a_backend_by_name():
    expected = {f"fp4compile_{name}": f"fp4compile.registration:{name}" for name in recipes()}
    assert entry_points() == {"fp4compile": "fp4compile.registration:default"} | expected


@pytest.mark.parametrize("name, target", entry_points().items())
def test_entry_points_resolve(name, target):
    loaded = EntryPoint(name, target, "torch_dynamo_backends").load()
    assert callable(loaded)
    assert name in ("fp4compile", loaded.__name__)


def test_the_version_is_the_packages_literal():
    """setuptools reads a literal without importing the package, and so without torch."""
    dynamic = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["dynamic"]
    assert project()["dynamic"] == ["version"] and dynamic["version"] == {"attr": "fp4compile.__version__"}
    source = (ROOT / "fp4compile" / "__init__.py").read_text(encoding="utf-8")
    assert f'\n__version__ = "{fp4compile.__version__}"' in source


def test_every_public_name_is_there():
    assert all(hasattr(fp4compile, name) for name in fp4compile.__all__)
    assert all((ROOT / package / "py.typed").exists() for package in ("fp4compile", "ptxsim"))


def test_numpy_is_required():
    """torch does not install it, and warns at its absence in the first lines of every run."""
    assert "numpy" in project()["dependencies"]


def test_requirements_of_the_tests_and_of_the_documentation_are_pinned():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    optional = project()["optional-dependencies"]
    assert {*optional["test"], *optional["docs"]} <= set(pins)


def test_readme_describes_every_recipe():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    described = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| [^|\d]", text, re.MULTILINE)
    assert tuple(re.findall(r"\w+", " ".join(described))) == recipes()


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
    files = (ROOT / "tests").rglob("test_*.py")
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in files}
    assert len(trees) > 40
    assert not [path.name for path, tree in trees.items() if not ast.get_docstring(tree)]
    assert not [path.name for path, tree in trees.items() if imported(tree) & {path.stem for path in trees}]
