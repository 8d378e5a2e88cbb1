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


# Found by random programs.
PLANTS = (
    Plant("roles of dgrad and wgrad swapped", "analysis/find.py",
          "roles if product.a.is_gradient else roles[::-1]", "roles[::-1] if product.a.is_gradient else roles"),
    Plant("a weight gradient of another activation", "analysis/find.py",
          "and layer.activation == activation.elements", "and True"),
    Plant("an input gradient told by its weight alone", "analysis/find.py",
          "if gradient.elements in layer.gradients or (not layer.gradients and same_node):", "if True:"),
    Plant("casts stripped that change values", "analysis/views.py",
          "return view if _exact(before.dtype, after.dtype) else", "return view if True else"),
    Plant("the strides of a reshape lost", "analysis/views.py",
          "strides.append(step * covered)", "strides.append(covered)"),
    Plant("a global scale of the rows before", "passes/lib/row_moves.py",
          'if fmt.outer == "tensor" and outer is None:', "if False:"),
    Plant("one global scale for all experts", "formats/reference_grouped.py",
          "amax = _largest_of_groups(amax, of_tiles, groups.count)",
          "amax = amax.amax(0).expand(groups.count, -1, -1)"),
    Plant("a rule's recipe replaced by the model's", "analysis/plan.py",
          'return recipe if rule.action == "quantize" else named(rule.action), _too_small',
          "return recipe, _too_small"),
    Plant("one layer's static scale for all", "analysis/plan.py",
          "outer = recipe.static_scale(gemm.module)", "outer = next(iter(dict(recipe.static_scales).values()), None)"),
    Plant("a limit off by one", "analysis/plan.py",
          "statically_true(size < getattr(recipe, limit))",
          "statically_true(size <= getattr(recipe, limit))"),
    Plant("transposition dropped", "passes/rewrite.py", "dim = -3 - dim  # -1 <-> -2", "pass"),
    Plant("B quantised along its last dimension", "passes/rewrite.py",
          "gemm.b, decision.b, -2", "gemm.b, decision.b, -1"),
    Plant("bias dropped", "passes/rewrite.py",
          "return self._product(decision, dtype, bias=gemm.bias)", "return self._product(decision, dtype)"),
    Plant("Hadamard transform dropped", "passes/rewrite.py", "hadamard=treatment.hadamard", "hadamard=False"),
    Plant("quantised once for both directions", "passes/rewrite.py",
          "key = (value_key(source), treatment, dim,", "key = (value_key(source), treatment,"),
    Plant("pairs of different global scales merged", "passes/lib/equal_quantises.py",
          'not in ("node", *apart)', 'not in ("node", "outer", *apart)'),
    Plant("columns' own global scale dropped", "passes/merge_quantize.py",
          "column_outer if both.spec.columns_separate else outer", "outer"),
)  # fmt: skip
# Found by their launches.
LAUNCH_PLANTS = (
    Plant("the stored result read with the strides of the first operand", "templates/quantize/source.py",
          "            return replace(self, view=matrices_view(self.stored_result.tensor),"
          " prologue=None, operands=(), stored=())",
          "            view = replace(self.view, tensor=self.stored_result.tensor)\n"
          "            return replace(self, view=view, prologue=None, operands=(), stored=())"),
    Plant("the batch stride of one matrix for all", "templates/quantize/source.py",
          "    batch_stride = 0 if statically_true(batch == 1) else x.stride(0)\n", "    batch_stride = 0\n"),
    Plant("scales of a quantised result in reverse", "templates/device/quantized_epilogue.py",
          "    shift = 8 * tl.arange(0, 4)[None, None, :]\n", "    shift = 8 * (3 - tl.arange(0, 4))[None, None, :]\n"),
    Plant("the amax of a result's last tile alone", "templates/gemm/block_scaled_sm100.py",
          "amax = tl.maximum(amax, tl.where(col0 < n, found, 0))", "amax = tl.where(col0 < n, found, 0)"),
    Plant("a column too many is read", "templates/quantize/row.py",
          "    cols_left = tl.minimum(cols - block0 * BLOCK, BLOCKS * BLOCK).to(tl.int32)\n",
          "    cols_left = tl.minimum(cols + 1 - block0 * BLOCK, BLOCKS * BLOCK).to(tl.int32)\n"),
    Plant("the last rows have no program", "templates/quantize/row.py",
          "    grid = row_tiles(source, rows, config.rows) * ceil_div(blocks, config.blocks)",
          "    grid = source.batch * max(rows // config.rows, 1) * ceil_div(blocks, config.blocks)"),
    Plant("padding of swizzled scales is not written", "templates/device/memory.py",
          "        padded = (row < tl.cdiv(rows, 128) * 128) & (block // 4 < tiles)",
          "        padded = (row < rows) & (block // 4 < tiles)"),
    Plant("partial maxima that no program writes", "templates/quantize/amax.py",
          "    grid = _amax_grid(source, config)\n    if", "    grid = max(_amax_grid(source, config) - 1, 1)\n    if"),
    Plant("what is stored has the dtype of the first operand", "formats/prologue.py",
          "first.new_empty(_shape(self.step_kinds[number], first.shape), dtype=dtype)",
          "first.new_empty(_shape(self.step_kinds[number], first.shape))"),
    Plant("the last columns of a product have no program", "templates/gemm/dequant_tiles.py",
          "        tiles_m * ceil_div(p.n, config.bn) * (groups if",
          "        tiles_m * max(p.n // config.bn, 1) * (groups if"),
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
