"""Quantise rows before they are moved, so that codes and scales are moved instead of 16-bit numbers.

Entry: `quantize_before_move(graph)`, on a forward, backward or inference graph after the partitioner. It runs after
`merge_quantize`, because a quantiser of columns as well reads rows together, and before `fake_quantize`.

Tokens are gathered for their experts, looked up in a table, concatenated, or collected from other processes, and then
quantised. A row whose scales are its own has the same codes wherever it is. So `quantize(move(x))` is
`move(quantize(x))`, bit for bit, applied to codes, block scales and outer scales of rows one by one. Moves are handled
from the last to the first, so the quantiser goes to the start of a chain of moves. Reshapes and copies in between keep
the rows. Offsets of groups are dropped: a row has the same codes in every group, and the codes of rows of no group are
arbitrary.

A quantiser stays behind the move where its results depend on more than a row: an outer scale that is computed for the
whole tensor or for a group, swizzled scales, square blocks, stochastic rounding, or columns. So it does if anything
other than quantisers reads the moved rows, because then both would be moved.

A move inside a device has to pay (`_pays_locally`). A collective always does: a network is slower than memory, and the
process quantises its own rows, not those of the whole group. What is decided about a collective depends on nothing that
may differ between the processes, such as numbers of rows, because all have to call the same collectives.
"""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx import Graph, Node

from fp4compile._compat import statically_true
from fp4compile.analysis.graph import RESHAPES, Quantise, new_node, quantise_of
from fp4compile.formats import formats
from fp4compile.ops.quantize import QUANTIZE
from fp4compile.passes.fake_quantize import may_return_values
from fp4compile.passes.merge_quantize import share
from fp4compile.roofline.pointwise import base_of, kind_of
from fp4compile.templates.launch import on_gpu, target_of

aten = torch.ops.aten

# By name, because torch may be built without distributed.
_COLLECTIVES = (
    "_c10d_functional.all_gather_into_tensor.default", "_c10d_functional.all_to_all_single.default",
)  # fmt: skip
_WAIT = "_c10d_functional.wait_tensor.default"
_LOCAL = (aten.index.Tensor, aten.index_select.default, aten.embedding.default, aten.cat.default)

# Bytes that a GPU moves in the time of one more launch: 1.4 us (`hardware.Gpu.launch`) at about 3 TB/s.
LAUNCH_BYTES = 4 * 2**20


def quantize_before_move(graph: Graph) -> int:
    """Move codes and scales where quantisers alone read the moved rows; returns the number of moves."""
    count = 0
    for node in reversed(list(graph.nodes)):
        move = _move_of(node)
        readers = None if move is None else _quantisers(node)
        if readers and all(_by_rows(each) and _outer_is_there(each, move) for each in readers) and _pays(move, readers):
            _replace(graph, move, readers)
            count += 1
    if count:
        share(graph)  # the tensor may be quantised already, for those who read it where it was
    return count


# ---------------------------------------------------------------- what moves rows


@dataclass(frozen=True)
class _Move:
    """A node whose rows are rows of other tensors. The last dimension is that of a row, in all of them.

    node: the moved rows. start: the node itself, or the collective that `node` waits for. sources: the other tensors.
    """

    node: Node
    start: Node
    sources: tuple[Node, ...]

    @property
    def is_collective(self) -> bool:
        return self.start is not self.node

    def new(self, graph: Graph, tensors: Sequence[Node]) -> Node:
        """The same start of a move of other tensors, one for each source."""
        given = list(tensors) if self.start.target is aten.cat.default else tensors[0]
        return new_node(graph, self.start.target, (given, *self.start.args[1:]), self.start.meta)


def _move_of(node: Node) -> _Move | None:
    """A node as a move of whole rows; None if it is none."""
    if node.op != "call_function" or node.kwargs:
        return None
    if str(node.target) == _WAIT:
        start = node.args[0]
        if str(start.target) not in _COLLECTIVES or len(start.users) > 1 or start.kwargs:
            return None
        return _Move(node, start, (start.args[0],)) if _has_rows(start.args[0]) else None
    if node.target not in _LOCAL:
        return None
    sources = tuple(node.args[0]) if node.target is aten.cat.default else (node.args[0],)
    if not all(map(_has_rows, sources)) or not _moves_rows(node, sources):
        return None
    return _Move(node, node, sources)


