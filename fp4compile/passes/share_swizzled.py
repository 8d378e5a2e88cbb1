"""One launch of `swizzle_a_sm90` for products of the same A: q, k and v of packed weights, or gate and up.

Entry: `share_swizzled(graph)`, on a graph whose products have been lowered to launches.

`gemm_wgmma_sm90` starts before the kernel ahead of it has ended, and reads B meanwhile (`device.dependent_launch`).
Behind its own `swizzle_a_sm90` that is safe, because B is an argument of both. Without it another kernel may come
between that writes B. So a launch is shared only where B is an input of the graph, which no kernel of the graph writes.
"""

from collections.abc import Hashable
from typing import Any

import torch
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_functional
from torch.fx import Graph, Node

from fp4compile.analysis.graph import RESHAPES

NAME = "swizzle_a_sm90"
_OWN = ("b_ptr", "b_scales_ptr", "swizzled_a_ptr")  # arguments that the result does not depend on
_VIEWS = {*RESHAPES, torch.ops.aten.view.dtype}


def share_swizzled(graph: Graph) -> int:
    """Let launches of equal A and tiles have one result; returns how many launches have gone."""
    first: dict[Hashable, Node] = {}
    gone = 0
    for node in list(graph.find_nodes(op="call_function", target=triton_kernel_wrapper_functional)):
        if _name(node) != NAME:
            continue
        earlier = first.setdefault(_key(node), node)
        if earlier is not node and all(_is_input(node.kwargs["kwargs"][name]) for name in _OWN[:2]):
            _replace(node, earlier)
            gone += 1
    return gone


def _name(node: Node) -> str:
    kernel = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
    return getattr(getattr(kernel, "fn", kernel), "__name__", "")


def _key(node: Node) -> Hashable:
    """What the result depends on: sizes and constants, and the tensors by what they are views of."""
    arguments = node.kwargs["kwargs"]
    result = arguments["swizzled_a_ptr"]
    seen = [(name, _seen("result" if value is result else value)) for name, value in sorted(arguments.items())
            if name not in _OWN]  # fmt: skip
    constants = kernel_side_table.get_constant_args(node.kwargs["constant_args_idx"])
    return str(node.kwargs["grid"]), str(sorted(constants.items())), tuple(seen)


def _seen(value: Any) -> Hashable:
    tensor = value.meta["val"] if isinstance(value, Node) else None
    if not isinstance(tensor, torch.Tensor):
        return value if isinstance(value, Node) else str(value)
    return _source(value), str((tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()))


def _source(node: Node) -> Node:
    """The node that a node is a view of."""
    while node.target in _VIEWS:
        node = node.all_input_nodes[0]
    return node


def _is_input(node: Node) -> bool:
    return _source(node).op in ("placeholder", "get_attr")


def _replace(node: Node, earlier: Node) -> None:
    """Let the readers of a launch's result read the result of an earlier one."""
    (kept,) = earlier.users
    for result in list(node.users):
        result.replace_all_uses_with(kept)
        node.graph.erase_node(result)
    node.graph.erase_node(node)
