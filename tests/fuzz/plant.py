"""Does the fuzzer find bugs? Plant them one by one, and count the graphs until it does.

A plant is a bug: a piece of the package's source, and the text that replaces it. The package is copied, changed, and
fuzzed in a separate process. A plant is found if the findings differ from those of the unchanged package, which should
have none.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Plant:
    """name: what is wrong. path: of the file in the package. old: text that is in it once. new: its replacement."""

    name: str
    path: str
    old: str
    new: str


PLANTS = (
    # roles and layers
    Plant("roles of dgrad and wgrad swapped", "analysis/find.py",
          "roles if product.a.is_gradient else roles[::-1]", "roles[::-1] if product.a.is_gradient else roles"),
    Plant("roles of W @ x swapped", "analysis/find.py",
          'if weight_is_b else ("fprop_w", "fprop_x")', 'if weight_is_b else ("fprop_x", "fprop_w")'),
    Plant("a weight gradient told by its activation alone", "analysis/find.py",
          "if (input_index(_input_of(layer.root)), layer.gemm.alpha) in self.parts.get(product.node, ())", "if True"),
    Plant("a weight gradient of another activation", "analysis/find.py",
          "and layer.activation == activation.elements", "and True"),
    Plant("an input gradient told by its weight alone", "analysis/find.py",
          "if gradient.elements in layer.gradients or (not layer.gradients and same_node):", "if True:"),
    Plant("an input gradient told by its parameter, whatever piece of it", "analysis/find.py",
          "same = layer.weight.key == weight.key and", "same = layer.root is product.weight.root and"),
    Plant("a gradient that torch.func.grad takes inside taken for a layer", "analysis/find.py",
          "if is_inner_gradient(product.node):", "if False:"),
    Plant("backward products by layer sizes of their own", "analysis/find.py",
          "layer=origin.layer,", "layer=product.dims,"),
    Plant("casts stripped that change values", "analysis/views.py",
          "return view if _exact(before.dtype, after.dtype) else", "return view if True else"),
    Plant("a computed weight taken for the parameter", "analysis/views.py",
          "aten.clone.default), _same)", "aten.clone.default, aten.mul.Tensor), _same)"),
    Plant("batched products with a parameter of three dimensions taken for layers", "analysis/views.py",
          "all(_equal(size, 1) or _equal(stride, 0) for", "all(True for"),
    Plant("one value for all outputs of chunk and split", "analysis/views.py",
          "offset = view.offset + start * view.stride[dim]", "offset = view.offset"),
    Plant("the strides of a reshape lost", "analysis/views.py",
          "strides.append(step * covered)", "strides.append(covered)"),
    # moves of rows
    Plant("scales moved with the rows before", "passes/lib/row_moves.py",
          "moved = {place: move.started(graph, _as_bytes(graph, quantised, place)) for place in parts_of(reader)}",
          "moved = {place: move.started(graph, new_node(graph, aten.roll.default, "
          "(_as_bytes(graph, quantised, place), [place], [0]), {})) for place in parts_of(reader)}"),
    Plant("an outer scale of the rows before", "passes/lib/row_moves.py",
          'if fmt.outer == "tensor" and outer is None:', "if False:"),
    Plant("rows moved without those who read them", "passes/lib/row_moves.py",
          "if len(quantisers) + len(sizes) < len(users):", "if False:"),
    # experts
    Plant("a weight gradient of other groups", "analysis/find.py",
          "            and layer.grouping == product.grouping\n", ""),
    Plant("one outer scale for all experts", "formats/reference_grouped.py",
          "amax = _largest_of_groups(amax, of_tiles, groups.count)",
          "amax = amax.amax(0).expand(groups.count, -1, -1)"),
    Plant("experts' batches quantised as one tensor", "passes/rewrite.py",
          "(gemm.groups is not None and treatment.per_group)", "False"),
    # decisions
    Plant("a rule's recipe replaced by the model's", "analysis/plan.py",
          'return recipe if rule.action == "quantize" else named(rule.action), _too_small',
          "return recipe, _too_small"),
    Plant("a rule's skip ignored", "analysis/plan.py",
          '''return None, f"rule {rule.pattern!r}"''', "return recipe, None"),
    Plant("formats of a rule taken from the model's recipe", "analysis/plan.py",
          "getattr(layer_recipe, operand.role), None", "getattr(recipe, operand.role), None"),
    Plant("one layer's static scale for all", "analysis/plan.py",
          "outer = recipe.static_scale(gemm.module)", "outer = next(iter(dict(recipe.static_scales).values()), None)"),
    Plant("a limit off by one", "analysis/plan.py",
          "statically_true(size < getattr(recipe, limit))",
          "statically_true(size <= getattr(recipe, limit))"),
    Plant("limits of a rule's layers dropped", "analysis/plan.py",
          "else named(rule.action), _too_small(layer, recipe)", "else named(rule.action), None"),
    # the rewrite
    Plant("transposition dropped", "passes/rewrite.py", "dim = -3 - dim  # -1 <-> -2", "pass"),
    Plant("B quantised along its last dimension", "passes/rewrite.py",
          "gemm.b, decision.b, -2", "gemm.b, decision.b, -1"),
    Plant("bias dropped", "passes/rewrite.py",
          "return self._product(decision, dtype, bias=gemm.bias)", "return self._product(decision, dtype)"),
    Plant("alpha dropped", "passes/rewrite.py", "if gemm.alpha != 1:", "if False:"),
    Plant("beta dropped", "passes/rewrite.py", "meta, alpha=gemm.beta)", "meta)"),
    Plant("outer scale dropped", "passes/rewrite.py", 'kwargs.get("outer", computed)', 'kwargs.get("outer")'),
    Plant("static outer scale dropped", "passes/rewrite.py", "if treatment.outer is not None:", "if False:"),
    Plant("Hadamard transform dropped", "passes/rewrite.py", "if treatment.hadamard:", "if False:"),
    Plant("quantised once for all formats", "passes/rewrite.py",
          "key = (value_key(source), treatment, dim,", "key = (value_key(source), dim,"),
    Plant("quantised once for both directions", "passes/rewrite.py",
          "key = (value_key(source), treatment, dim,", "key = (value_key(source), treatment,"),
    # after the partitioner
    Plant("pairs of different formats merged", "passes/lib/equal_quantises.py",
          'not in ("node", *apart)', 'not in ("node", "format", *apart)'),
    Plant("pairs of different outer scales merged", "passes/lib/equal_quantises.py",
          'not in ("node", *apart)', 'not in ("node", "outer", *apart)'),
    Plant("quantises of different directions shared", "passes/lib/equal_quantises.py",
          "setdefault(key_of(found), node)", 'setdefault(key_of(found, "dims"), node)'),
    Plant("columns' own outer scale dropped", "passes/merge_quantize.py",
          "column_outer if both.spec.columns_separate else outer", "outer"),
)  # fmt: skip


def plant_all(plants: Sequence[Plant], arguments: list[str]) -> int:
    """Fuzz with each plant, and print after how many graphs it was found. Returns how many plants were not found."""
    with tempfile.TemporaryDirectory() as directory:
        clean = dict(_fuzz(_copy(Path(directory) / "clean"), arguments))
    sound = sum(finding is None for finding in clean.values())
    print(f"the package as it is: {sound} of {len(clean)} graphs without a finding")
    missed = 0
    for plant in plants:
        with tempfile.TemporaryDirectory() as directory:
            outcome = _found_after(plant, _copy(Path(directory) / "planted"), arguments, clean)
        missed += outcome is None
        print(f"{'NOT FOUND' if outcome is None else outcome:>12}  {plant.name}", flush=True)
    return missed


def _found_after(plant: Plant, root: Path, arguments: list[str], clean: dict[int, str | None]) -> str | None:
    """After how many graphs the plant was found, as text; None if it was not found."""
    path = root / "fp4compile" / plant.path
    text = path.read_text()
    if text.count(plant.old) != 1:
        return "no such line"
    path.write_text(text.replace(plant.old, plant.new))
    for number, (seed, finding) in enumerate(_fuzz(root, arguments), start=1):
        if finding is not None and finding != clean.get(seed):
            return f"{number} graphs"
    return None


def _copy(root: Path) -> Path:
    """A copy of the package and of the tests, to change."""
    for name in ("fp4compile", "ptxsim", "tests"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    return root


def _fuzz(root: Path, arguments: list[str]) -> Iterator[tuple[int, str | None]]:
    """(seed, finding or None) of each program. The process that fuzzes ends when the iterator is closed."""
    command = [sys.executable, "-m", "tests.fuzz", "--json", *arguments]
    process = subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    seen = 0
    try:
        for line in process.stdout:
            entry = json.loads(line)
            seen += 1
            yield entry["seed"], entry["finding"]
        if process.wait() not in (0, 1):
            raise RuntimeError(f"the fuzzer ended after {seen} graphs:\n{process.stderr.read()[-2000:]}")
    finally:
        process.terminate()
        process.wait()
