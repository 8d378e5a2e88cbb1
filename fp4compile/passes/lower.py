"""Lower the ops of a post-grad graph to kernel launches where there is a GPU.

Each op node becomes what its CUDA implementation does: allocations and Triton launches, traced under functionalisation
into nodes that Inductor emits straight into the generated wrapper. Without functionalisation a launch would be a
mutation whose node nobody uses, and be dropped as dead code. On other devices the op stays: a call of the reference.

A product stays an op, too, where the number of A's rows is symbolic and may be small or large: no one kernel serves
both, and the op chooses by the number that comes; two guarded launches would cost more on the GPU than the op. And
where it is computed part by part, for the sake of memory.
"""

from collections.abc import Callable

import torch
from torch._inductor.pattern_matcher import CallFunctionVarArgs, Match
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from fp4compile import _inductor_patches, ops
from fp4compile.passes.autotune import fastest

_KERNELS: dict[torch._ops.OpOverload, Callable] = {
    torch.ops.fp4compile.quantize.default: ops.quantize_cuda,
    torch.ops.fp4compile.quantize_both.default: ops.quantize_both_cuda,
    torch.ops.fp4compile.fake_quantize.default: ops.fake_quantize_cuda,
    torch.ops.fp4compile.dequantize.default: ops.dequantize_cuda,
    torch.ops.fp4compile.scaled_mm.default: ops.scaled_mm_cuda,
    torch.ops.fp4compile.scaled_mm_epilogue.default: ops.scaled_mm_epilogue_cuda,
    torch.ops.fp4compile.scaled_mm_horizontal.default: ops.scaled_mm_horizontal_cuda,
}


def lower(graph: Graph) -> int:
    """Replace every op on CUDA tensors by its kernels; returns how many."""
    _inductor_patches.share_kernel_analysis("fp4compile")
    _inductor_patches.launch_as_dependents("fp4compile")
    lowered = 0
    for op, implementation in _KERNELS.items():
        # A PatternMatcherPass would pass over nodes with E8M0 tensors, for which Inductor has no code of its own.
        pattern = CallFunctionVarArgs(op)
        for node in graph.find_nodes(op="call_function", target=op):
            if node.args[0].meta["val"].device.type == "cuda":
                lowered += _replace(pattern.match(node), implementation)
    return lowered


def _replace(match: Match, implementation: Callable) -> bool:
    """Trace the implementation on the node's tensors and sizes; strings and numbers are fixed in it.

    Returns whether the node was replaced: not where the choice among kernels is better made when the graph runs.
    """
    from fp4compile.templates.gemm.dispatch import ChosenWhenRun, preferring  # here, so that the CPU needs no Triton

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
        return implementation(*call_args, **call_kwargs)

    node = match.output_node()
    contender = fastest(node) if node.target is torch.ops.fp4compile.scaled_mm.default else "library"
    try:
        with preferring(contender):
            match.replace_by_example(torch.func.functionalize(launches), [flat[i] for i in places])
    except ChosenWhenRun:
        return False
    return True
