"""Lower the ops of a post-grad graph to kernel launches where there is a GPU.

Each op node becomes what its CUDA implementation does: allocations and Triton launches. The implementation is traced
under functionalisation into nodes that Inductor emits straight into the generated wrapper. Without functionalisation a
launch would be a mutation whose node has no user, and it would be dropped as dead code. On other devices the op stays,
which is a call of the reference.

A model has hundreds of such nodes, and few that differ. Nodes of one signature share one trace, which is copied.

A product stays an op, too, where its `Choice` is not settled or not traceable. No one kernel serves a symbolic number
of rows that may be small or large: the op chooses by the number that comes. Two guarded launches would cost more on the
GPU than the op. A product that is computed part by part would fill the graph with launches. One that takes experts'
matrices by index stays as well where it gathers them first: these are bytes, and Inductor has no code for block scales.
"""

from collections.abc import Callable, Hashable

import torch
from torch._inductor.pattern_matcher import CallFunctionVarArgs, Match, fwd_only
from torch.fx import Graph, GraphModule, Node
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils import _pytree as pytree

from fp4compile import _inductor_patches
from fp4compile.analysis.graph import (
    FAKE_QUANTIZE,
    FAKE_QUANTIZE_GROUPED,
    FAKE_QUANTIZE_GROUPED_BOTH,
    QUANTIZE,
    QUANTIZE_BOTH,
    QUANTIZE_GROUPED,
    QUANTIZE_GROUPED_BOTH,
    QUANTIZE_GROUPED_PROLOGUE,
    QUANTIZE_PROLOGUE,
    SCALED_GROUPED_MM,
    SCALED_MM,
    SCALED_MM_EPILOGUE,
    SCALED_MM_GATHERED,
    SCALED_MM_HORIZONTAL,
    grouped_problem,
    reads_by_index,
    scaled_mm_of,
)
from fp4compile.ops import dense as ops
from fp4compile.ops import grouped as ops_grouped
from fp4compile.ops import grouped_prologue as ops_grouped_prologue
from fp4compile.ops import prologue as ops_prologue
from fp4compile.passes.autotune import fastest, fastest_grouped
from fp4compile.templates.grouped.choose import settled
from fp4compile.templates.launch import on_gpu

_KERNELS: dict[torch._ops.OpOverload, Callable] = {
    QUANTIZE: ops.quantize_cuda,
    QUANTIZE_BOTH: ops.quantize_both_cuda,
    FAKE_QUANTIZE: ops.fake_quantize_cuda,
    QUANTIZE_PROLOGUE: ops_prologue.quantize_prologue_cuda,
    torch.ops.fp4compile.dequantize.default: ops.dequantize_cuda,
    SCALED_MM: ops.scaled_mm_cuda,
    SCALED_MM_EPILOGUE: ops.scaled_mm_epilogue_cuda,
    SCALED_MM_HORIZONTAL: ops.scaled_mm_horizontal_cuda,
    QUANTIZE_GROUPED: ops_grouped.quantize_grouped_cuda,
    QUANTIZE_GROUPED_BOTH: ops_grouped.quantize_grouped_both_cuda,
    QUANTIZE_GROUPED_PROLOGUE: ops_grouped_prologue.quantize_grouped_prologue_cuda,
    FAKE_QUANTIZE_GROUPED: ops_grouped.fake_quantize_grouped_cuda,
    FAKE_QUANTIZE_GROUPED_BOTH: ops_grouped.fake_quantize_grouped_both_cuda,
    SCALED_GROUPED_MM: ops_grouped.scaled_grouped_mm_cuda,
    SCALED_MM_GATHERED: ops_grouped.scaled_mm_gathered_cuda,
}


def lower(graph: Graph) -> int:
    """Replace every op on CUDA tensors by its kernels; returns how many."""
    _inductor_patches.share_kernel_analysis("fp4compile")
    _inductor_patches.launch_as_dependents("fp4compile")
    _inductor_patches.decompose_launches_directly("fp4compile")
    lowered = 0
    traces: dict[Hashable, GraphModule] = {}
    for op, implementation in _KERNELS.items():
        # A PatternMatcherPass would pass over nodes with E8M0 tensors, for which Inductor has no code of its own.
        pattern = CallFunctionVarArgs(op)
        for node in graph.find_nodes(op="call_function", target=op):
            if on_gpu(node.all_input_nodes[0].meta["val"]):
                lowered += _replace(pattern.match(node), implementation, traces)
    return lowered


def _replace(match: Match, implementation: Callable, traces: dict[Hashable, GraphModule]) -> bool:
    """Replace a node by the trace of its implementation; strings and numbers are fixed in it.

    traces: what was traced in this graph, by signature. Returns whether the node was replaced.
    """
    node, options = match.output_node(), {}
    if node.target in (SCALED_MM, SCALED_MM_EPILOGUE):
        choice = fastest(scaled_mm_of(node))
        if choice is not None and not (choice.settled and choice.traceable):
            return False
        options = {"choice": choice}
    if node.target is SCALED_GROUPED_MM:
        if not settled(grouped_problem(node)):
            return False
        options = {"choice": fastest_grouped(node)}
    if node.target is SCALED_MM_GATHERED and not reads_by_index(node):
        return False
    flat, spec = pytree.tree_flatten((match.args, match.kwargs))
    places = [i for i, value in enumerate(flat) if isinstance(value, Node)]
    for place in places:
        # Kernels read views of their inputs. Of a tensor that is not in memory yet Inductor would compute every view
        # anew, and allocate the kernel's outputs before it; so it is put into memory here.
        flat[place].meta["inductor_realize_to_strides"] = True

    def launches(*nodes):
        values = list(flat)
        for place, value in zip(places, nodes, strict=True):
            values[place] = value
        call_args, call_kwargs = pytree.tree_unflatten(values, spec)
        return implementation(*call_args, **call_kwargs, **options)

    key = (node.target, spec, str(options.get("choice")), *_signature(flat))

    def trace(function: Callable, values: list) -> GraphModule:
        if key not in traces:
            traces[key] = fwd_only(function, values)
        else:  # every copy has tensors of its own: two nodes whose values share memory would count as aliases
            FakeTensorProp(traces[key], mode=_fake_mode(values)).propagate_dont_convert_inputs(*values)
        return traces[key]

    match.replace_by_example(torch.func.functionalize(launches), [flat[i] for i in places], trace_fn=trace)
    return True


def _signature(flat: list) -> tuple:
    """Equal for nodes whose traces are equal: what they read looks alike, and is the same tensor in the same places."""
    first: dict[Node, int] = {}
    return tuple((first.setdefault(value, i), *_seen(value.meta["val"])) if isinstance(value, Node) else value
                 for i, value in enumerate(flat))  # fmt: skip


def _seen(value: torch.Tensor | torch.SymInt) -> tuple:
    """What an implementation can ask of an argument while it is traced. Symbolic numbers count by their expressions."""
    if not isinstance(value, torch.Tensor):
        return (str(value),)
    numbers = (*value.shape, *value.stride(), value.storage_offset())
    return value.device, value.dtype, value.dim(), tuple(map(str, numbers))


def _fake_mode(values: list):
    return next(value.fake_mode for value in values if isinstance(value, torch.Tensor))
