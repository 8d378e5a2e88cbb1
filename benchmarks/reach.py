"""What model families reach: the ops, prologues, kernels and launches of their compiled graphs. Needs no GPU.

    python -m benchmarks.reach [--families Llama-3-8B ...] [--modes forward train ...] [--sm 90 100] [--out FILE]

Each of `benchmarks.families` is captured once a mode. Its graph is compiled under each recipe for each compute
capability, as far as Inductor's code generation, with `templates.launch.dry_run` in the place of the GPU. This takes
six minutes of a CPU. "attention" quantises attention too, which no named recipe does; "a block" has embeddings as its
input.

A run says what its graphs have. prologues: quantisers with a prologue, by kind (`kind_of`). products: what `choose`
gives for each. ops: nodes after the fusing passes. launches: traces of this package's kernels; equal nodes share one.

Times are predictions for a H200 or a B200 by `fp4compile.roofline`, in microseconds of a step. products: with their
quantisers. pointwise: Inductor's kernels. saved: what `prologue_cost.gain` predicts for the prologues of each kind, and
one launch for each. "least %" and "most %" are that in percent of the step, with "pointwise" and without.

"options" are the constants that each kernel was launched with in any run, "never launched" the kernels that no run has.
Both are of graphs alone: `pack_` and eager calls launch others.
"""

import copy
import importlib
import pkgutil
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import triton
from torch._inductor import config as inductor
from torch._inductor.fx_passes import joint_graph
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule

import fp4compile
from benchmarks import common
from benchmarks.families import FAMILIES, MODES, Family, on_meta, to_fake
from fp4compile import _compat, hardware, templates
from fp4compile.formats.quantize_spec import ROWS, QuantizeSpec
from fp4compile.hardware import Gpu
from fp4compile.ops.matmul import SCALED_MM
from fp4compile.ops.nodes import Quantise, quantise_of, scaled_mm_of
from fp4compile.ops.quantize import QUANTIZE
from fp4compile.passes import fuse_prologue, hoist, manager
from fp4compile.recipe import Recipe
from fp4compile.roofline.graph_steps import steps_of
from fp4compile.templates.launch import Launch, dry_run

GPUS = {90: hardware.GPUS["H200"], 100: hardware.GPUS["B200"]}
BACKEND = importlib.import_module("fp4compile.dynamo_backend")  # the package has a function of that name

TIMES = ("products", "attention", "pointwise")


@dataclass
class Seen:
    """What one compilation has reached. gains: by `key_of` a prologue, bytes an element. seconds: see above."""

    launches: list[Launch] = field(default_factory=list)
    gains: dict[tuple, float] = field(default_factory=dict)
    ops: Counter = field(default_factory=Counter)
    prologues: Counter = field(default_factory=Counter)
    products: Counter = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    saved: dict[str, float] = field(default_factory=lambda: defaultdict(float))


# ---------------------------------------------------------------- compiling for a GPU that is not there


def compiled(family: Family, mode: str, sms: Iterable[int]) -> Iterator[tuple[int, Recipe, Seen]]:
    """Capture a family's model once, and compile it under each recipe for each compute capability."""
    found: list[tuple[int, Recipe, Seen]] = []

    def each(gm: GraphModule, example_inputs: list[Any]) -> Callable:
        for sm in sms:
            for recipe in family.recipes_of(mode):
                seen = Seen()
                with absent_gpu(GPUS[sm], seen):
                    fp4compile.backend(recipe)(copy.deepcopy(gm), example_inputs)
                found.append((sm, recipe, seen))
        return gm.forward

    train = mode == "train"
    model = on_meta(family, train)
    torch._dynamo.reset()
    autocast = torch.autocast("cpu", torch.bfloat16, family.autocast)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.set_grad_enabled(train), autocast:
        torch.compile(to_fake(model), backend=each, fullgraph=True)(**family.inputs(MODES[mode]))
    yield from found


