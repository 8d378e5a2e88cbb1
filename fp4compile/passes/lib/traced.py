"""Functions of tensors as nodes of a graph."""

from collections.abc import Callable, Sequence

import torch
from torch._inductor.pattern_matcher import fwd_only
from torch.fx import Graph, Node


def traced(graph: Graph, function: Callable, nodes: Sequence[Node]) -> Node:
    """The result of a function of nodes' values, traced into the graph at its insertion point.

    Inductor stores the result in the traced layout. Views of it in another dtype are no part of Inductor's kernels, of
    which there are none with some dtypes of scales.
    """
    values = [node.meta["val"] for node in nodes]
    mode = next(value.fake_mode for value in values if isinstance(value, torch.Tensor))
    with mode:
        module = fwd_only(function, values)
    inputs = dict(zip(module.graph.find_nodes(op="placeholder"), nodes, strict=True))
    result = graph.graph_copy(module.graph, inputs)
    result.meta["inductor_realize_to_strides"] = True
    return result
