"""The house keeps its shape: imports go downwards, none of them in a circle; patches of other libraries have one place.

This is read from the source text, imports inside functions included. What `import fp4compile` imports is seen in a
process of its own.
"""

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import fp4compile

ROOT = Path(__file__).parents[2]
PACKAGE, SIMULATOR = "fp4compile", "ptxsim"
PATCHES = "fp4compile._inductor_patches"
MOST_LINES = 700

# The rooms, the highest first. A module may import from its own room and from rooms below it. An entry is a module, or
# a package with everything in it; where several entries fit a module, the longest one decides.
ROOMS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("command line", ("fp4compile.cli", "fp4compile.__main__")),
    ("checks of kernels", ("fp4compile.check",)),
    ("public names", ("fp4compile",)),
    ("entry points", (
        "fp4compile.registration", "fp4compile.dynamo_backend", "fp4compile.calibration", "fp4compile.capture",
        "fp4compile.distributed", "fp4compile.roofline", "fp4compile.uncaptured",
    )),
    ("passes", ("fp4compile.passes",)),
    ("weights", ("fp4compile.weights",)),
    ("report", ("fp4compile.report",)),
    ("analysis", ("fp4compile.analysis",)),
    ("recipe", ("fp4compile.recipe",)),
    ("operators", ("fp4compile.ops",)),
    ("templates", ("fp4compile.templates",)),
    ("ground", ("fp4compile.formats", "fp4compile.hardware", "fp4compile._compat", "fp4compile._inductor_patches",
                "fp4compile.config")),
    ("simulator, a package of its own", (SIMULATOR,)),
)  # fmt: skip
# Rooms inside `fp4compile.templates`, the highest first: kernels are made of device functions, never the reverse.
TEMPLATE_ROOMS = (
    ("fp4compile.templates.multiply",),
    ("fp4compile.templates.choose",),
    ("fp4compile.templates.gemm",),
    (
        "fp4compile.templates.quantize",
        "fp4compile.templates.scale_sweep",
        "fp4compile.templates.compensate",
        "fp4compile.templates.problem",
    ),
    ("fp4compile.templates.launch",),
    ("fp4compile.templates.device",),
)
# Packages, and modules with everything below them, that are imported when they are used.
LATER = ("torch._dynamo", "torch._inductor", "sympy", "triton", "networkx", "transformers", "fp4compile.analysis",
         "fp4compile.calibration", "fp4compile.dynamo_backend", "fp4compile.passes", "fp4compile.roofline",
         "fp4compile.templates", "fp4compile.weights")  # fmt: skip


# ---------------------------------------------------------------- reading the source


def module_names(root: Path) -> dict[str, Path]:
    """The file of each module of both packages below a folder, by the module's dotted name."""
    found = {}
    for path in sorted(path for package in (PACKAGE, SIMULATOR) for path in (root / package).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


parsed = functools.cache(ast.parse)  # by the text


def imports_of(tree: ast.AST, modules: dict[str, Path]) -> set[str]:
    """The modules of both packages that a module imports, anywhere in it.

    `from package import name` is an import of the module `package.name` where there is one, else of `package`.
    """
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in modules}
        elif isinstance(node, ast.ImportFrom) and node.module in modules:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in modules else node.module)
    return found


def import_graph(root: Path = ROOT) -> dict[str, set[str]]:
    """The modules of both packages that each of their modules imports.

    Python also runs the `__init__` of every package above an imported module. That is no edge here: such a file may
    gather the names of its package's modules.
    """
    modules = module_names(root)
    graph = {name: imports_of(parsed(path.read_text(encoding="utf-8")), modules) for name, path in modules.items()}
    return {name: imported - {name} for name, imported in graph.items()}


# ---------------------------------------------------------------- circles


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import each other, directly or through others; none where there are no such."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return sorted(set(error.args[1]))
    return []


def test_no_import_is_in_a_circle():
    assert circle(import_graph()) == []


# ---------------------------------------------------------------- rooms


def place_in(rooms: tuple[tuple[str, ...], ...], module: str) -> int | None:
    """The number of the room that a module is in, 0 for the highest; None where no room has it."""
    fitting = [
        (len(entry), number)
        for number, entries in enumerate(rooms)
        for entry in entries
        if module == entry or (module.startswith(f"{entry}.") and entry != PACKAGE)
    ]
    return max(fitting)[1] if fitting else None


