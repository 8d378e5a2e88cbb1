"""Functions of tensors as nodes of a graph."""

from collections.abc import Callable, Sequence

import torch
from torch._inductor.pattern_matcher import fwd_only
from torch.fx import Graph, Node


def traced(graph: Graph, function: Callable, nodes: Sequence[Node]) -> Node:
    """The result of a function of nodes' values, traced into the graph at its insertion point.

    The operators are decomposed as Inductor decomposes them.
    """
    values = [node.meta["val"] for node in nodes]
    mode = next(value.fake_mode for value in values if isinstance(value, torch.Tensor))
    with mode:
        module = fwd_only(function, values)
    return graph.graph_copy(module.graph, dict(zip(module.graph.find_nodes(op="placeholder"), nodes, strict=True)))
