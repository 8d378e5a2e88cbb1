"""Moves of whole rows, and the chains of nodes between moved rows and their quantisers.

`move_of` says whether a node's rows are rows of other tensors: a gather or an exchange between processes, an index, a
table, a concatenation. `readers_of` finds what reads the rows through nodes that keep them, or put zeros in the place
of some, `replayed` applies these nodes to another tensor with as many rows, and `runs_of_a_rank` says in which order
they leave gathered rows.
"""

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from fp4compile._compat import statically_true
from fp4compile.analysis.graph import RESHAPES, new_node

aten = torch.ops.aten

# By name, because torch may be built without distributed.
_GATHER = "_c10d_functional.all_gather_into_tensor.default"
_EXCHANGE = "_c10d_functional.all_to_all_single.default"
_WAIT = "_c10d_functional.wait_tensor.default"
_LOCAL = (
    aten.index.Tensor, aten.index_select.default, aten.gather.default, aten.embedding.default, aten.cat.default,
)  # fmt: skip


@dataclass(frozen=True)
class Move:
    """A node whose rows are rows of other tensors. In all of them a row is the last dimension.

    node: the moved rows. start: the node itself, or the collective that `node` waits for. sources: the other tensors.
    """

    node: Node
    start: Node
    sources: tuple[Node, ...]

    @property
    def is_collective(self) -> bool:
        return self.start is not self.node

    @property
    def is_exchange(self) -> bool:
        """Whether each process sends different rows to each of the others."""
        return str(self.start.target) == _EXCHANGE

    @property
    def name(self) -> str:
        """The operator's name in the report."""
        return self.start.target._schema.name.split("::")[1]

    def new(self, graph: Graph, tensors: Sequence[Node]) -> Node:
        """The same start of a move of other tensors, one for each source."""
        target, (_, *args), meta = self.start.target, self.start.args, self.start.meta
        if target is aten.gather.default:
            dim, index = args
            shape = [*index.args[1][:-1], tensors[0].meta["val"].shape[-1]]
            args = [dim, new_node(graph, index.target, (index.args[0], shape), meta)]
        given = list(tensors) if target is aten.cat.default else tensors[0]
        return new_node(graph, target, (given, *args), meta)


def move_of(node: Node) -> Move | None:
    """A node as a move of whole rows; None if it is none."""
    if node.op != "call_function" or node.kwargs:
        return None
    if str(node.target) == _WAIT:
        start = node.args[0]
        if str(start.target) not in (_GATHER, _EXCHANGE) or len(start.users) > 1 or start.kwargs:
            return None
        return Move(node, start, (start.args[0],)) if _has_rows(start.args[0]) else None
    if node.target not in _LOCAL or _cut_by(node) is not None:
        return None
    sources = tuple(node.args[0]) if node.target is aten.cat.default else (node.args[0],)
    if not all(map(_has_rows, sources)) or not _moves_rows(node, sources):
        return None
    return Move(node, node, sources)


def is_local_move(node: Node) -> bool:
    """Whether a node moves elements inside of a device."""
    return node.target in _LOCAL


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
    if node.target is aten.gather.default and not _is_of_rows(node.args[2], value):
        return False
    alike = {(each.meta["val"].dim(), each.meta["val"].dtype, each.meta["val"].shape[-1]) for each in sources}
    return dim not in (-1, value.dim() - 1) and len(alike) == 1


def _is_of_rows(index: Node, value: torch.Tensor) -> bool:
    """Whether an index of `gather` has one number for each row, expanded to the elements of the row."""
    if index.target is not aten.expand.default:
        return False
    one_a_row = index.args[0].meta["val"].shape[-1:] == (1,)
    return one_a_row and statically_true(index.meta["val"].shape[-1] == value.shape[-1])


# ---------------------------------------------------------------- what keeps rows


def is_size(node: Node, rows: Node) -> bool:
    """Whether a node is a size of a tensor, or of the tensor with zeros in the place of some rows, that its codes have,
    too: of any dimension but the last."""
    if node.target is not aten.sym_size.int:
        return False
    of, dim = node.args
    while _is_mask(of):
        of = _kept_of(of)
    return of is rows and dim != rows.meta["val"].dim() - 1


def rows_before(node: Node) -> Node:
    """The node whose rows a node has in its own order, through reshapes and copies."""
    while node.op == "call_function" and _kept_by(node) is node and node.target is not aten.cat.default:
        node = _kept_of(node)
    return node


def is_masked(node: Node) -> bool:
    """Whether zeros have been put in the place of some of a node's rows, before or behind reshapes and copies."""
    while node.op == "call_function" and _kept_by(node) is node and node.target is not aten.cat.default:
        if _is_mask(node):
            return True
        node = _kept_of(node)
    return False


