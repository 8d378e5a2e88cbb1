"""Resolve views: the tensor whose elements a node has, their order, and the casts on the way.

A chain of views, slices, expansions and copies is one strided map into the elements of its root, numbered as if that
were contiguous. Nodes with the same root, casts and map have the same value; equal shapes prove nothing. A reshape that
no strides express is a root itself. Symbolic sizes are equal only where that is statically true, without guards.
"""

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from fp4compile import _compat

aten = torch.ops.aten
prims = torch.ops.prims

Size = int | torch.SymInt


@dataclass(frozen=True, eq=False)
class NodeView:
    """Elements of `root`: element (i, j, ...) is the root's element offset + i * stride[0] + j * stride[1] + ...

    casts: the dtypes that elements are cast to on the way from the root, without casts that change no value. A stride
    of 0 repeats one element.
    """

    root: Node
    casts: tuple[torch.dtype, ...]
    size: tuple[Size, ...]
    stride: tuple[Size, ...]
    offset: Size = 0

    @property
    def elements(self) -> tuple:
        """A key of the sequence of elements, independent of the shape."""
        runs = tuple((_text(size), _text(stride)) for size, stride in _runs(self.size, self.stride))
        return (_root_key(self.root), self.casts, runs, _text(self.offset))

    @property
    def key(self) -> tuple:
        """A key of the elements and the shape."""
        return (*self.elements, tuple(map(_text, self.size)))

    @property
    def repeats(self) -> bool:
        """Whether an element may occur more than once, along a dimension of stride 0."""
        return any(_equal(step, 0) and not _equal(size, 1) for size, step in zip(self.size, self.stride, strict=True))

    def swapped(self) -> "NodeView":
        """This view with its last two dimensions swapped."""
        return self._permuted([*range(len(self.size) - 2), -1, -2])

    def matrix(self) -> "NodeView | None":
        """The matrix that repeats along the leading dimensions; None if these have, or may have, different matrices."""
        lead = zip(self.size[:-2], self.stride[:-2], strict=True)
        if len(self.size) < 2 or not all(_equal(size, 1) or _equal(stride, 0) for size, stride in lead):
            return None
        return replace(self, size=self.size[-2:], stride=self.stride[-2:])

    def _permuted(self, dims: Sequence[int]) -> "NodeView":
        return replace(self, size=tuple(self.size[d] for d in dims), stride=tuple(self.stride[d] for d in dims))


def view_of(node: Node) -> NodeView:
    """A node as a view of its root; a node that is neither a view nor a cast is its own root."""
    step = _STEPS.get(node.target) if node.op == "call_function" else None
    found = None if step is None or not _plain(node) else step(node)
    return _whole(node) if found is None else found


def value_key(node: Node | None) -> tuple | None:
    """A key that is equal only for nodes of the same value, shape and dtype, such as several views of one input."""
    if node is None:
        return None
    return (*view_of(node).key, node.meta["val"].dtype) if _plain(node) else _root_key(node)


def source_of(node: Node) -> Node | None:
    """The node whose elements a view or a cast reads; None if the node is neither."""
    if node.op != "call_function" or node.target not in _STEPS:
        return None
    source = node.args[0]
    if node.target is operator.getitem:
        return source.args[0] if source.target in _SPLITS else None
    return source


def root_of(node: Node) -> Node:
    """The node at the start of a chain of views and casts."""
    while (source := source_of(node)) is not None:
        node = source
    return node


def is_cast(node: Node) -> bool:
    return node.target in _CASTS


def swaps_last_two(node: Node) -> bool:
    """Whether a node is its argument with the last two dimensions exchanged."""
    moves = node.target in (aten.t.default, aten.transpose.int, aten.permute.default)
    return moves and node.meta["val"].dim() > 1 and view_of(node).key == view_of(node.args[0]).swapped().key


# ---------------------------------------------------------------- the view of each operator


def _whole(node: Node) -> NodeView:
    if not _plain(node):
        return NodeView(node, (), (), ())
    size = tuple(node.meta["val"].shape)
    return NodeView(node, (), size, _contiguous(size))


