"""Dequantise packed weights where they are read, in the backward graph too.

A layer's input gradient multiplies the dequantised weight. The partitioner would compute that weight in the forward
graph and save it until the backward pass, because by default it recomputes no custom operator. All layers' weights in
high precision would then be in memory at once.
"""

from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from fp4compile.analysis.gradients import tangent_dependent
from fp4compile.ops.quantize import DEQUANTIZE


def recompute(graph: Graph, decisions: object) -> int:
    """Mark dequantised weights for the partitioner to recompute. Returns how many weights a gradient reads.

    graph: a joint graph; other graphs are not changed. decisions: unused; every pass on joint graphs takes them.
    """
    gradients = tangent_dependent(graph)
    if not gradients:
        return 0
    found: set[Node] = set()
    for node in graph.nodes:
        values = node.all_input_nodes
        if node.target is DEQUANTIZE or (values and all(value in found for value in values)):
            found.add(node)
    weights = [node for node in found if gradients & node.users.keys()]
    if weights:
        for node in found - gradients:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    return len(weights)
