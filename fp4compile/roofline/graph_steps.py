"""The steps of a whole graph: what a GPU launches for it, after all passes, each launch once.

Entry: `steps_of(graph, gpu)`, of tensors on the GPU, or inside `templates.launch.dry_run` of it. A product of this
package's is the kernel that `choose` names; a quantiser is the launches of `templates.quantize.plan`; what is left to
Inductor is counted by its bytes (`roofline.pointwise`), and attention and torch's products by their FLOPs and bytes.
"""

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils._python_dispatch import TorchDispatchMode

from fp4compile import _compat
from fp4compile.analysis import flops
from fp4compile.analysis.graph import ScaledMM, quantise_of, reads_by_index, scaled_mm_of
from fp4compile.formats import formats
from fp4compile.formats.operand import Arguments, Operand
from fp4compile.formats.quantize_spec import ROWS as ALONG_ROWS
from fp4compile.hardware import Gpu
from fp4compile.ops.define import KERNELS
from fp4compile.ops.matmul import (
    SCALED_GROUPED_MM,
    SCALED_MM,
    SCALED_MM_AMAX,
    SCALED_MM_GATHERED,
    SCALED_MM_HORIZONTAL,
    SCALED_MM_QUANTIZED,
)
from fp4compile.ops.quantize import LAY_OUT_SCALES, QUANTIZE
from fp4compile.roofline import pointwise
from fp4compile.roofline.product_steps import Chosen, gemm_name, memory_pass, plain_step, product_steps, tiles_of
from fp4compile.roofline.sizes import Experts, Sizes
from fp4compile.roofline.time_terms import ATTENTION, BF16, BOTH_WAYS, COLUMN, ROWS, Step, quantiser, stored
from fp4compile.templates.choose import choose
from fp4compile.templates.launch import Launch, dry_run
from fp4compile.templates.problem import Problem, operand_type, problem_of
from fp4compile.templates.view import View

aten = torch.ops.aten
_QUANTIZING = (SCALED_MM_QUANTIZED, SCALED_MM_AMAX)
OWN_PRODUCTS = (SCALED_MM, *_QUANTIZING, SCALED_GROUPED_MM, SCALED_MM_GATHERED, SCALED_MM_HORIZONTAL)


@dataclass(frozen=True)
class Launched:
    """A step, and the node that it is made for; for a kernel of Inductor's, a node whose result it stores."""

    node: Node
    step: Step


def steps_of(graph: Graph, gpu: Gpu) -> list[Launched]:
    """The steps of a graph. Sizes that vary count as in the captured call."""
    found = [Launched(node, step) for node in graph.nodes for step in _steps(node, gpu)]
    for kernel in pointwise.kernels(graph):
        name = "reduction" if "reduction" in map(pointwise.kind_of, kernel.stores) else "pointwise"
        step = memory_pass(name, "other", kernel.moved, gpu, kernel.launches)
        found.append(Launched(kernel.stores[0], step))
    return found


def _steps(node: Node, gpu: Gpu) -> list[Step]:
    """The steps of a node that is not Inductor's."""
    if pointwise.kind_of(node) != "other":
        return []
    if node.target in OWN_PRODUCTS:
        return _product(node, gpu)
    if node.target is QUANTIZE:
        return [_quantiser(node, gpu)]
    if node.target in KERNELS:
        name = "lay out scales" if node.target is LAY_OUT_SCALES else "dequantise"
        return [memory_pass(name, "other", _moved(node), gpu)]
    count = flops.count(node)
    if not count:
        in_place = pointwise.in_place_bytes(node)
        return [memory_pass(node.name, "other", _moved(node) if in_place is None else in_place, gpu)]
    if flops.ATTENTION.search(str(node.target)):
        part = 0.5 if _is_causal(node) else 1.0
        rate = gpu.matrix_rate(_operand_dtype(node)) * ATTENTION
        return [Step("attention", "other", part * count, _moved(node), rate, gpu.copy_rate, gpu.product_launch)]
    sizes = _grouped_sizes(node)
    if sizes is not None:
        return [plain_step("other", sizes, gpu)]
    dtype = _operand_dtype(node)
    share = gpu.fp8_share if dtype.itemsize == 1 else gpu.bf16_share
    return [Step(gemm_name(dtype), "other", count, _moved(node), gpu.matrix_rate(dtype) * share, gpu.copy_rate,
                 gpu.product_launch)]  # fmt: skip


