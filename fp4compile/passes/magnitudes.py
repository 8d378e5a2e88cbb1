"""The largest magnitude over the ranks of a process group, as nodes of a graph.

As integers magnitudes have their order, with NaN above all. Libraries of collectives may pass over NaN among floats.
"""

import torch
from torch.fx import Graph, Node

from fp4compile.analysis.graph import new_node

aten = torch.ops.aten


def bits_of(graph: Graph, magnitude: Node, meta: dict) -> Node:
    """The bits of float32 magnitudes, as int32."""
    bits = new_node(graph, aten.view.dtype, (magnitude, torch.int32), meta)
    return new_node(graph, aten.bitwise_and.Scalar, (bits, 0x7FFFFFFF), meta)


def largest_of_ranks(graph: Graph, bits: Node, group: str, meta: dict) -> Node:
    """The largest of each of int32 [n] over the ranks of a process group."""
    from torch.distributed import _functional_collectives  # noqa: F401  defines the operators

    c10d = torch.ops._c10d_functional
    started = new_node(graph, c10d.all_reduce.default, (bits, "max", group), meta)
    return new_node(graph, c10d.wait_tensor.default, (started,), meta)


def magnitude_of(graph: Graph, bits: Node, meta: dict) -> Node:
    """The float32 magnitudes of bits."""
    return new_node(graph, aten.view.dtype, (bits, torch.float32), meta)
