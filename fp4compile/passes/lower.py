"""Lower the ops of a post-grad graph to kernel launches where there is a GPU.

Each op node becomes the allocations and Triton launches of its CUDA implementation. The implementation is traced under
functionalisation into nodes that Inductor emits straight into the generated wrapper. Without functionalisation a launch
would be a mutation whose node has no user, and it would be dropped as dead code. On other devices the op stays and
calls the reference.

Nodes of one signature share one trace, which is copied (`lib.traces`).

torch infers from a kernel's intermediate code which arguments the kernel writes, and includes too many: an operand
counts as written if an address is computed from its elements. Inductor would copy the operand, and take results from
tensors that the kernel does not write. If torch counts other memory than a launch's own as written, the op stays, with
a warning.

A matmul stays an op, too, if its `Choice` is not traceable. No single kernel serves a symbolic number of rows that may
be small or large: the op chooses at run time. Two guarded launches would cost more on the GPU than the op. A matmul
that is computed in many parts would fill the graph with launches. A matmul that first gathers experts' matrices by
index stays as well: it gathers codes and block scales, and Inductor has no code for the scales.

Operands that a kernel reads swizzled are arranged first, once for all matmuls (`arranged_operands`).
"""

import warnings
from collections.abc import Callable

import torch
import triton
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_functional
from torch._inductor.pattern_matcher import CallFunctionVarArgs, Match
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from fp4compile import _inductor_patches
from fp4compile.ops.define import KERNELS
from fp4compile.ops.nodes import is_product, scaled_mm_of
from fp4compile.passes.lib.arranged_operands import Arranged, arranged_operands
from fp4compile.passes.lib.autotune import fastest
from fp4compile.passes.lib.traces import Traces, signature
from fp4compile.templates.launch import on_gpu


def lower(graph: Graph) -> int:
    """Replace every op on CUDA tensors by its kernels; returns how many."""
    _inductor_patches.declare_writes()
    _inductor_patches.launch_as_dependents()
    _inductor_patches.define_kernels_once()
    _inductor_patches.decompose_launches_directly()
    _inductor_patches.compare_sparse_values()
    lowered = 0
    traces = Traces()
    arranged = arranged_operands(graph, traces)
    # A PatternMatcherPass would skip nodes with E8M0 tensors, for which Inductor has no code of its own.
    patterns = {op: CallFunctionVarArgs(op) for op in KERNELS}
    for node in [node for node in graph.nodes if node.op == "call_function" and node.target in KERNELS]:
        if on_gpu(node.all_input_nodes[0].meta["val"]):
            match = patterns[node.target].match(node)
            lowered += _replace(match, KERNELS[node.target], arranged.get(node), traces)
    return lowered


def _replace(match: Match, implementation: Callable, arranged: Arranged | None, traces: Traces) -> bool:
    """Replace a node by the graph of its implementation, traced with the node's strings and numbers as constants.

    arranged: the arranged A that a matmul reads. traces: those made in this graph. Returns whether the node was
    replaced.
    """
    node, options = match.output_node(), {}
    product = scaled_mm_of(node) if is_product(node) else None
    if product is not None and product.index is not None:
        if not product.reads_by_index:
            return False
    elif product is not None:
        choice = fastest(product)
        if choice is not None and not choice.traceable:
            return False
        options = {"choice": choice}
    given = {} if arranged is None else {"arranged_a": arranged.node}
    flat, spec = pytree.tree_flatten((match.args, match.kwargs | given))
    places = [i for i, value in enumerate(flat) if isinstance(value, Node)]
    unread = node.args[0] if arranged is not None and arranged.replaces_a else None
    for place in places:
        # Kernels read views of their inputs. Inductor would recompute every view of a tensor that is not materialised,
        # after allocating the kernel's outputs; so the tensor is materialised here.
        if flat[place] is not unread:
            flat[place].meta["inductor_realize_to_strides"] = True

    def launches(*nodes):
        values = list(flat)
        for place, value in zip(places, nodes, strict=True):
            values[place] = value
        call_args, call_kwargs = pytree.tree_unflatten(values, spec)
        return implementation(*call_args, **call_kwargs, **options)

    key = (node.target, spec, str(options.get("choice")), *signature(flat))

    def trace(function: Callable, values: list) -> GraphModule:
        traced = traces.of(key, function, values)
        check_writes(traced)
        return traced

    try:
        match.replace_by_example(torch.func.functionalize(launches), [flat[i] for i in places], trace_fn=trace)
    except InputWrittenError as error:
        warnings.warn(f"{node.target} is computed by an op outside of Inductor's code: {error}", stacklevel=2)
        return False
    return True


class InputWrittenError(Exception):
    """Raised if torch counts an input of an implementation as written."""


def check_writes(trace: GraphModule) -> None:
    """Raise InputWrittenError where torch counts an input of a traced implementation, or a view of one, as written."""
    for node in trace.graph.find_nodes(op="call_function", target=triton_kernel_wrapper_functional):
        for name in node.kwargs["tensors_to_clone"]:
            if _viewed(node.kwargs["kwargs"][name]).op == "placeholder":
                kernel = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
                function = kernel.fn if isinstance(kernel, triton.runtime.Autotuner) else kernel
                raise InputWrittenError(f"torch counts {name} of {function.__name__} as written")


def _viewed(node: Node) -> Node:
    """The node that a node views, through all views; the node itself if it is not a view."""
    while isinstance(node.target, OpOverload) and node.target.is_view:
        node = node.args[0]
    return node
