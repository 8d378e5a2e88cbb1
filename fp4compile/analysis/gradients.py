"""Find the gradients in a graph, and the inputs that they belong to, by AOTAutograd's descriptors in `meta["desc"]`.

A node is a part of a gradient if only moves, casts, additions and reductions over the ranks lie between its elements
and the output.
"""

from typing import Any

import torch
from torch._dynamo import compiled_autograd
from torch.fx import Graph, Node

from fp4compile.analysis.gathers import REDUCE_SCATTER, WAIT
from fp4compile.analysis.views import source_of
from fp4compile.ops.nodes import reached

aten = torch.ops.aten

# The operators, besides views and casts, that combine contributions to one gradient. The gradient of a slice, a chunk
# or a broadcast parameter is padded, concatenated or summed.
_GATHERS = {
    aten.add.Tensor, aten.cat.default, aten.sum.dim_IntList, aten.slice_scatter.default, aten.select_scatter.default,
    aten.constant_pad_nd.default, aten.as_strided_scatter.default, aten.slice_backward.default,
    aten.select_backward.default,
}  # fmt: skip
# The functions by which Dynamo takes a gradient inside of a graph: torch.func's, and `torch.autograd.grad`, which it
# captures where `torch._dynamo.config.trace_autograd_ops` is set.
_INNER_BACKWARD = frozenset({"_autograd_grad", "grad"})


def input_index(placeholder: Node) -> int | None:
    """Position among the compiled function's arguments, from AOTAutograd's input descriptor."""
    return _index(placeholder.meta.get("desc"))


def _index(desc: object) -> int | None:
    found = _with(desc, "idx")
    return None if found is None or "Tangent" in type(found).__name__ else found.idx


def _with(desc: Any, attribute: str) -> Any:
    """The outermost of a descriptor and its bases that has an attribute; None where none has it."""
    while desc is not None and not hasattr(desc, attribute):
        desc = getattr(desc, "base", None)
    return desc


def is_nested(graph: Graph) -> bool:
    """Whether a graph is the body of a region, such as a branch of `torch.cond`: its inputs have no descriptor."""
    placeholders = graph.find_nodes(op="placeholder")
    return bool(placeholders) and all(node.meta.get("desc") is None for node in placeholders)


def tangent_dependent(graph: Graph) -> set[Node]:
    """The nodes that depend on a tangent."""
    found: set[Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            desc = node.meta.get("desc")
            while getattr(desc, "base", None) is not None:
                desc = desc.base
            if "Tangent" in type(desc).__name__ or node.name.startswith("tangents"):
                found.add(node)
        elif any(arg in found for arg in node.all_input_nodes):
            found.add(node)
    return found


def in_training_step(graph: Graph) -> bool:
    """Whether a graph is a joint or backward graph, or a forward graph that saves values for the backward pass.

    So are all graphs that are compiled while compiled autograd runs: they have a backward pass without tangents.
    """
    if compiled_autograd.in_compiled_autograd_region:
        return True
    described = torch.utils._pytree.tree_leaves(graph.output_node().meta.get("desc"))
    return bool(tangent_dependent(graph)) or any("SavedForBackward" in type(each).__name__ for each in described)


def is_inner_gradient(node: Node) -> bool:
    """Whether a node was traced inside of `torch.func.grad` or a similar function: that call is in `from_node`."""
    waiting = list(node.meta.get("from_node") or ())
    while waiting:
        source = waiting.pop()
        # The target is kept as text: "<function grad at 0x...>".
        if not _INNER_BACKWARD.isdisjoint(str(getattr(source.node_info, "target", "")).split()):
            return True
        waiting.extend(source.from_node)
    return False


def parts_of_gradients(graph: Graph) -> dict[Node, set[int]]:
    """The positions of the inputs whose gradients each node is a part of, for nodes that are a part of any."""
    output = graph.output_node()
    values = torch.utils._pytree.tree_leaves(output.args, is_leaf=lambda leaf: leaf is None)
    descriptors = torch.utils._pytree.tree_leaves(
        output.meta.get("desc"), is_leaf=lambda leaf: not isinstance(leaf, list | tuple)
    )
    parts: dict[Node, set[int]] = {}
    if len(values) != len(descriptors):
        return parts
    for value, desc in zip(values, descriptors, strict=True):
        gradient = _with(desc, "grad_of")
        index = None if gradient is None else _index(gradient.grad_of)
        if isinstance(value, Node) and index is not None:
            for part in reached(value, _put_together_from):
                parts.setdefault(part, set()).add(index)
    return parts


def _put_together_from(node: Node) -> list[Node]:
    """The nodes whose elements a node moves, casts, adds or concatenates; none for any other node."""
    source = source_of(node)
    if source is not None:
        return [source]
    if str(node.target) == WAIT:
        return _put_together_from(node.args[0])
    if str(node.target) == REDUCE_SCATTER:
        return node.args[:1]
    if node.target not in _GATHERS or node.kwargs.get("alpha", 1) != 1:
        return []
    if node.target is aten.constant_pad_nd.default and len(node.args) > 2 and node.args[2] != 0:
        return []
    return node.all_input_nodes