def runs_of_a_rank(node: Node, move: Move) -> int | torch.SymInt | None:
    """In how many runs a process's rows lie among those of a node that keeps gathered rows: in one behind the gather,
    in as many as sequences where each process has a part of every sequence.

    Runs are equally long, and in the order of the processes. None where rows are masked, or in another order.
    """
    while node is not move.node and node.target is not aten.cat.default:
        if _is_mask(node):
            return None
        node = _kept_of(node)
    if node is move.node:
        return 1
    split, pieces = _cut_by(node), node.args[0]
    along = split.args[2] if len(split.args) > 2 else 0
    first, *_, last = (piece.meta["val"].shape for piece in pieces)
    by_rank = along == 0 and len(pieces) == move.start.args[1] and statically_true(first[0] == last[0])
    dim = node.args[1] if len(node.args) > 1 else 0
    return math.prod(first[: dim % len(first)]) if by_rank and runs_of_a_rank(split.args[0], move) == 1 else None


def readers_of(node: Node) -> list[Node]:
    """The nodes that read a tensor's rows: its users, where a user keeps the rows the users of that one."""
    found: list[Node] = []
    for user in node.users:
        kept = _kept_by(user) if not _is_mask(user) or _kept_of(user) is node else None
        found += [user] if kept is None else readers_of(kept)
    return list(dict.fromkeys(found))


def _kept_by(node: Node) -> Node | None:
    """The node that has all rows of a node's argument, each of them whole: the node itself, or for pieces of a tensor
    the node that joins them in another order. None if there is none."""
    if _is_mask(node):
        return node
    if node.target in (*RESHAPES, aten.clone.default):
        before, after = (each.meta["val"].shape for each in (node.args[0], node))
        return node if len(after) > 1 and statically_true(before[-1] == after[-1]) else None
    if node.target is aten.split.Tensor:
        joined = {user for piece in node.users for user in piece.users}
        return next((user for user in joined if len(joined) == 1 and _cut_by(user) is node), None)
    return None


def _kept_of(node: Node) -> Node:
    """The argument of which a node keeps the rows."""
    return node.args[2] if node.target is aten.where.self else node.args[0]


def _is_mask(node: Node) -> bool:
    """Whether a node has rows of another one, and zeros in the place of rows that belong to no expert."""
    if node.target is not aten.where.self or not all(isinstance(each, Node) for each in node.args):
        return False
    mask, zero, rows = node.args
    value, of_zero = node.meta["val"], dict(zip(("size", "value"), zero.args, strict=False))
    number = zero.args[0] if zero.target is aten.scalar_tensor.default else of_zero.get("value")
    constant = zero.target in (aten.scalar_tensor.default, aten.full.default) and str(number) in ("0", "0.0")
    alike = value.shape == rows.meta["val"].shape and value.dtype == rows.meta["val"].dtype
    return constant and alike and mask.meta["val"].shape[-1:] == (1,)


def _cut_by(node: Node) -> Node | None:
    """The split of which a concatenation joins all pieces, in order, along other rows; None for any other node.

    So the shards of a gather become a sequence, where each process has a part of every sequence.
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


def replayed(graph: Graph, node: Node, start: Node, other: Node, zero: Callable[[], float]) -> Node:
    """The nodes that keep rows between `start` and `node`, applied to a tensor with as many rows as `start`.

    Copies are left out, and of several reshapes all but the last. zero: returns what that tensor has for a row of
    zeros, in every element of the row.
    """
    base, between = node, []
    while base is not start and base.target is not aten.cat.default:
        between += [base] * (base.target is not aten.clone.default)
        base = _kept_of(base)
    made = other if base is start else _joined(graph, base, start, other, zero)
    for i, step in enumerate(reversed(between)):
        following = between[-i - 2] if i + 1 < len(between) else None
        if _is_mask(step):
            made = new_node(graph, aten.where.ScalarSelf, (step.args[0], zero(), made), made.meta)
        elif following is None or _is_mask(following):
            shape = [*step.args[1][:-1], made.meta["val"].shape[-1]]
            made = new_node(graph, aten.reshape.default, (made, shape), made.meta)
    return made


def _joined(graph: Graph, node: Node, start: Node, other: Node, zero: Callable[[], float]) -> Node:
    """The pieces that a concatenation joins (`_cut_by`), of a tensor with other rows."""
    split = node.args[0][0].args[0]
    cut = replayed(graph, split.args[0], start, other, zero)
    cut = new_node(graph, split.target, (cut, *split.args[1:]), split.meta)
    pieces = [new_node(graph, operator.getitem, (cut, i), split.meta) for i in range(len(split.meta["val"]))]
    return new_node(graph, node.target, (pieces, *node.args[1:]), node.meta)


# ---------------------------------------------------------------- equal nodes


def share_equal(nodes: Sequence[Node]) -> list[Node]:
    """Let the first of equal nodes serve the users of the others, which are erased; returns what is left.

    nodes: without side effects, in the order of the graph. So no tensor is moved twice.
    """
    first: dict[tuple, Node] = {}
    for node in nodes:
        key = node.target, str(node.args), str(node.kwargs)  # names of nodes are theirs alone
        kept = first.setdefault(key, node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            node.graph.erase_node(node)
    return list(first.values())
