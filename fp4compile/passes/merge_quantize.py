"""Merge the row- and the column-wise quantise of one tensor into `quantize_both`, which reads it once.

Entry: `merge(graph)`, on a forward or backward graph after the partitioner. In a forward graph these are the
activation of fprop and the one that is kept for wgrad, in a backward graph the gradient of dgrad and that of wgrad.
The pair must have the same format, layout, outer scale and seed; a Hadamard transform belongs to the columns.

Before that, of quantises that do the same the first one serves all: packed layers quantise their input each for itself.
"""

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from fp4compile import formats
from fp4compile.passes.rewrite import new_node
from fp4compile.passes.views import value_key

QUANTIZE = torch.ops.fp4compile.quantize.default
BOTH = torch.ops.fp4compile.quantize_both.default


@dataclass(frozen=True)
class Quantise:
    """A quantise node, its arguments by name; dim: from the end."""

    node: Node
    source: Node
    format: str
    dim: int
    outer: Node | None
    layout: str
    seed: Node | None
    hadamard: bool

    @property
    def along_rows(self) -> bool:
        return self.dim == -1 and not self.hadamard and not self.given_each

    @property
    def along_columns(self) -> bool:
        return self.dim == -2 and not (self.hadamard and self.outer is not None) and not self.given_each

    @property
    def given_each(self) -> bool:
        """Whether an outer scale is given for each row: rows and columns then have nothing in common."""
        return self.outer is not None and formats.get(self.format).outer == "row"

    @property
    def key(self) -> tuple:
        """What a pair has in common."""
        return value_key(self.source), self.format, self.outer, self.layout, self.seed


def merge(graph: Graph) -> int:
    """Replace every pair by one `quantize_both`; returns how many."""
    _share(graph)
    rows: dict[tuple, Quantise] = {}
    columns: dict[tuple, Quantise] = {}
    order = {node: place for place, node in enumerate(graph.nodes)}
    for node in graph.find_nodes(op="call_function", target=QUANTIZE):
        found = quantise_of(node)
        if found.along_rows:
            rows.setdefault(found.key, found)
        elif found.along_columns:
            columns.setdefault(found.key, found)
    pairs = [(row, columns[key]) for key, row in rows.items() if key in columns]
    for row, column in pairs:
        first = min(row, column, key=lambda one: order[one.node])
        _replace(graph, row, column, first)
    return len(pairs)


def _share(graph: Graph) -> None:
    """Let the first of quantises that do the same serve all."""
    first: dict[tuple, Node] = {}
    for node in graph.find_nodes(op="call_function", target=QUANTIZE):
        found = quantise_of(node)
        kept = first.setdefault((found.key, found.dim, found.hadamard), node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            graph.erase_node(node)


def quantise_of(node: Node) -> Quantise:
    """What a quantise node is asked for."""
    source, fmt, *dim = node.args
    rank = source.meta["val"].dim()
    given = dim[0] if dim else -1
    kwargs: dict[str, Any] = {"outer": None, "layout": "linear", "seed": None, "hadamard": False, **node.kwargs}
    return Quantise(node, source, fmt, given if given < 0 else given - rank, **kwargs)


def _replace(graph: Graph, row: Quantise, column: Quantise, first: Quantise) -> None:
    options = {"outer": row.outer, "seed": row.seed}
    kwargs = {name: value for name, value in options.items() if value is not None}
    if row.layout != "linear":
        kwargs["layout"] = row.layout
    if column.hadamard:
        kwargs["hadamard"] = True
    with graph.inserting_before(first.node):
        both = new_node(graph, BOTH, (first.source, row.format), first.node.meta, **kwargs)
        outputs = [new_node(graph, operator.getitem, (both, i), first.node.meta) for i in range(6)]
    data, scales, outer, column_data, column_scales, column_outer = outputs
    _redirect(row.node, (data, scales, outer))
    apart = column.hadamard or formats.get(column.format).outer == "row"
    _redirect(column.node, (column_data, column_scales, column_outer if apart else outer))
    for output in outputs:
        if not output.users:
            graph.erase_node(output)


def _redirect(quantise: Node, replacements: tuple[Node, ...]) -> None:
    for user in list(quantise.users):
        user.replace_all_uses_with(replacements[user.args[1]])
        user.graph.erase_node(user)
    quantise.graph.erase_node(quantise)