def _plain(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _same(node: Node) -> NodeView:
    return view_of(node.args[0])


def _cast(node: Node) -> NodeView | None:
    before, after = node.args[0].meta["val"], node.meta["val"]
    if before.device != after.device:
        return None
    view = view_of(node.args[0])
    return view if _exact(before.dtype, after.dtype) else replace(view, casts=(*view.casts, after.dtype))


def _exact(before: torch.dtype, after: torch.dtype) -> bool:
    """Whether a cast changes no value: a cast to the same dtype, or from a 16-bit float to float32."""
    return before == after or (before in (torch.bfloat16, torch.float16) and after == torch.float32)


def _reshape(node: Node) -> NodeView | None:
    view, size = view_of(node.args[0]), tuple(node.meta["val"].shape)
    stride = _reshaped(view.size, view.stride, size)
    return None if stride is None else replace(view, size=size, stride=stride)


def _permute(node: Node) -> NodeView:
    view = view_of(node.args[0])
    return view._permuted([d % len(view.size) for d in node.args[1]])


def _transpose(node: Node) -> NodeView:
    view = view_of(node.args[0])
    dims = list(range(len(view.size)))
    first, second = node.args[1:3] if node.target is aten.transpose.int else (0, -1)
    dims[first], dims[second] = dims[second], dims[first]
    return view._permuted(dims)


def _expand(node: Node) -> NodeView:
    view, size = view_of(node.args[0]), tuple(node.meta["val"].shape)
    new = len(size) - len(view.size)
    stride = [0] * new + [
        old if _equal(before, after) else 0
        for before, after, old in zip(view.size, size[new:], view.stride, strict=True)
    ]
    return replace(view, size=size, stride=tuple(stride))


def _unsqueeze(node: Node) -> NodeView:
    view = view_of(node.args[0])
    dim = node.args[1] % (len(view.size) + 1)
    return replace(view, size=_inserted(view.size, dim, 1), stride=_inserted(view.stride, dim, 0))


def _squeeze(node: Node) -> NodeView | None:
    view, rank = view_of(node.args[0]), node.meta["val"].dim()
    dims = node.args[1] if len(node.args) > 1 else range(len(view.size))
    dims = {d % len(view.size) for d in ([dims] if isinstance(dims, int) else dims)}
    kept = [d for d, size in enumerate(view.size) if d not in dims or not _equal(size, 1)]
    return view._permuted(kept) if len(kept) == rank else None


def _select(node: Node) -> NodeView | None:
    view = view_of(node.args[0])
    dim, index = node.args[1] % len(view.size), node.args[2]
    start = _from_front(index, view.size[dim])
    return None if start is None else _cut(view, dim, start, None)


def _slice(node: Node) -> NodeView | None:
    view = view_of(node.args[0])
    dim, start, _, step = (*node.args[1:], *(0, None, None, 1)[len(node.args) - 1 :])
    dim = dim % len(view.size)
    start = _from_front(0 if start is None else start, view.size[dim])
    return None if start is None else _cut(view, dim, start, node.meta["val"].shape[dim], step)


def _split_piece(node: Node) -> NodeView | None:
    """One result of split or unbind; None for a result of any other operator."""
    split, index = node.args
    if split.target not in _SPLITS:
        return None
    view = view_of(split.args[0])
    rank_of_dim = 1 if split.target is aten.unbind.int else 2
    dim = split.args[rank_of_dim] if len(split.args) > rank_of_dim else split.kwargs.get("dim", 0)
    dim = dim % len(view.size)
    if split.target is aten.unbind.int:
        return _cut(view, dim, index, None)
    pieces = [piece.shape[dim] for piece in split.meta["val"]]
    return _cut(view, dim, sum(pieces[:index]), pieces[index])


def _as_strided(node: Node) -> NodeView | None:
    """as_strided addresses memory, so its elements are known only in a contiguous tensor that is no view."""
    source, size, stride, *offset = node.args
    base, view = source.meta["val"], view_of(source)
    if view.root is not source or not base.is_contiguous() or any(isinstance(arg, Node) for arg in (*size, *stride)):
        return None
    begins = base.storage_offset()
    start = offset[0] if offset and offset[0] is not None else begins
    return NodeView(source, (), tuple(size), tuple(stride), start - begins)


def _cut(view: NodeView, dim: int, start: Size, length: Size | None, step: int = 1) -> NodeView:
    """Elements start, start + step, ... along a dimension. Without a length: element `start`, the dimension removed."""
    offset = view.offset + start * view.stride[dim]
    if length is None:
        kept = [d for d in range(len(view.size)) if d != dim]
        return replace(view._permuted(kept), offset=offset)
    size, stride = list(view.size), list(view.stride)
    size[dim], stride[dim] = length, stride[dim] * step
    return replace(view, size=tuple(size), stride=tuple(stride), offset=offset)


_CASTS = (prims.convert_element_type.default, aten._to_copy.default)
_SPLITS = (aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int)
_STEPS: dict[Any, Callable[[Node], NodeView | None]] = {
    **dict.fromkeys(_CASTS, _cast),
    **dict.fromkeys((aten.view.default, aten._unsafe_view.default, aten.reshape.default), _reshape),
    **dict.fromkeys((aten.alias.default, aten.detach.default, aten.clone.default), _same),
    **dict.fromkeys((aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims), _squeeze),
    **dict.fromkeys((aten.t.default, aten.transpose.int), _transpose),
    aten.permute.default: _permute,
    aten.expand.default: _expand,
    aten.unsqueeze.default: _unsqueeze,
    aten.select.int: _select,
    aten.slice.Tensor: _slice,
    aten.as_strided.default: _as_strided,
    operator.getitem: _split_piece,
}


# ---------------------------------------------------------------- sizes and strides


def _contiguous(size: Sequence[Size]) -> tuple[Size, ...]:
    return tuple(math.prod(size[d + 1 :]) for d in range(len(size)))


def _runs(size: Sequence[Size], stride: Sequence[Size]) -> list[tuple[Size, Size]]:
    """The fewest dimensions, as (size, stride), that visit the same elements in the same order."""
    runs: list[tuple[Size, Size]] = []
    for length, step in zip(size, stride, strict=True):
        if _equal(length, 1):
            continue
        if runs and _equal(runs[-1][1], length * step):
            runs[-1] = (runs[-1][0] * length, step)
        else:
            runs.append((length, step))
    return runs


def _reshaped(size: Sequence[Size], stride: Sequence[Size], new: Sequence[Size]) -> tuple[Size, ...] | None:
    """The strides of a reshape to size `new`; None where no strides express it."""
    runs = _runs(size, stride)
    if len(runs) == 1:
        return tuple(runs[0][1] * step for step in _contiguous(new))
    strides: list[Size] = []
    remaining = list(new)
    for length, step in reversed(runs):
        covered: Size = 1
        while remaining and not _equal(covered, length):
            strides.append(step * covered)
            covered = covered * remaining.pop()
        if not _equal(covered, length):
            return None
    if not all(_equal(rest, 1) for rest in remaining):
        return None
    return tuple(reversed(strides + [0] * len(remaining)))


def _from_front(index: Size | Node, size: Size) -> Size | None:
    """An index counted from the front, at least 0 as in a slice; None where it is not a known number."""
    if not isinstance(index, int):
        return None
    if index >= 0:
        return index
    return max(index + size, 0) if isinstance(size, int) else None


def _inserted(values: Sequence[Size], place: int, value: Size) -> tuple[Size, ...]:
    return (*values[:place], value, *values[place:])


def _equal(a: Size, b: Size) -> bool:
    """Whether two sizes are statically equal."""
    return _compat.statically_true(a == b)


def _text(size: Size) -> str:
    """A size as text, because symbolic sizes are not hashable."""
    return str(size if isinstance(size, int) else size.node.expr)


def _root_key(root: Node) -> tuple:
    """A key of a root. Two getitem nodes with the same operator and index are one root."""
    if root.target is operator.getitem:
        return (operator.getitem, _root_key(root.args[0]), root.args[1])
    return (root,)