@contextmanager
def absent_gpu(gpu: Gpu, seen: Seen) -> Iterator[None]:
    """While this lasts, the backend compiles for a GPU, without generating code, and notes what it reaches."""
    gain_of, fused = fuse_prologue.gain, manager.fused

    def gain_noted(spec: QuantizeSpec, *others: Any) -> float:
        found = gain_of(spec, *others)
        key = key_of(spec)
        seen.gains[key] = max(found, seen.gains.get(key, 0.0))
        return found

    def fused_and_noted(graph: Graph) -> Any:
        note(graph, gpu, seen)
        return fused(graph)

    def inner_compile(gm: GraphModule, *_: Any, **__: Any) -> Callable:
        inductor.post_grad_custom_post_pass(gm.graph)
        return lambda *_: []

    with ExitStack() as stack:
        for place, name, value in (
            (fuse_prologue, "gain", gain_noted),
            (manager, "fused", fused_and_noted),
            (BACKEND, "compile_fx_inner", inner_compile),
            # A fake weight has no contents to quantise, nor an address to know it by.
            (hoist, "packed_weight", lambda *_: (None,) * 3),
            (joint_graph, "lazy_init", lambda *_: None),  # traces patterns of Inductor's own
        ):
            stack.enter_context(mock.patch.object(place, name, value))
        stack.enter_context(inductor.patch(force_disable_caches=True))
        stack.enter_context(torch._functorch.config.patch(force_non_lazy_backward_lowering=True))
        seen.launches = stack.enter_context(dry_run(gpu.target))
        yield


# ---------------------------------------------------------------- reading a graph


def note(graph: Graph, gpu: Gpu, seen: Seen) -> None:
    """Add what a graph has after the fusing passes."""
    for node in graph.nodes:
        if getattr(node.target, "namespace", "") == "fp4compile":
            seen.ops[node.target._opname] += 1
        if node.target is SCALED_MM and "index" not in node.kwargs:
            choice = scaled_mm_of(node).choice
            seen.products["PyTorch" if choice is None else choice.kernel] += 1
        elif node.target is QUANTIZE and quantise_of(node).prologue:
            kind, value = kind_of(quantise_of(node)), node.args[0].meta["val"]
            seen.prologues[kind] += 1
            bytes_saved = seen.gains.get(key_of(quantise_of(node).spec), 0.0) * value.numel()
            seen.saved[kind] += bytes_saved / gpu.copy_rate + gpu.launch
    for _, step in steps_of(graph, gpu):
        kind = "pointwise" if step.name in ("pointwise", "reduction") else step.name
        seen.seconds[kind if kind in ("pointwise", "attention") else "products"] += step.seconds


def kind_of(quantise: Quantise) -> str:
    """What kind of prologue a quantiser has."""
    spec = quantise.spec
    operations = {step.operation for step in spec.prologue.steps}
    operands = [node.meta["val"] for node in (quantise.x, *quantise.operands)]
    wide = any(each.dtype == torch.float32 and each.numel() == operands[0].numel() for each in operands)
    words = {
        "experts": quantise.grouped,
        "both" if spec.both else "rows" if spec.dims == (ROWS,) else "columns": True,
        "norm": bool(spec.prologue.reductions),
        "stores": bool(spec.prologue.stored),
        "values": bool(spec.values),
        "float32": wide,
        "slices": not all(each.is_contiguous() for each in operands),
        **{name: name in operations for name in ("erf", "tanh", "variance", "amax")},
    }
    return ", ".join(word for word, applies in words.items() if applies)


def key_of(spec: QuantizeSpec) -> tuple:
    """Equal for quantisers that the model cannot tell apart: whose operations are in any order."""
    prologue = spec.prologue
    names = sorted(prologue.steps[number].operation for number in prologue.computed)
    return tuple(names), len(prologue.stored), spec.dims, spec.values, spec.ragged, spec.format.name


# ---------------------------------------------------------------- tables


def row_of(name: str, mode: str, sm: int, recipe: Recipe, seen: Seen) -> dict[str, Any]:
    us = {f"{of} us": round(1e6 * seen.seconds[of], 1) for of in TIMES}
    return {
        "family": name, "mode": mode, "sm": sm, "recipe": recipe.name, "prologues": dict(seen.prologues),
        "products": dict(seen.products), "ops": dict(seen.ops),
        "launches": dict(Counter(name_of(one) for one in seen.launches)), **us,
        "saved us": {kind: round(1e6 * seconds, 1) for kind, seconds in seen.saved.items()},
    }  # fmt: skip


