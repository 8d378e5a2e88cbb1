"""Merge the rowwise and the columnwise quantise of one tensor into one op, which reads the tensor once.

Entry: `merge_quantize(graph)`, on a forward or backward graph after the partitioner. A forward graph has such a pair
for an activation: fprop reads one quantise, the other is saved for wgrad. A backward graph has a pair for a gradient,
read by dgrad and wgrad. A pair must have the same format, layout, global or row scale, seed and groups. Only the
columnwise quantise may be Hadamard-transformed. No kernel quantises both ways where each matrix has its own global
scale, unless blocks are square.

Before that, equal quantises become one, because each packed layer (`fp4compile.pack_`) quantises its input separately.
"""

import operator
from dataclasses import replace

from torch.fx import Graph

from fp4compile.formats import formats
from fp4compile.ops.nodes import Quantise, new_node, replace_results
from fp4compile.passes.lib.equal_quantises import key_of, quantises_of, share


def merge_quantize(graph: Graph) -> int:
    """Replace every pair by one `quantize` along both dimensions; returns how many pairs there were."""
    share(graph)
    rows: dict[tuple, Quantise] = {}
    columns: dict[tuple, Quantise] = {}
    order = {node: place for place, node in enumerate(graph.nodes)}
    for found in quantises_of(graph):
        if not _may_be_of_a_pair(found):
            continue
        if found.dims == (-1,) and not found.hadamard:
            rows.setdefault(key_of(found, "dims", "hadamard"), found)
        elif found.dims == (-2,) and not (found.hadamard and found.outer is not None):
            columns.setdefault(key_of(found, "dims", "hadamard"), found)
    pairs = [(row, columns[key]) for key, row in rows.items() if key in columns]
    for row, column in pairs:
        first = min(row, column, key=lambda one: order[one.node])
        _replace(graph, row, column, first)
    return len(pairs)


def _may_be_of_a_pair(found: Quantise) -> bool:
    fmt = formats.get(found.format)
    # A static row scale is not shared by the two quantises.
    given_each = (found.outer is not None or found.amax is not None) and fmt.outer == "row"
    return not given_each and found.scale_rule == "amax" and not (found.each_matrix and not fmt.square)


def _replace(graph: Graph, row: Quantise, column: Quantise, first: Quantise) -> None:
    """Insert the merged quantise before `first`, and let the users of the pair read its results."""
    both = replace(row, x=first.x, dims=(-1, -2), hadamard=column.hadamard)
    with graph.inserting_before(first.node):
        node = both.new(graph, first.node.meta)
        outputs = [new_node(graph, operator.getitem, (node, i), first.node.meta) for i in range(6)]
    data, scales, outer, column_data, column_scales, column_outer = outputs
    replace_results(row.node, (data, scales, outer))
    replace_results(column.node, (column_data, column_scales, column_outer if both.spec.columns_separate else outer))
    for output in outputs:
        if not output.users:
            graph.erase_node(output)
