"""Merge the rowwise and the columnwise quantise of one tensor into one op, which reads the tensor once.

Entry: `merge_quantize(graph)`, on a forward or backward graph after the partitioner. A forward graph has such a pair
for an activation: one for fprop, the other saved for wgrad. A backward graph has one for a gradient: dgrad and wgrad.
A pair must have the same format, layout, outer scale and seed. Only the columnwise one may be Hadamard-transformed.
`quantize_both` takes the place of two `quantize`, and `quantize_grouped_both` that of two `quantize_grouped` of the
same groups, or of matrices in square blocks. Other matrices with an outer scale each have no kernel that does both.

Before that, equal quantises become one. Packed layers (`fp4compile.pack_`) each quantise their input by themselves.
"""

import operator

from torch.fx import Graph, Node

from fp4compile.analysis.graph import (
    QUANTIZE,
    QUANTIZE_BOTH,
    QUANTIZE_GROUPED,
    QUANTIZE_GROUPED_BOTH,
    Quantise,
    new_node,
    quantise_of,
)
from fp4compile.formats import formats

_BOTH = {QUANTIZE: QUANTIZE_BOTH, QUANTIZE_GROUPED: QUANTIZE_GROUPED_BOTH}


def merge_quantize(graph: Graph) -> int:
    """Replace every pair by one `quantize_both`; returns how many pairs there were."""
    _share(graph)
    rows: dict[tuple, Quantise] = {}
    columns: dict[tuple, Quantise] = {}
    order = {node: place for place, node in enumerate(graph.nodes)}
    for found in _quantises(graph):
        if found.groups == (None,) and not formats.get(found.format).square:
            continue
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
    """Replace quantises of the same value in the same way by the first of them."""
    first: dict[tuple, Node] = {}
    for found in _quantises(graph):
        node = found.node
        kept = first.setdefault((found.key, found.dim, found.hadamard), node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            graph.erase_node(node)


def _quantises(graph: Graph) -> list[Quantise]:
    """Every quantise of the graph, in the order of each op's nodes."""
    return [quantise_of(node) for op in _BOTH for node in graph.find_nodes(op="call_function", target=op)]


def _replace(graph: Graph, row: Quantise, column: Quantise, first: Quantise) -> None:
    """Put the op of both before `first`, and let the users of the pair read its results."""
    options = {"outer": row.outer, "seed": row.seed}
    kwargs = {name: value for name, value in options.items() if value is not None}
    if row.layout != "linear":
        kwargs["layout"] = row.layout
    if column.hadamard:
        kwargs["hadamard"] = True
    with graph.inserting_before(first.node):
        args = (first.source, *first.groups, row.format)
        both = new_node(graph, _BOTH[first.node.target], args, first.node.meta, **kwargs)
        outputs = [new_node(graph, operator.getitem, (both, i), first.node.meta) for i in range(6)]
    data, scales, outer, column_data, column_scales, column_outer = outputs
    _redirect(row.node, (data, scales, outer))
    # After a Hadamard transform, or with a scale a row, the columns have an outer scale of their own.
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
