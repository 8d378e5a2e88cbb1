"""What a node is a view of: which elements of which tensor it holds, in which order, and through which casts.

Entry: `view_of(node)`. Views, permutations, slices, splits, expansions and copies only move elements, so that a chain
of them is one strided map into the elements of the tensor at its root, numbered as if that tensor were contiguous. Two
nodes hold the same value where root, casts and map agree: that is a proof, where equal shapes are none. A reshape that
no strides can express starts a new root.

Sizes may be symbolic: they are compared by what is statically known, and no guard is added.
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
class View:
    """Elements of `root`: element (i, j, ...) is number offset + i * stride[0] + j * stride[1] + ... of it.

    root: a node that is neither a view nor a cast. casts: dtypes that the elements were cast to on the way, in order;
        casts that change no value are left out. size, stride: one entry a dimension, in elements; stride 0 repeats.
    """

    root: Node
    casts: tuple[torch.dtype, ...]
    size: tuple[Size, ...]
    stride: tuple[Size, ...]
    offset: Size = 0

    @property
    def elements(self) -> tuple:
        """A key of the sequence of elements, whatever shape it has."""
        runs = tuple((_text(size), _text(stride)) for size, stride in _runs(self.size, self.stride))
        return (_root_key(self.root), self.casts, runs, _text(self.offset))

    @property
    def key(self) -> tuple:
        """A key of the value: its elements and its shape."""
        return (*self.elements, tuple(map(_text, self.size)))

    @property
    def is_batched(self) -> bool:
        return len(self.size) > 2

    def swapped(self) -> "View":
        """With its last two dimensions exchanged."""
        return self._permuted([*range(len(self.size) - 2), -1, -2])

    def matrix(self) -> "View | None":
        """The one matrix that every entry along the leading dimensions is; None where entries differ, or may differ."""
        lead = zip(self.size[:-2], self.stride[:-2], strict=True)
        if len(self.size) < 2 or not all(_known_equal(size, 1) or _known_equal(stride, 0) for size, stride in lead):
            return None
        return replace(self, size=self.size[-2:], stride=self.stride[-2:])

    def _permuted(self, dims: Sequence[int]) -> "View":
        return replace(self, size=tuple(self.size[d] for d in dims), stride=tuple(self.stride[d] for d in dims))


def view_of(node: Node) -> View:
    """What a node holds of the tensor at the root of its views and casts; of any other node, all of itself."""
    step = _STEPS.get(node.target) if node.op == "call_function" else None
    found = None if step is None or not _plain(node) else step(node)
    return _whole(node) if found is None else found


def value_key(node: Node) -> tuple:
    """A key that is equal for nodes of the same value, shape and dtype: each of Q, K and V has its own view of their
    input, and under autocast its own cast."""
    return (*view_of(node).key, node.meta["val"].dtype) if _plain(node) else _root_key(node)


def source_of(node: Node) -> Node | None:
    """The node that a view or a cast takes its elements from; None for anything else."""
    if node.op != "call_function" or node.target not in _STEPS:
        return None
    source = node.args[0]
    if node.target is operator.getitem:
        return source.args[0] if source.target in _SPLITS else None
    return source


def is_cast(node: Node) -> bool:
    return node.target in _CASTS


def swaps_last_two(node: Node) -> bool:
    """Whether a node is its argument with the last two dimensions exchanged."""
    if node.target is aten.t.default:
        return node.meta["val"].dim() == 2
    if node.target is aten.transpose.int:
        rank = node.meta["val"].dim()
        return {d % rank for d in node.args[1:3]} == {rank - 2, rank - 1}
    if node.target is aten.permute.default:
        dims = [d % len(node.args[1]) for d in node.args[1]]
        last = len(dims) - 1
        return last > 0 and dims == [*range(last - 1), last, last - 1]
    return False


# ---------------------------------------------------------------- the steps of a chain


def _whole(node: Node) -> View:
    if not _plain(node):
        return View(node, (), (), ())
    size = tuple(node.meta["val"].shape)
    return View(node, (), size, _contiguous(size))


def _plain(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _same(node: Node) -> View:
    return view_of(node.args[0])


def _cast(node: Node) -> View | None:
    before, after = node.args[0].meta["val"], node.meta["val"]
    if before.device != after.device:
        return None
    view = view_of(node.args[0])
    return view if _exact(before.dtype, after.dtype) else replace(view, casts=(*view.casts, after.dtype))


def _exact(before: torch.dtype, after: torch.dtype) -> bool:
    """Whether a cast changes no value: to itself, and from 16 bits to float32."""
    return before == after or (before in (torch.bfloat16, torch.float16) and after == torch.float32)


def _reshape(node: Node) -> View | None:
    view, size = view_of(node.args[0]), tuple(node.meta["val"].shape)
    stride = _reshaped(view.size, view.stride, size)
    return None if stride is None else replace(view, size=size, stride=stride)


def _permute(node: Node) -> View:
    view = view_of(node.args[0])
    return view._permuted([d % len(view.size) for d in node.args[1]])


def _transpose(node: Node) -> View:
    view = view_of(node.args[0])
    dims = list(range(len(view.size)))
    first, second = node.args[1:3] if node.target is aten.transpose.int else (0, -1)
    dims[first], dims[second] = dims[second], dims[first]
    return view._permuted(dims)


def _expand(node: Node) -> View:
    view, size = view_of(node.args[0]), tuple(node.meta["val"].shape)
    new = len(size) - len(view.size)
    stride = [0] * new + [
        old if _known_equal(before, after) else 0
        for before, after, old in zip(view.size, size[new:], view.stride, strict=True)
    ]
    return replace(view, size=size, stride=tuple(stride))


def _unsqueeze(node: Node) -> View:
    view = view_of(node.args[0])
    dim = node.args[1] % (len(view.size) + 1)
    return replace(view, size=_inserted(view.size, dim, 1), stride=_inserted(view.stride, dim, 0))


def _squeeze(node: Node) -> View | None:
    view, rank = view_of(node.args[0]), node.meta["val"].dim()
    dims = node.args[1] if len(node.args) > 1 else range(len(view.size))
    dims = {d % len(view.size) for d in ([dims] if isinstance(dims, int) else dims)}
    kept = [d for d, size in enumerate(view.size) if d not in dims or not _known_equal(size, 1)]
    return view._permuted(kept) if len(kept) == rank else None


def _select(node: Node) -> View | None:
    view = view_of(node.args[0])
    dim, index = node.args[1] % len(view.size), node.args[2]
    start = _from_front(index, view.size[dim])
    return None if start is None else _cut(view, dim, start, None)


def _slice(node: Node) -> View | None:
    view = view_of(node.args[0])
    dim, start, _, step = (*node.args[1:], *(0, None, None, 1)[len(node.args) - 1 :])
    dim = dim % len(view.size)
    start = _from_front(0 if start is None else start, view.size[dim])
    return None if start is None else _cut(view, dim, start, node.meta["val"].shape[dim], step)


def _split_piece(node: Node) -> View | None:
    """A result of chunk, split or unbind; of any other operator with several results, None."""
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


def _as_strided(node: Node) -> View | None:
    """as_strided counts in memory: only of a whole tensor that lies there in the order of its elements."""
    source, size, stride, *offset = node.args
    base, view = source.meta["val"], view_of(source)
    if view.root is not source or not base.is_contiguous() or any(isinstance(arg, Node) for arg in (*size, *stride)):
        return None
    start = offset[0] if offset and offset[0] is not None else 0
    begins = base.storage_offset()
    return View(source, (), tuple(size), tuple(stride), start - begins)


def _cut(view: View, dim: int, start: Size, length: Size | None, step: int = 1) -> View:
    """Elements start, start + step, ... along a dimension; without a length, the one at start, and no dimension."""
    offset = view.offset + start * view.stride[dim]
    if length is None:
        kept = [d for d in range(len(view.size)) if d != dim]
        return replace(view._permuted(kept), offset=offset)
    size, stride = list(view.size), list(view.stride)
    size[dim], stride[dim] = length, stride[dim] * step
    return replace(view, size=tuple(size), stride=tuple(stride), offset=offset)


_CASTS = (prims.convert_element_type.default, aten._to_copy.default)
_SPLITS = (aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int)
_STEPS: dict[Any, Callable[[Node], View | None]] = {
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
    """(size, stride) of the fewest dimensions that go through the same elements in the same order."""
    runs: list[tuple[Size, Size]] = []
    for length, step in zip(size, stride, strict=True):
        if _known_equal(length, 1):
            continue
        if runs and _known_equal(runs[-1][1], length * step):
            runs[-1] = (runs[-1][0] * length, step)
        else:
            runs.append((length, step))
    return runs


def _reshaped(size: Sequence[Size], stride: Sequence[Size], new: Sequence[Size]) -> tuple[Size, ...] | None:
    """The strides of a reshape, or None where no strides express it."""
    runs = _runs(size, stride)
    if len(runs) == 1:
        return tuple(runs[0][1] * step for step in _contiguous(new))
    strides: list[Size] = []
    left = list(new)
    for length, step in reversed(runs):
        covered: Size = 1
        while left and not _known_equal(covered, length):
            strides.append(step * covered)
            covered = covered * left.pop()
        if not _known_equal(covered, length):
            return None
    if not all(_known_equal(rest, 1) for rest in left):
        return None
    return tuple(reversed(strides + [0] * len(left)))


def _from_front(index: Size | Node, size: Size) -> Size | None:
    """An index counted from the front, cut off at 0 as slices are; None for one that is known only when it runs."""
    if not isinstance(index, int):
        return None
    if index >= 0:
        return index
    return max(index + size, 0) if isinstance(size, int) else None


def _inserted(values: Sequence[Size], place: int, value: Size) -> tuple[Size, ...]:
    return (*values[:place], value, *values[place:])


def _known_equal(a: Size, b: Size) -> bool:
    return _compat.statically_true(a == b)


def _text(size: Size) -> str:
    """A size as text: symbolic ones have no hash."""
    return str(size if isinstance(size, int) else size.node.expr)


def _root_key(root: Node) -> tuple:
    """A result of an operator with several is told by the operator and its place, as there may be two nodes of it."""
    if root.target is operator.getitem:
        return (operator.getitem, _root_key(root.args[0]), root.args[1])
    return (root,)
