"""The steps of a whole graph: its launches on a GPU after all passes, each once.

Entry: `steps_of(graph, gpu)`, of tensors on the GPU, or inside `templates.launch.dry_run` of it. A matmul of this
package counts as the kernel that `choose` names, a quantiser as its launches (`templates.quantize`), Inductor's kernels
by their bytes (`roofline.inductor_kernels`), and attention and torch's matmuls by their FLOPs and bytes.
"""

from math import prod
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Graph, Node
from torch.utils._python_dispatch import TorchDispatchMode

from fp4compile.analysis import flops
from fp4compile.analysis.node_kinds import kind_of, moved_bytes
from fp4compile.formats.grouping import Grouping
from fp4compile.hardware import Gpu
from fp4compile.ops.define import KERNELS
from fp4compile.ops.nodes import PRODUCTS, quantise_of
from fp4compile.ops.quantize import LAY_OUT_SCALES, QUANTIZE
from fp4compile.roofline import inductor_kernels
from fp4compile.roofline.matmul_steps import Sizes, gemm_name, matmul_steps, memory_pass, plain_step, size
from fp4compile.roofline.time_terms import ATTENTION, TimedStep, quantiser
from fp4compile.templates.launch import Launch, dry_run
from fp4compile.templates.view import View

aten = torch.ops.aten


def steps_of(graph: Graph, gpu: Gpu) -> list[tuple[Node, TimedStep]]:
    """The steps of a graph with their nodes; for a kernel of Inductor, a node whose result the kernel stores.

    Sizes that vary count as in the captured call.
    """
    found = [(node, step) for node in graph.nodes if kind_of(node) == "other" for step in _steps(node, gpu)]
    for kernel in inductor_kernels.kernels(graph):
        name = "reduction" if "reduction" in map(kind_of, kernel.stores) else "pointwise"
        found.append((kernel.stores[0], memory_pass(name, kernel.moved, gpu, kernel.launches)))
    return found


def _steps(node: Node, gpu: Gpu) -> list[TimedStep]:
    """The steps of a node that Inductor does not compute."""
    if node.target in PRODUCTS:
        return matmul_steps(node, gpu)
    if node.target is QUANTIZE:
        return [_quantiser(node, gpu)]
    if node.target in KERNELS:
        name = "lay out scales" if node.target is LAY_OUT_SCALES else "dequantise"
        return [memory_pass(name, moved_bytes(node), gpu)]
    count: Any = flops.count(node)
    if not count:
        return [memory_pass(node.name, moved_bytes(node), gpu)]
    if node.target is aten._grouped_mm.default:
        return [plain_step(_grouped_sizes(node), gpu)]
    dtype = _operand_dtype(node)
    name, share = gemm_name(dtype), gpu.fp8_share if dtype.itemsize == 1 else gpu.bf16_share
    if flops.ATTENTION.search(str(node.target)):
        name, share, count = "attention", ATTENTION, count * (0.5 if _is_causal(node) else 1.0)
    rate = gpu.matrix_rate(dtype) * share
    return [TimedStep(name, count, moved_bytes(node), rate, gpu.copy_rate, gpu.product_launch)]


def _operand_dtype(node: Node) -> torch.dtype:
    """The dtype of a matmul's first operand; further arguments may be sums in float32."""
    values = (each.meta.get("val") for each in node.all_input_nodes)
    return next(
        (value.dtype for value in values if isinstance(value, torch.Tensor) and value.dim() > 1), torch.bfloat16
    )


def _is_causal(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    return given.get("is_causal") is True


def _grouped_sizes(node: Node) -> Sizes:
    """The sizes of torch's grouped matmul."""
    (a, b), offs = (each.meta["val"] for each in node.args[:2]), node.args[2] if len(node.args) > 2 else None
    rows, columns, contraction = size(a.shape[-2]), size(b.shape[-1]), size(a.shape[-1])
    if offs is None:
        count = size(a.shape[0])
        return Sizes(count * rows, columns, contraction, Grouping.BATCHED, count)
    grouping = Grouping.RAGGED_CONTRACTION if b.dim() == 2 else Grouping.RAGGED_ROWS
    return Sizes(rows, columns, contraction, grouping, size(offs.meta["val"].shape[0]))


# ---------------------------------------------------------------- quantisers


class _Fills(TorchDispatchMode):
    """Counts tensors of zeros that are created while it is active: in a graph, each is a kernel of Inductor."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function in (aten.zeros.default, aten.new_zeros.default)
        return function(*args, **(kwargs or {}))


def _quantiser(node: Node, gpu: Gpu) -> TimedStep:
    """All launches of a quantise node."""
    spec = quantise_of(node).spec
    with unset_fake_temporarily(), dry_run(gpu.target) as launches, _Fills() as fills:
        KERNELS[QUANTIZE](*_meta(node.args), **{name: _meta(value) for name, value in node.kwargs.items()})
    moved = sum(map(launch_bytes, launches))
    return quantiser(spec, moved, len(launches) + fills.count, gpu)


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
    """An argument with meta tensors of known sizes in place of nodes."""
    if isinstance(value, list | tuple):
        return type(value)(_meta(each) for each in value)
    if isinstance(value, Node):
        value = value.meta["val"]
    if isinstance(value, torch.Tensor):
        sizes, strides = (tuple(map(size, of)) for of in (value.shape, value.stride()))
        return torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta")
    return size(value) if isinstance(value, torch.SymInt) else value
