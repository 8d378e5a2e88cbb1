"""Merge the row- and the column-wise quantise of one tensor into `quantize_both`, which reads it once.

Entry: `merge_quantize(graph)`, on a forward or backward graph after the partitioner. In a forward graph these are the
activation of fprop and the one that is kept for wgrad, in a backward graph the gradient of dgrad and that of wgrad.
The pair must have the same format, layout, outer scale and seed; a Hadamard transform belongs to the columns.

Before that, of quantises that do the same the first one serves all: packed layers quantise their input each for itself.
"""

import operator

from torch.fx import Graph, Node

from fp4compile import formats
from fp4compile.passes.graph import QUANTIZE, QUANTIZE_BOTH, Quantise, new_node, quantise_of


def merge_quantize(graph: Graph) -> int:
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


def _replace(graph: Graph, row: Quantise, column: Quantise, first: Quantise) -> None:
    options = {"outer": row.outer, "seed": row.seed}
    kwargs = {name: value for name, value in options.items() if value is not None}
    if row.layout != "linear":
        kwargs["layout"] = row.layout
    if column.hadamard:
        kwargs["hadamard"] = True
    with graph.inserting_before(first.node):
        both = new_node(graph, QUANTIZE_BOTH, (first.source, row.format), first.node.meta, **kwargs)
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
