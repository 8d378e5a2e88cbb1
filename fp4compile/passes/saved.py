"""What lives from forward to backward: packed activations, for each product against the bf16 ones.

The rewrite marks every quantise that wgrad will read (`mark`); the partitioner then decides what is saved and what is
recomputed. `saved(graph)` reads that decision off a forward graph: the marked quantises among its outputs.
"""

import math
import operator
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

_MARK = "fp4compile_saved_for"


@dataclass(frozen=True)
class Saved:
    """A packed activation that is kept for the backward. Sizes in bytes; plain: in the dtype it came in.

    wgrad: name of the node in the joint graph that it is kept for.
    """

    wgrad: str
    packed: int
    plain: int


def mark(quantise: Node, wgrad: str) -> None:
    """Note the node of the wgrad that a quantise serves. Of several layers with one input, the first keeps it."""
    quantise.meta[_MARK] = wgrad


def saved(graph: Graph) -> list[Saved]:
    """The packed activations among the outputs of a forward graph; those of symbolic size are left out."""
    sizes: dict[Node, int] = {}
    for node in torch.utils._pytree.tree_leaves(graph.output_node().args):
        if isinstance(node, Node) and node.target is operator.getitem and _MARK in node.args[0].meta:
            quantise = node.args[0]
            sizes[quantise] = sizes.get(quantise, 0) + _bytes(node)
    found = [Saved(node.meta[_MARK], size, _bytes(node.args[0])) for node, size in sizes.items()]
    return [entry for entry in found if isinstance(entry.packed, int) and isinstance(entry.plain, int)]


def _bytes(node: Node):
    value = node.meta["val"]
    return math.prod(value.shape) * value.element_size()