def _has_rows(node: Node) -> bool:
    """Whether a tensor has rows, of a known number of elements."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dim() > 1 and isinstance(value.shape[-1], int)


def _moves_rows(node: Node, sources: tuple[Node, ...]) -> bool:
    """Whether an operator of `_LOCAL` leaves the last dimension as it is."""
    value = sources[0].meta["val"]
    if node.target is aten.embedding.default:
        return True
    if node.target is aten.index.Tensor:
        return len(node.args[1]) < value.dim()
    dim = node.args[1] if len(node.args) > 1 else 0
    alike = {(each.meta["val"].dim(), each.meta["val"].dtype, each.meta["val"].shape[-1]) for each in sources}
    return dim not in (-1, value.dim() - 1) and len(alike) == 1


# ---------------------------------------------------------------- which quantisers go before it


def _quantisers(node: Node) -> list[Quantise] | None:
    """The quantisers that read a tensor, or a reshape of it that keeps the rows; None if anything else reads it."""
    found: list[Quantise] = []
    for user in node.users:
        readers = [quantise_of(user)] if user.target is QUANTIZE else _quantisers(user) if _keeps_rows(user) else None
        if readers is None:
            return None
        found += readers
    return found


def _keeps_rows(node: Node) -> bool:
    if node.target not in (*RESHAPES, aten.clone.default):
        return False
    before, after = (each.meta["val"].shape for each in (node.args[0], node))
    return len(after) > 1 and statically_true(before[-1] == after[-1])


def _by_rows(quantise: Quantise) -> bool:
    """Whether each row of codes and scales depends on one row of the tensor, and on nothing else that is moved."""
    fmt, outer = formats.get(quantise.format), quantise.outer
    plain = (quantise.dims, quantise.layout, quantise.scale_rule) == ((-1,), "linear", "amax") and not fmt.square
    plain = plain and not (quantise.values or quantise.prologue or quantise.each_matrix) and quantise.seed is None
    return plain and (fmt.outer != "tensor" if outer is None else outer.meta["val"].dim() == 0)


def _outer_is_there(quantise: Quantise, move: _Move) -> bool:
    """Whether a static outer scale is known before the move; a constant can be."""
    outer = quantise.outer
    return outer is None or outer < move.start or not (outer.op == "placeholder" or outer.all_input_nodes)


def _pays(move: _Move, readers: list[Quantise]) -> bool:
    """Whether fewer bytes are moved."""
    value = move.node.meta["val"]
    row, codes = value.shape[-1] * value.element_size(), sum(map(_row_bytes, readers))
    return codes < row and (move.is_collective or _pays_locally(move, readers, row))


def _pays_locally(move: _Move, readers: list[Quantise], row: int) -> bool:
    """Whether a move inside a device pays.

    No more rows may be quantised than before, so a few rows of a large table are not worth quantising the table. Sizes
    have to be known. The bytes that are saved have to be worth the launches that are added: of several moves instead of
    one, and of one quantiser for each source. Where `fake_quantize` would make the codes 16-bit numbers, nothing is
    saved; nor is it where Inductor computes the rows while it moves them.
    """
    before, after = _rows(move.node), [_rows(source) for source in move.sources]
    if not all(isinstance(rows, int) for rows in (before, *after)) or sum(after) > before:
        return False
    if not all(_inductor_moves(each) and not may_return_values(each) for each in readers):
        return False
    if not all(map(_in_memory, move.sources)):
        return False
    saved, launches = 2 * before * row, -1
    for each in readers:
        codes = _row_bytes(each)
        saved += before * (row - codes) - sum(after) * (row + codes)
        launches += len(_parts(each)) + len(move.sources) - 1
    return saved >= launches * (LAUNCH_BYTES if on_gpu(move.node.meta["val"]) else 0)


def _inductor_moves(quantise: Quantise) -> bool:
    """Whether Inductor writes kernels with the types of the results: C++ has no E8M0, Triton no FP8 for old GPUs."""
    value = quantise.x.meta["val"]
    if on_gpu(value):
        return target_of(value.device).float8_matrix_units
    return formats.get(quantise.format).scale != "e8m0"


def _rows(node: Node) -> int | torch.SymInt:
    return math.prod(node.meta["val"].shape[:-1])


def _parts(quantise: Quantise) -> list[int]:
    """The places of the results that have one row for each row of the tensor: codes, block scales, outer scales."""
    fmt = formats.get(quantise.format)
    there = (True, fmt.scale is not None, fmt.outer == "row" and quantise.outer is None)
    return [place for place, is_there in enumerate(there) if is_there]


def _row_bytes(quantise: Quantise) -> int:
    """Bytes of the codes and scales of one row."""
    values = [quantise.node.meta["val"][place] for place in _parts(quantise)]
    return sum(value.shape[-1] * value.element_size() for value in values)


def _in_memory(node: Node) -> bool:
    """Whether a tensor is in memory anyway, and is not computed by the kernel of Inductor's that moves it."""
    base = base_of(node)
    return kind_of(base) not in ("fused", "reduction") or base.target in _LOCAL or len(node.users) > 1


