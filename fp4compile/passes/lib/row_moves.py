"""Quantise rows before a gather or an index moves them: which quantisers may, and the new nodes.

A row whose scales depend on it alone has the same codes at every index. So quantising and moving commute:
`quantize(move(x))` is `move(quantize(x))`, bit for bit, for codes, block scales and row scales. Nodes between the move
and the quantiser that keep rows are applied to the moved results. Offsets of groups are dropped: a row has the same
codes in every group, and the codes of rows of no group are arbitrary. Scales are moved in the linear layout;
`lay_out_scales` swizzles them behind the move.

A quantiser stays behind the move where its results depend on more than one row, and where anything other than
quantisers reads the moved rows, because then rows and codes would be moved.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch.fx import Graph, Node

from fp4compile._compat import statically_true
from fp4compile.formats import formats
from fp4compile.ops.nodes import RESHAPES, Quantise, new_node, quantise_of, replace_results
from fp4compile.ops.quantize import LAY_OUT_SCALES, QUANTIZE
from fp4compile.passes.lib.equal_quantises import share
from fp4compile.passes.lib.notes import name_move

aten = torch.ops.aten


@dataclass(frozen=True)
class Move:
    """A node whose rows are rows of another tensor; a row is the last dimension.

    rows: the moved rows. start: the node itself, or the collective that `rows` waits for.
    """

    rows: Node
    start: Node

    @property
    def source(self) -> Node:
        """The tensor whose rows are moved."""
        return self.start.args[0]

    @property
    def name(self) -> str:
        """The operator's name in the report."""
        return self.start.target._schema.name.split("::")[1]

    def started(self, graph: Graph, tensor: Node) -> Node:
        """The start of the same move of another tensor's rows."""
        return new_node(graph, self.start.target, (tensor, *self.start.args[1:]), self.start.meta)


def has_rows(node: Node) -> bool:
    """Whether a tensor has rows, of a known number of elements."""
    value = node.meta["val"]
    return value.dim() > 1 and isinstance(value.shape[-1], int)


def quantize_before(
    graph: Graph, move_of: Callable[[Node], Move | None], unpaid: Callable[[Move, list[Quantise]], str | None]
) -> int:
    """Quantise before the moves that `move_of` finds, from the last to the first; returns the number of moves.

    unpaid: returns why moving codes does not pay; None where it does.
    """
    count = 0
    for node in reversed(list(graph.nodes)):
        move = move_of(node)
        users = [] if move is None else readers_of(node)
        quantisers = [quantise_of(each) for each in users if each.target is QUANTIZE]
        if not quantisers:
            continue
        reason = _unmoved(move, quantisers, users) or unpaid(move, quantisers)
        text = f"quantised before {move.name}" if reason is None else f"quantised after {move.name}: {reason}"
        for each in quantisers:
            name_move(each.node, node, text)
        if reason is None:
            _replace(graph, move, quantisers)
            count += 1
    if count:
        share(graph)  # the tensor may already be quantised, for readers before the move
    return count


# ---------------------------------------------------------------- what a row of results depends on


def _unmoved(move: Move, quantisers: list[Quantise], users: list[Node]) -> str | None:
    """The reason that quantisers among the users of the moved rows must stay behind the move; or None."""
    sizes = [each for each in users if each.target is aten.sym_size.int]
    if len(quantisers) + len(sizes) < len(users):
        return "its rows are read elsewhere, too"
    reasons = [_of_more_than_a_row(each, move) for each in quantisers]
    reasons += ["the numbers of rows are not known"] * bool(sizes)
    return next((reason for reason in reasons if reason is not None), None)


def _of_more_than_a_row(quantise: Quantise, move: Move) -> str | None:
    """The input, as text, on which a row of codes and scales depends besides the row itself; None if there is none."""
    fmt, outer = formats.get(quantise.format), quantise.outer
    if quantise.dims != (-1,):
        return "columns are quantised"
    if fmt.square:
        return "blocks are square"
    if quantise.seed is not None:
        return "elements are rounded stochastically"
    if quantise.scale_rule != "amax" or quantise.prologue or quantise.each_matrix:
        return "it is no quantiser of activations alone"
    if fmt.outer == "tensor" and outer is None:
        return "its global scale is made of all moved rows"
    if quantise.amax is not None or (outer is not None and not _holds_before(outer, move)):
        return "its global scale is computed behind the move, or each row has one"
    return None


def _holds_before(outer: Node, move: Move) -> bool:
    """Whether a global scale is one number, and exists before the move, or can be moved before it."""
    is_constant = outer.op != "placeholder" and not outer.all_input_nodes
    return outer.meta["val"].dim() == 0 and (outer < move.start or is_constant)


def row_bytes(node: Node) -> int:
    value = node.meta["val"]
    return value.shape[-1] * value.element_size()


def parts_of(quantise: Quantise) -> list[int]:
    """The indices of the results that are moved: codes, block scales, and row scales."""
    fmt = formats.get(quantise.format)
    there = (True, fmt.scale is not None and not quantise.values, fmt.outer == "row" and quantise.outer is None)
    return [place for place, is_there in enumerate(there) if is_there]


def moved_bytes(quantise: Quantise) -> int:
    """Bytes of the codes and scales of one row."""
    return sum(bytes_of(quantise, place) for place in parts_of(quantise))


