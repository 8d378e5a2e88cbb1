"""Add the operations of a Python function to a graph."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._inductor.pattern_matcher import fwd_only
from torch.fx import Graph, Node


def traced(graph: Graph, function: Callable, nodes: Sequence[Node]) -> Any:
    """The results of a function of nodes' values, as nodes that are added to the graph at its insertion point."""
    values = [node.meta["val"] for node in nodes]
    mode = next(value.fake_mode for value in values if isinstance(value, torch.Tensor))
    with mode:
        module = fwd_only(function, values)
    inputs = dict(zip(module.graph.find_nodes(op="placeholder"), nodes, strict=True))
    return graph.graph_copy(module.graph, inputs)