def arrows_up(graph: dict[str, set[str]], rooms: tuple[tuple[str, ...], ...]) -> list[str]:
    """The imports from a room above the importing module's."""
    places = {module: place_in(rooms, module) for module in graph}
    return [
        f"{module} imports {other}"
        for module, imported in sorted(graph.items())
        for other in sorted(imported)
        if places[module] is not None and places[other] is not None and places[other] < places[module]
    ]


def test_every_module_is_in_a_room():
    rooms = tuple(entries for _, entries in ROOMS)
    graph = import_graph()
    assert [module for module in graph if place_in(rooms, module) is None] == []


def test_no_import_goes_up():
    graph = import_graph()
    assert arrows_up(graph, tuple(entries for _, entries in ROOMS)) == []
    assert arrows_up(graph, TEMPLATE_ROOMS) == []


def test_the_simulator_serves_checks_alone():
    """It imports nothing of the package (`test_no_import_goes_up`), and nothing that users run imports it."""
    rooms = tuple(entries for _, entries in ROOMS)
    place, simulator = partial(place_in, rooms), len(ROOMS) - 1
    importing = {place(module) for module, imported in import_graph().items() if simulator in map(place, imported)}
    assert importing == {simulator, place("fp4compile.check")}


def test_no_package_is_split_between_rooms():
    """A module that alone has to lie in a higher room than its package lies in the wrong package."""
    assert [entry for _, entries in ROOMS for entry in entries if entry.count(".") > 1] == []


# ---------------------------------------------------------------- what is imported when it is used


def imported_by(code: str) -> set[str]:
    """The modules that a process has imported after it ran the code."""
    command = [sys.executable, "-c", f"import sys\n{code}\nprint(*sys.modules)"]
    return set(subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.split())


def below(names: tuple[str, ...], modules: set[str]) -> list[str]:
    return [name for name in names if any(module == name or module.startswith(f"{name}.") for module in modules)]


def test_importing_the_package_and_eager_calls_on_a_cpu_import_no_compiler():
    """The ops are declared all the same: an exported program finds them."""
    modules = imported_by(
        "import torch, fp4compile\n"
        "assert torch.ops.fp4compile.scaled_mm.default and torch.ops.fp4compile.dequantize.default\n"
        "a, b = (fp4compile.quantize(torch.ones(32, 64), 'nvfp4') for _ in range(2))\n"
        "assert fp4compile.scaled_mm(a, b).eq(64).all()\n"
    )
    assert "fp4compile.ops.matmul" in modules and below(LATER, modules) == []


def test_a_backend_imports_neither_predictions_nor_published_layouts():
    modules = imported_by("import fp4compile; fp4compile.backend('nvfp4')")
    assert "torch._inductor" in modules
    assert (
        below(("fp4compile.roofline", "fp4compile.calibration", "fp4compile.weights.published.conventions"), modules)
        == []
    )


def test_names_are_imported_from_where_type_checkers_find_them():
    block, _ = (node for node in parsed(Path(fp4compile.__file__).read_text()).body if isinstance(node, ast.If))
    found = {alias.name: f"{node.module}" for node in block.body for alias in node.names}
    assert found == {name: f"{PACKAGE}.{place}" for name, place in fp4compile._LATER.items()}
    assert set(fp4compile.__all__) <= set(dir(fp4compile)) and all(hasattr(fp4compile, name) for name in found)
    assert fp4compile.roofline.GPUS and not hasattr(fp4compile, "no_such_name")


# ---------------------------------------------------------------- patches of other libraries


def foreign_names(tree: ast.AST) -> set[str]:
    """The names in a module that an import of another library binds, or an assignment of such a library's attribute."""
    own = sys.stdlib_module_names | {PACKAGE, SIMULATOR}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.asname or alias.name.split(".")[0] for alias in node.names
                      if alias.name.split(".")[0] not in own}  # fmt: skip
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] not in own:
            found |= {alias.asname or alias.name for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute) and root_of(node.value) in found:
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found