# ---------------------------------------------------------------- the new nodes


def _replace(graph: Graph, move: _Move, readers: list[Quantise]) -> None:
    """Quantise the sources, move the results, and let the quantisers' users read these; erase the move.

    All collectives start where the one did, and are waited for where that was, so that they overlap with what lies in
    between. The sizes of a reshape may be computed as late as the reader.
    """
    for reader in readers:
        if reader.outer is not None and not reader.outer < move.start:
            move.start.prepend(reader.outer)
        with graph.inserting_before(move.start):
            quantised = [replace(reader, x=source, offs=None).new(graph, reader.node.meta) for source in move.sources]
            moved = {place: _started(graph, move, quantised, place) for place in _parts(reader)}
        if move.is_collective:
            with graph.inserting_before(move.node):
                wait, meta = move.node.target, move.node.meta
                moved = {place: new_node(graph, wait, (node,), meta) for place, node in moved.items()}
        with graph.inserting_before(reader.node):
            results = {place: _as_result(graph, move, reader, node, place) for place, node in moved.items()}
            for user in list(reader.node.users):
                place = user.args[1]
                if place not in results:  # an empty tensor
                    results[place] = new_node(graph, operator.getitem, (quantised[0], place), user.meta)
                user.replace_all_uses_with(results[place])
    _erase(move.node)
    if move.is_collective:
        graph.erase_node(move.start)


def _started(graph: Graph, move: _Move, quantised: list[Node], place: int) -> Node:
    """The start of the move of one result of the quantised sources.

    It is moved as bytes if its elements are bytes: neither torch nor libraries of collectives move all such dtypes.
    """
    tensors = [new_node(graph, operator.getitem, (each, place), each.meta) for each in quantised]
    if _as_bytes(tensors[0].meta["val"].dtype):
        tensors = [new_node(graph, aten.view.dtype, (each, torch.uint8), each.meta) for each in tensors]
    return move.new(graph, tensors)


def _as_result(graph: Graph, move: _Move, reader: Quantise, moved: Node, place: int) -> Node:
    """A moved result in the shape and dtype that it has in the reader's results."""
    shape, dtype = _shape(reader.x, move.node), reader.node.meta["val"][place].dtype
    if shape is not None:
        moved = new_node(graph, aten.reshape.default, (moved, [*shape[:-1], moved.meta["val"].shape[-1]]), moved.meta)
    return new_node(graph, aten.view.dtype, (moved, dtype), moved.meta) if _as_bytes(dtype) else moved


def _as_bytes(dtype: torch.dtype) -> bool:
    return dtype.itemsize == 1 and dtype != torch.uint8


def _shape(node: Node, moved: Node) -> list | None:
    """The shape that the last reshape between the moved rows and a node gives them; None without a reshape."""
    while node is not moved:
        if node.target in RESHAPES:
            return node.args[1]
        node = node.args[0]
    return None


def _erase(node: Node) -> None:
    """Erase a node, and all nodes that read it."""
    for user in list(node.users):
        _erase(user)
    node.graph.erase_node(node)
