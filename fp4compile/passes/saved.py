"""Which packed activations are saved for the backward, and their sizes packed and unquantised.

`rewrite` marks every quantise whose result a wgrad reads (`mark`). The partitioner then decides what is saved for the
backward and what is recomputed. `saved(graph)` reads this decision off a forward graph: the saved activations are the
marked quantises among its outputs.
"""

import math
import operator
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

_MARK = "fp4compile_saved_for"


@dataclass(frozen=True)
class Saved:
    """A packed activation that is saved for the backward.

    wgrad: name, in the joint graph, of the wgrad node that reads it. packed: its size in bytes, scales included.
    plain: the size in bytes of the activation in its own dtype.
    """

    wgrad: str
    packed: int
    plain: int


def mark(quantise: Node, wgrad: str) -> None:
    """Note on a quantise the name of the wgrad that reads it, or of the first wgrad where layers share their input."""
    quantise.meta[_MARK] = wgrad


def saved(graph: Graph) -> list[Saved]:
    """The packed activations of known size among the outputs of a forward graph."""
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
