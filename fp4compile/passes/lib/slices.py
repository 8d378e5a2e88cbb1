"""Slices of a tensor's columns, from `chunk`, `split` and slicing: gate and up of one matmul, for example.

A kernel reads such a slice in place, if the tensor is materialised.
"""

import operator
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from fp4compile._compat import statically_true
from fp4compile.ops.nodes import RESHAPES, new_node
from fp4compile.passes.lib.operations import contiguous, same_shape

aten = torch.ops.aten
_SPLITS = (aten.split.Tensor, aten.split_with_sizes.default)


@dataclass(frozen=True)
class Slice:
    """Columns `start` to `stop` of a contiguous tensor. source: its node, behind reshapes that keep the columns."""

    source: Node
    start: int
    stop: int


def slice_of(node: Node) -> Slice | None:
    """The slice of a tensor's columns that a node is; None if it is not one."""
    cut = _cut(node)
    if cut is None:
        return None
    source, start, stop = cut
    while source.target in RESHAPES and _keeps_columns(source):
        source = source.args[0]
    outer = slice_of(source)
    if outer is not None:
        return Slice(outer.source, outer.start + start, outer.start + stop)
    return Slice(source, start, stop) if contiguous(source.meta["val"]) else None


def memory_of(node: Node) -> Node:
    """The node whose memory a reader of `node` reads."""
    found = slice_of(node)
    return node if found is None else found.source


def cuts_columns(node: Node) -> bool:
    """Whether a node is a slice of columns, or a split whose results are."""
    return _cut(node) is not None or (node.target in _SPLITS and any(map(_cut, node.users)))


def in_shape(graph: Graph, node: Node, like: torch.Tensor, shape: list | None, slices: bool) -> Node:
    """A node reshaped to the shape of `like`.

    shape: this shape as an argument of a reshape; None leaves the node as it is. slices: reshape only slices. A slice
    is cut from the reshaped tensor, because the slice itself may have no such view.
    """
    found = slice_of(node)
    if shape is None or (slices and found is None) or same_shape(node.meta["val"].shape, like.shape):
        return node
    if found is None:
        return new_node(graph, aten.reshape.default, (node, shape), node.meta)
    whole, width = found.source, found.source.meta["val"].shape[-1]
    if not same_shape(whole.meta["val"].shape, (*like.shape[:-1], width)):
        whole = new_node(graph, aten.reshape.default, (whole, [*shape[:-1], width]), whole.meta)
    return new_node(graph, aten.slice.Tensor, (whole, like.dim() - 1, found.start, found.stop), node.meta)


def erase_unread(node: Node) -> None:
    """Erase an unread slice, and the slices, splits and reshapes that only this slice has read."""
    while not node.users and node.op == "call_function":
        if not (cuts_columns(node) or node.target in _SPLITS or node.target in RESHAPES):
            break
        source = node.args[0]
        node.graph.erase_node(node)
        node = source


def _keeps_columns(node: Node) -> bool:
    before, after = (each.meta["val"].shape for each in (node.args[0], node))
    return bool(len(before) and len(after)) and statically_true(before[-1] == after[-1])


def _cut(node: Node) -> tuple[Node, int, int] | None:
    """(tensor, first column, column behind the last one) of a slice of neighbouring columns with known numbers."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not value.dim() or node.kwargs:
        return None
    if node.target is aten.slice.Tensor:
        source, dim, start, _, step = (*node.args, *(0, None, None, 1)[len(node.args) - 1 :])
    elif node.target is operator.getitem and node.args[0].target in _SPLITS:
        source, sizes, dim = (*node.args[0].args, 0)[:3]
        before = sizes[: node.args[1]] if isinstance(sizes, list | tuple) else [sizes] * node.args[1]
        start, step = sum(before) if all(isinstance(size, int) for size in before) else node, 1
    else:
        return None
    width, columns = source.meta["val"].shape[-1], value.shape[-1]
    known = all(isinstance(number, int) for number in (0 if start is None else start, width, columns))
    if not known or dim not in (-1, value.dim() - 1) or step != 1:
        return None
    first, _, _ = slice(start, None).indices(width)
    return source, first, first + columns