def by_prologue(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each kind of prologue: in how many runs it is, and the one in which it saves the largest share of a step."""
    found = []
    for kind in sorted({kind for row in rows for kind in row["prologues"]}):
        having = [row for row in rows if kind in row["prologues"]]
        best = max(having, key=lambda row: shares_of(row, kind))
        least, most = shares_of(best, kind)
        found.append({"prologue": kind, "runs": len(having), "of sm 90": sum(row["sm"] == 90 for row in having),
                      "most saved by": best["family"], "mode": best["mode"], "sm": best["sm"], "recipe": best["recipe"],
                      "prologues": best["prologues"][kind], "saved us": best["saved us"][kind],
                      "least %": least, "most %": most})  # fmt: skip
    return found


def shares_of(row: dict[str, Any], kind: str) -> tuple[float, float]:
    """What the prologues of a kind save of a step, in percent: with all that "pointwise" may take, and without."""
    saved, products = row["saved us"][kind], row["products us"] + row["attention us"]
    return round(100 * saved / (saved + products + row["pointwise us"]), 2), round(100 * saved / (saved + products), 2)


def by_product(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each kernel of products: how many runs of which compute capability have it, and which modes."""
    found = []
    for kernel in sorted({kernel for row in rows for kernel in row["products"]}):
        having = [row for row in rows if kernel in row["products"]]
        each = {f"runs of sm {sm}": sum(row["sm"] == sm for row in having) for sm in GPUS}
        modes = ", ".join(mode for mode in MODES if any(row["mode"] == mode for row in having))
        found.append({"product": kernel, **each, "modes": modes})
    return found


def name_of(launched: Launch) -> str:
    return launched.kernel.fn.__name__


def options_of(launches: Iterable[Launch]) -> dict[str, dict[str, list[str]]]:
    """The values of each constant that each kernel was launched with."""
    found: dict[str, dict[str, set]] = defaultdict(lambda: defaultdict(set))
    for one in launches:
        for name, value in one.constants.items():
            found[name_of(one)][name].add(str(value))
    return {kernel: {name: sorted(values) for name, values in sorted(options.items())}
            for kernel, options in sorted(found.items())}  # fmt: skip


def kernels() -> set[str]:
    """The names of all kernels that this Triton has: what is no device function asks for its place in the grid."""
    found = set()
    for module in pkgutil.walk_packages(templates.__path__, f"{templates.__name__}."):
        if module.name.endswith(".two_cta_kernel_sm100") and not _compat.two_cta_products():
            continue
        for value in vars(importlib.import_module(module.name)).values():
            own = isinstance(value, triton.JITFunction) and value.fn.__module__ == module.name
            if own and "tl.program_id" in value.src and ".device." not in module.name:
                found.add(value.fn.__name__)
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES), metavar="FAMILY")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), metavar="MODE")
    parser.add_argument("--sm", nargs="+", type=int, choices=GPUS, default=list(GPUS))
    args = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", message="(.*quantised nothing|dynamo_pgo)")
    rows: list[dict[str, Any]] = []
    launches: list[Launch] = []
    start = time.perf_counter()
    for name in args.families:
        for mode in (mode for mode in args.modes if mode in FAMILIES[name].modes):
            for sm, recipe, seen in compiled(FAMILIES[name], mode, args.sm):
                rows.append(row_of(name, mode, sm, recipe, seen))
                launches += seen.launches
            print(f"{time.perf_counter() - start:.0f} s: {name}, {mode}", file=sys.stderr, flush=True)
    options = options_of(launches)
    settings = {"seconds": round(time.perf_counter() - start), "options": options,
                "never launched": sorted(kernels() - options.keys())}  # fmt: skip
    common.publish_parts(args, settings, {"prologues": by_prologue(rows), "products": by_product(rows), "runs": rows})


if __name__ == "__main__":
    main()
