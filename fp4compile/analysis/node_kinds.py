"""Kinds of nodes in Inductor (a view, a part of a kernel, a call), and the bytes of a node's tensors."""

import math
import operator

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from fp4compile.analysis import flops
from fp4compile.ops.nodes import is_pointwise, reached

aten = torch.ops.aten
INDUCTORS = ("fused", "reduction")  # the kinds of nodes that are parts of Inductor's own kernels

_REDUCTIONS = {
    "sum", "mean", "amax", "amin", "var", "var_mean", "any", "all", "argmax", "argmin", "prod", "max", "min",
    "logsumexp", "_softmax", "_log_softmax",
}  # fmt: skip
# Operators that Inductor fuses with their neighbours, and that torch does not tag as pointwise.
_FUSED = {
    "convert_element_type", "_to_copy", "clone", "copy", "copy_", "where", "cat", "embedding", "index", "gather",
    "index_select", "constant_pad_nd", "slice_scatter", "select_scatter", "full", "full_like", "iota", "scalar_tensor",
    "arange", "flip", "tril", "triu", "inductor_random", "_fused_rms_norm", "native_layer_norm",
}  # fmt: skip
_WRITING_IN_PLACE = {"index_put", "index_put_", "scatter", "index_copy"}
_FREE = {"empty", "empty_strided", "new_empty", "sym_size", "sym_stride", "sym_numel", "sym_storage_offset"}


def kind_of(node: Node) -> str:
    """The kind of a node in Inductor: "view", "fused", "reduction", "memory" (nothing runs), or "other"."""
    if node.op != "call_function":
        return "memory"
    name = name_of(node)
    if name in _FREE or not tensors_of(node):
        return "memory"
    if node.target is operator.getitem:  # results of an operator that is not Inductor's are tensors of their own
        return "memory" if kind_of(node.args[0]) == "other" else "view"
    if getattr(node.target, "is_view", False) or name in ("_unsafe_view", "reshape"):
        return "view"
    if name == "clone" and _same_layout(node):
        return "view"
    if name == "copy_" and name_of(base_of(node.args[1])) in _WRITING_IN_PLACE:
        return "memory"  # the copied result was written in place
    if name in _REDUCTIONS:
        return "reduction"
    if name in _FUSED or is_pointwise(node):
        return "fused"
    return "other"


def name_of(node: Node) -> str:
    """The name of a node's operator without namespace and overload."""
    packet = getattr(node.target, "overloadpacket", node.target)
    return getattr(packet, "__name__", str(packet))


def base_of(node: Node) -> Node:
    """The node whose memory a view reads; the node itself if it is not a view."""
    while kind_of(node) == "view":
        node = node.args[0]
    return node


def readers(node: Node) -> list[Node]:
    """The nodes that read a node's value, through views too."""
    views = list(reached(node, lambda each: [user for user in each.users if kind_of(user) == "view"]))
    return [user for view in views for user in view.users if kind_of(user) != "view"]


def tensors_of(node: Node) -> list[torch.Tensor]:
    """The fake tensors that a node returns."""
    leaves = pytree.tree_leaves(node.meta.get("val"))
    return [value for value in leaves if isinstance(value, torch.Tensor)]


def numel(value: torch.Tensor) -> int:
    """Elements of a tensor in the captured call; 0 where a size depends on the data."""
    return math.prod(flops.hint(size) or 0 for size in value.shape)


def nbytes(node: Node) -> int:
    """Bytes of a node's tensors, of all of them if it has several; unknown sizes count as nothing."""
    return sum(numel(value) * value.element_size() for value in tensors_of(node))


def moved_bytes(node: Node) -> int:
    """Bytes that an operator of kind "other" reads and writes.

    A view that repeats elements counts with the repeated elements. An operator that writes a few elements of its first
    argument is counted by its other arguments alone.
    """
    if name_of(node) in _WRITING_IN_PLACE:
        return 2 * sum(nbytes(each) for each in node.all_input_nodes[1:])
    return nbytes(node) + sum(min(nbytes(each), nbytes(base_of(each))) for each in node.all_input_nodes)


def _same_layout(node: Node) -> bool:
    source, value = node.args[0].meta.get("val"), node.meta["val"]
    if not isinstance(source, torch.Tensor):
        return False
    return tuple(map(str, source.stride())) == tuple(map(str, value.stride())) and source.dtype == value.dtype