def bytes_of(quantise: Quantise, place: int) -> int:
    """Bytes of a row of one result of a quantiser; block scales (place 1) count in the linear layout."""
    value = quantise.node.meta["val"][place]
    if place == 1:
        elements = quantise.x.meta["val"].shape[-1]
        return -(-elements // formats.get(quantise.format).block_cols) * value.element_size()
    return value.shape[-1] * value.element_size()


# ---------------------------------------------------------------- what keeps rows


def readers_of(node: Node) -> list[Node]:
    """The nodes that read a tensor's rows: its users, where a user keeps the rows the users of that one."""
    found: list[Node] = []
    for user in node.users:
        kept = _kept_by(user)
        found += [user] if kept is None else readers_of(kept)
    return list(dict.fromkeys(found))


def _kept_by(node: Node) -> Node | None:
    """The node that holds all rows of a node's argument, none of them cut; None if the node keeps not all.

    A reshape or clone holds them itself; where a split cuts between rows, the concatenation of all its pieces does.
    """
    if node.target in (*RESHAPES, aten.clone.default):
        before, after = (each.meta["val"].shape for each in (node.args[0], node))
        return node if len(after) > 1 and statically_true(before[-1] == after[-1]) else None
    if node.target is aten.split.Tensor:
        joined = {user for piece in node.users for user in piece.users}
        return next((user for user in joined if len(joined) == 1 and _cut_by(user) is node), None)
    return None


def _cut_by(node: Node) -> Node | None:
    """The split of which a concatenation joins all pieces, in order, along other rows; None for any other node.

    So gathered ranks' parts become sequences, where each rank has a part of every sequence.
    """
    if node.target is not aten.cat.default or not all(piece.target is operator.getitem for piece in node.args[0]):
        return None
    split, dim = node.args[0][0].args[0], node.args[1] if len(node.args) > 1 else 0
    if split.target is not aten.split.Tensor:
        return None
    rank, all_of_it = split.args[0].meta["val"].dim(), [(split, i) for i in range(len(split.meta["val"]))]
    along = split.args[2] if len(split.args) > 2 else 0
    whole = [piece.args for piece in node.args[0]] == all_of_it and not {-1, rank - 1} & {dim, along}
    return split if whole and all(len(piece.users) == 1 for piece in node.args[0]) else None


def _replayed(graph: Graph, node: Node, rows: Node, other: Node) -> Node:
    """The nodes that keep rows from `rows` to `node`, applied to a tensor with as many rows; copies are left out."""
    if node is rows:
        return other
    split = _cut_by(node)
    before = _replayed(graph, node.args[0] if split is None else split.args[0], rows, other)
    if split is not None:
        cut = new_node(graph, split.target, (before, *split.args[1:]), split.meta)
        pieces = [new_node(graph, operator.getitem, (cut, i), split.meta) for i in range(len(split.meta["val"]))]
        return new_node(graph, node.target, (pieces, *node.args[1:]), node.meta)
    if node.target is aten.clone.default:
        return before
    return new_node(
        graph, aten.reshape.default, (before, [*node.args[1][:-1], before.meta["val"].shape[-1]]), node.meta
    )


# ---------------------------------------------------------------- the new nodes


def _replace(graph: Graph, move: Move, quantisers: list[Quantise]) -> None:
    """Quantise the source, move the results, and let the quantisers' users read these; erase the move.

    All collectives start, and are waited for, where the replaced one was, so they overlap with the nodes in between.
    The sizes of a reshape may be computed as late as the reader.
    """
    for reader in quantisers:
        if reader.outer is not None and not reader.outer < move.start:
            move.start.prepend(reader.outer)
        with graph.inserting_before(move.start):
            quantised = replace(reader, x=move.source, offs=None, layout="linear").new(graph, reader.node.meta)
            moved = {place: move.started(graph, _as_bytes(graph, quantised, place)) for place in parts_of(reader)}
        if move.start is not move.rows:
            with graph.inserting_before(move.rows):
                moved = {
                    place: new_node(graph, move.rows.target, (node,), move.rows.meta) for place, node in moved.items()
                }
        with graph.inserting_before(reader.node):
            read = {user.args[1] for user in reader.node.users}
            found = [
                _result(graph, reader, move, moved[place], place) if place in moved and place in read
                # An empty tensor, or the global scale, which is the source's too.
                else new_node(graph, operator.getitem, (quantised, place), reader.node.meta) if place in read else None
                for place in range(3)
            ]  # fmt: skip
        replace_results(reader.node, found)
    _erase(move.rows)
    if move.start is not move.rows:
        graph.erase_node(move.start)


def _as_bytes(graph: Graph, quantised: Node, place: int) -> Node:
    """A result of a quantiser, viewed as bytes if its elements are: torch and collectives lack some of these dtypes."""
    node = new_node(graph, operator.getitem, (quantised, place), quantised.meta)
    dtype = node.meta["val"].dtype
    are_bytes = dtype.itemsize == 1 and dtype != torch.uint8
    return new_node(graph, aten.view.dtype, (node, torch.uint8), node.meta) if are_bytes else node


def _result(graph: Graph, reader: Quantise, move: Move, moved: Node, place: int) -> Node:
    """A moved result with the row order, layout and dtype of the reader's own result."""
    node = _replayed(graph, reader.x, move.rows, moved)
    if place == 1 and reader.spec.swizzled:
        node = new_node(graph, LAY_OUT_SCALES, (node, reader.offs), reader.node.meta)
    dtype = reader.node.meta["val"][place].dtype
    return node if node.meta["val"].dtype == dtype else new_node(graph, aten.view.dtype, (node, dtype), node.meta)


def _erase(node: Node) -> None:
    """Erase a node, and all nodes that read it."""
    for user in list(node.users):
        _erase(user)
    node.graph.erase_node(node)