def _operand_dtype(node: Node) -> torch.dtype:
    """The dtype of a matmul's first operand; further arguments may be sums in float32."""
    values = (each.meta.get("val") for each in node.all_input_nodes)
    return next(
        (value.dtype for value in values if isinstance(value, torch.Tensor) and value.dim() > 1), torch.bfloat16
    )


def _moved(node: Node) -> int:
    """Bytes of a node's arguments and results. A view that repeats elements counts as what it shows."""
    read = sum(min(pointwise.nbytes(each), pointwise.nbytes(pointwise.base_of(each))) for each in node.all_input_nodes)
    return read + pointwise.nbytes(node)


def _is_causal(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    return given.get("is_causal") is True


def _grouped_sizes(node: Node) -> Sizes | None:
    """The sizes of torch's grouped product; None for any other node."""
    if node.target is not aten._grouped_mm.default:
        return None
    (a, b), offs = (each.meta["val"] for each in node.args[:2]), node.args[2] if len(node.args) > 2 else None
    if offs is None:
        return Sizes(_size(a.shape[0] * a.shape[1]), _size(b.shape[2]), _size(a.shape[2]),
                     Experts(_size(a.shape[0]), "batch"))  # fmt: skip
    count = Experts(_size(offs.meta["val"].shape[0]))
    return Sizes(_size(a.shape[-2]), _size(b.shape[-1]), _size(a.shape[-1]), count, along_k=b.dim() == 2)


# ---------------------------------------------------------------- quantisers


class _Fills(TorchDispatchMode):
    """Counts the tensors of zeros that are made while it is on: in a graph, each is a kernel of Inductor's."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function in (aten.zeros.default, aten.new_zeros.default)
        return function(*args, **(kwargs or {}))


def _quantiser(node: Node, gpu: Gpu) -> Step:
    """All launches of a quantise node."""
    spec = quantise_of(node).spec
    with _compat.without_fake_tensors(), dry_run(gpu.target) as launches, _Fills() as fills:
        KERNELS[QUANTIZE](*_meta(node.args), **{name: _meta(value) for name, value in node.kwargs.items()})
    moved = sum(map(launch_bytes, launches))
    along = BOTH_WAYS if spec.both else ROWS if spec.dims == (ALONG_ROWS,) else COLUMN
    name = f"quantise {along}" + ("" if spec.prologue is None else ", fused")
    return quantiser(name, "other", spec.format, along, moved, len(launches) + fills.count, gpu,
                     static=spec.static, hadamard=spec.hadamard, stochastic=spec.seeded)  # fmt: skip


def launch_bytes(launch: Launch) -> int:
    """Bytes of the tensors that a launch reads and writes, each tensor once."""
    found: dict[int, int] = {}
    for argument in launch.arguments:
        tensor = argument.tensor if isinstance(argument, View) else argument
        if isinstance(tensor, torch.Tensor):
            elements = tensor.numel()
            if isinstance(argument, View):
                elements = min(elements, prod(argument.sizes))
            found[id(tensor)] = max(found.get(id(tensor), 0), elements * tensor.element_size())
    return sum(found.values())


def _meta(value: Any) -> Any:
    """An argument with meta tensors of known sizes in the place of nodes."""
    if isinstance(value, list | tuple):
        return type(value)(_meta(each) for each in value)
    if isinstance(value, Node):
        value = value.meta["val"]
    if isinstance(value, torch.Tensor):
        sizes, strides = (tuple(map(_size, of)) for of in (value.shape, value.stride()))
        return torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta")
    return _size(value) if isinstance(value, torch.SymInt) else value


def _size(size: Any) -> int:
    return flops.hint(size) or 0


# ---------------------------------------------------------------- products


def _product(node: Node, gpu: Gpu) -> list[Step]:
    if node.target is SCALED_MM_GATHERED:
        return _gathered(node, gpu)
    if node.target is SCALED_MM_HORIZONTAL:
        return _horizontal(node, gpu)
    product = scaled_mm_of(node)
    if product.plain:
        return [plain_step("other", _sizes(product), gpu)]
    problem = _at_captured_sizes(product.problem)
    extra = sum(pointwise.nbytes(each) for each in product.auxiliaries)
    sizes = _sizes(product)
    elements = sizes.result if node.target in _QUANTIZING else pointwise.numel(node.meta["val"])
    extra += pointwise.nbytes(node) - BF16 * elements
    steps = _by_choice(sizes, problem, (product.a.format, product.b.format), gpu, extra)
    if node.target is SCALED_MM_AMAX and product.offs is not None:
        steps.append(memory_pass("clear amaxes", "other", 4 * problem.groups, gpu))  # which the kernel then raises
    return steps


def _at_captured_sizes(problem: Problem) -> Problem:
    m, n, k = map(_size, (problem.m, problem.n, problem.k))
    return replace(problem, m=m, n=n, k=k, batches=_size(problem.batches), groups=_size(problem.groups))


def _by_choice(sizes: Sizes, problem: Problem, codes: tuple, gpu: Gpu, more: int = 0) -> list[Step]:
    choice = choose(problem)
    chosen = Chosen(choice.kernel, choice.tier, False, (problem.a.outer, problem.b.outer), tiles=tiles_of(choice, gpu))
    return product_steps("other", sizes, codes, chosen, gpu, more=more)


def _sizes(product: ScaledMM) -> Sizes:
    """The sizes of a product node."""
    values = product.values()
    a, b = _shape(values.a), _shape(values.b)
    if product.offs is not None:
        count, along_k = Experts(_size(product.offs.meta["val"].shape[0])), len(b) == 2
        columns = 2 * b[-2] if values.two_weights else b[-2]
        return Sizes(a[-2], columns, _size(values.rows) if along_k else a[-1], count, along_k=along_k)
    if len(b) > 2:
        return Sizes(prod(a[:-1]), b[-2], a[-1], Experts(prod(b[:-2]), "batch"))
    return Sizes(prod(a[:-1]), b[-2], a[-1])


def _shape(x: Operand) -> tuple[int, ...]:
    """The shape in elements, at the sizes of the captured call."""
    return *map(_size, x.data.shape[:-1]), _size(x.k)


def _operand(data: Any, scales: Any, outer: Any, name: Any) -> Operand:
    """The operand of these arguments of a node, with (fake) tensors."""
    data, scales, outer = (each.meta["val"] if isinstance(each, Node) else each for each in (data, scales, outer))
    return Operand(data, scales, outer, None if name is None else formats.get(name))


def _gathered(node: Node, gpu: Gpu) -> list[Step]:
    """Few tokens, each with a matrix of its own, which a kernel reads through the index or takes from a copy."""
    a, b = _operand(*node.args[:4]), _operand(*node.args[4:8])
    count, rows, length = _shape(a)
    sizes = Sizes(count * rows, _shape(b)[-2], length, Experts(count, "gather"))
    dtype: Any = node.args[9]
    types = operand_type(a), operand_type(b)
    if reads_by_index(node):
        problem = Problem(*types, sizes.rows, sizes.columns, length, dtype, gpu.target, ragged="rows", groups=count)
        return _by_choice(sizes, problem, (a.format, b.format), gpu)
    problem = Problem(*types, rows, sizes.columns, length, dtype, gpu.target, None, count, True)
    copied = stored(b.format, count * sizes.columns, length, b.swizzled) if b.format else 0
    return [memory_pass("copy matrices", "other", 2 * copied, gpu),
            *_by_choice(sizes, problem, (a.format, b.format), gpu)]  # fmt: skip


def _horizontal(node: Node, gpu: Gpu) -> list[Step]:
    """Products of one A in one launch: as one product of all their columns."""
    weights, scales, outers, name, _, dtype = node.args[4:]
    a = _operand(*node.args[:4])
    each = [_operand(weight, _first(scales), _first(outers), name) for weight in weights]
    problem = problem_of(Arguments(a, each[0], None, dtype), gpu.target)
    sizes = Sizes(prod(_shape(a)[:-1]), sum(_shape(b)[-2] for b in each), _shape(a)[-1])
    return _by_choice(sizes, _at_captured_sizes(problem), (a.format, each[0].format), gpu)


def _first(values: Any) -> Any:
    """The first of a list; None of an empty one."""
    return values[0] if values else None