def root_of(node: ast.expr) -> str | None:
    """The name at the beginning of `name.attribute.attribute`; None where there is another expression."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def targets_of(node: ast.AST) -> Iterator[ast.expr]:
    """What a statement assigns to or deletes, and the object of a call of `setattr` or `delattr`."""
    if isinstance(node, ast.Assign | ast.Delete):
        for target in node.targets:
            yield from target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        yield node.target
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
        yield ast.Attribute(node.args[0], "")


def patches_in(source: str) -> list[int]:
    """The lines of a module that change an attribute, or an item of one, of what it imports from another library."""
    tree = parsed(source)
    foreign = foreign_names(tree)
    lines = []
    for node in ast.walk(tree):
        for target in targets_of(node):
            inner = target.value if isinstance(target, ast.Subscript) else target
            if isinstance(inner, ast.Attribute) and root_of(inner) in foreign:
                lines.append(node.lineno)  # type: ignore[attr-defined]
    return lines


def test_other_libraries_are_patched_in_one_module():
    found = {name: patches_in(path.read_text(encoding="utf-8")) for name, path in module_names(ROOT).items()}
    assert found.pop(PATCHES), "this check sees patches"
    # It changes a public setting of torch for one call.
    assert {name for name, lines in found.items() if lines} == {"fp4compile.formats.float32_sums"}


# ---------------------------------------------------------------- size


def test_long_files_give_a_reason():
    """A file above 700 lines has a paragraph in its docstring that begins with "One file, because"."""
    unexplained = []
    for path in module_names(ROOT).values():
        text = path.read_text(encoding="utf-8")
        if text.count("\n") > MOST_LINES:
            docstring = ast.get_docstring(ast.parse(text)) or ""
            if not any(part.startswith("One file, because") for part in docstring.split("\n\n")):
                unexplained.append(f"{path.relative_to(ROOT)}: {text.count(chr(10))} lines")
    assert unexplained == []


# ---------------------------------------------------------------- these checks can fail


def a_package(folder: Path, **files: str) -> dict[str, set[str]]:
    """The import graph of a package made of these files; `room__module` is a module in a room."""
    for name, text in {"__init__": "", **files}.items():
        path = (folder / PACKAGE).joinpath(*name.split("__")) if "__" in name.strip("_") else folder / PACKAGE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".py").write_text(text)
    return import_graph(folder)


def test_a_circle_through_a_function_is_found(tmp_path):
    files = {"sources": "from fp4compile.names import f\n", "names": "import fp4compile.recipe\n", "config": ""}
    graph = a_package(tmp_path, recipe="def read():\n    from fp4compile import sources\n", **files)
    assert circle(graph) == ["fp4compile.names", "fp4compile.recipe", "fp4compile.sources"]


def test_an_import_that_goes_up_is_found(tmp_path):
    graph = a_package(
        tmp_path, formats__grouping="import fp4compile.ops.dense\n", ops__dense="import fp4compile.formats.grouping\n"
    )
    rooms = tuple(entries for _, entries in ROOMS)
    assert arrows_up(graph, rooms) == ["fp4compile.formats.grouping imports fp4compile.ops.dense"]
    assert arrows_up({"ptxsim.run": {"fp4compile.config"}, "fp4compile.config": set()}, rooms)
    assert place_in(rooms, "fp4compile.unknown") is None
    assert place_in(rooms, "fp4compile.passes.find") == 4


@pytest.mark.parametrize(("source", "lines"), [
    ("import torch\ntorch.compile = None\n", [2]),
    ("from torch._inductor import wrapper as w\nw.Codegen.define, x = 1, 2\n", [2]),
    ("import torch\ndef patch():\n    inner = torch._higher_order_ops\n    setattr(inner, 'f', 1)\n", [4]),
    ("from accelerate.utils import Backend\nBackend._missing_ = classmethod(print)\n", [2]),
    ("import triton\ntriton.knobs.table['x'] = 1\ndel triton.knobs.y\n", [2, 3]),
    ("import sys\nimport torch\nsys.argv = []\nx = torch.empty(1)\nx.grad = None\nself.weight = x\n", []),
])  # fmt: skip
def test_patches_are_recognised(source, lines):
    assert sorted(patches_in(source)) == lines
